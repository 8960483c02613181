"""Qwen-Agent; `raw` leaves tool calls to the protocol, else they stand in the text."""

import json
import sys

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("add")
class Add(BaseTool):
    description = "Add two whole numbers."
    parameters = {  # noqa: RUF012 (the base class wants it so)
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }

    def call(self, params: str, **kwargs) -> str:
        values = json.loads(params)
        return str(values["a"] + values["b"])


if __name__ == "__main__":
    llm = {
        "model": "qwen-plus",
        "model_type": "oai",
        "generate_cfg": {"use_raw_api": sys.argv[3] == "raw"},
    }
    agent = Assistant(llm=llm, function_list=["add"])
    *_, replies = agent.run(
        [{"role": "user", "content": "What is 41235 + 27184? Find out with the tool, then tell me."}]
    )
    print(replies[-1]["content"])
