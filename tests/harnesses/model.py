"""What the scripted model says: enough to take any harness through one task with a tool.

A request that offers tools gets a call to the simplest one until there are results enough; then comes a final answer
that quotes the last result, or a call to the tool that the harness ends a run with. Harnesses that put their protocol
into plain text get plain text.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakes.engine import Json

FIRST, SECOND = 41235, 27184
RESULT = str(FIRST + SECOND)
"""What the last call to the tool gives; it stands nowhere else, so whoever tells it has got it from the tool."""
QUOTE = "The tool said: "
"""Begins every final answer; the tool's own words follow."""

CALL, CALL_END = "<tool_call>", "</tool_call>"

# By name, best first. Shells come before everything else that a coding agent offers.
PREFERRED = ("add", "bash", "exec_command", "run_shell_command", "terminal", "execute", "exec")
NEVER = {"final_answer", "finish", "think", "task", "agent", "skill"}
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent ends when a command prints this first


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    tool: str
    arguments: Json


def decide(asked: Json, turns: int = 2) -> Say | Use:
    """What the model answers in a conversation that is to have `turns` calls, the last one with the answer."""
    messages = asked["messages"]
    tools = {tool["function"]["name"]: tool["function"] for tool in asked.get("tools") or () if "function" in tool}
    results = tool_results(messages)
    missing = turns - 1 - len(results)
    prompt = "\n".join(text_of(message.get("content")) for message in messages if message["role"] != "assistant")
    if not tools:
        return decide_in_text(asked, prompt, results, missing)
    if missing > 0:
        chosen = simplest(tools)
        return Use(tool=chosen["name"], arguments=Sum(missing).fill(chosen.get("parameters") or {}))
    answer = QUOTE + results[-1]
    if SUBMIT in prompt and "bash" in tools:
        return Use(tool="bash", arguments={"command": submission(answer)})
    if "final_answer" in tools:
        return Use(tool="final_answer", arguments={"answer": answer})
    return Say(text=answer)


def decide_in_text(asked: Json, prompt: str, results: Sequence[str], missing: int) -> Say:
    """For requests without tools in the protocol: they stand in the prompt, or only a text is wanted."""
    schema = ((asked.get("response_format") or {}).get("json_schema") or {}).get("schema")
    if schema:
        return Say(text=json.dumps(Sum(1).fill(schema)))
    if SUBMIT in prompt:
        command = Sum(missing).command if missing > 0 else submission(QUOTE + results[-1])
        return Say(text=f"THOUGHT: one step.\n\n```mswea_bash_command\n{command}\n```")
    if "final_answer(" in prompt:  # smolagents' CodeAgent
        numbers = Sum(missing).numbers
        step = f"print(add({numbers['a']}, {numbers['b']}))"
        code = step if missing > 0 else f"final_answer({QUOTE + results[-1]!r})"
        return Say(text=f"Thought: one step.\n<code>\n{code}\n</code>")
    offered = re.search(r"<tools>\s*(\{.*\})", prompt)
    if offered and missing > 0:
        tool = json.loads(offered[1])
        function = tool.get("function", tool)
        return Say(text=render_call(function["name"], json.dumps(Sum(missing).fill(function["parameters"]))))
    return Say(text=QUOTE + results[-1] if results else "A sum")


def tool_results(messages: Sequence[Json]) -> list[str]:
    """What the tools said, each in one line. Some harnesses tell it in a message of the user."""
    found = []
    for message in messages:
        text = text_of(message.get("content"))
        in_text = message["role"] == "user" and re.search(r"<tool_response>|Observation:|<returncode>", text)
        if message["role"] == "tool" or in_text:
            told = text.replace("Observation:", " ")  # a stop string of smolagents': said again it would end the answer
            found.append(" ".join(told.split())[-300:])
    return found


def simplest(tools: dict[str, Json]) -> Json:
    for name in PREFERRED:
        for offered, function in tools.items():
            if offered.lower() == name:
                return function
    usable = [function for name, function in tools.items() if name.lower() not in NEVER]
    return min(usable, key=lambda function: len((function.get("parameters") or {}).get("required") or ()))


def submission(answer: str) -> str:
    return f"printf '%s\\n' {SUBMIT} {shlex.quote(answer)}"


class Sum:
    """Arguments for the tool with `missing` results to come. The last sum is `RESULT`; all differ, since harnesses stop
    a model that repeats itself."""

    def __init__(self, missing: int) -> None:
        self.numbers = {"a": FIRST, "b": SECOND + 1 - missing}
        self.command = f"expr {FIRST} + {SECOND + 1 - missing}"
        # Codex's freeform tool takes JavaScript; a gateway gives a freeform tool one argument called `input`.
        self.script = f"text(JSON.stringify(await tools.exec_command({json.dumps({'cmd': self.command})})));"

    def fill(self, schema: Any, name: str = "") -> Any:
        """A value that fits a JSON schema, with what it requires and no more."""
        if isinstance(schema, list):  # Qwen-Agent may describe parameters as a list
            return {entry["name"]: self.fill(entry, entry["name"]) for entry in schema}
        for choice in ("anyOf", "oneOf", "allOf"):
            if schema.get(choice):
                return self.fill(schema[choice][0], name)
        if schema.get("enum"):
            return schema["enum"][0]
        kind = schema.get("type", "string")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            properties = schema.get("properties") or {}
            shell = [name for name in ("command", "cmd") if name in properties]
            wanted = dict.fromkeys([*(schema.get("required") or ()), *shell])
            return {key: self.fill(properties.get(key) or {}, key) for key in wanted}
        if kind == "array":
            return self.command.split() if name == "command" else [self.fill(schema.get("items") or {}, name)]
        plain = {"integer": self.numbers.get(name, 1), "number": self.numbers.get(name, 1), "boolean": False}
        return None if kind == "null" else plain.get(kind, self._text(name))

    def _text(self, name: str) -> str:
        texts = {"command": self.command, "cmd": self.command, "input": self.script, "security_risk": "LOW"}
        return texts.get(name, "add two numbers")


def render_call(name: str, arguments: str) -> str:
    return f'{CALL}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CALL_END}'


def text_of(content: Any) -> str:
    """The text of a message's content, given as a string or as blocks."""
    if isinstance(content, list):
        return "\n".join(str(block.get("text") or "") for block in content)
    return content or ""
