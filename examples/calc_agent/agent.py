"""A small tool-using agent: asks the model for a calculator call, carries it out, and prints the model's answer.

OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python agent.py "What is 12 times 34?"
"""

from __future__ import annotations

import json
import operator
import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

TOOLS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
SYSTEM = """You solve word problems with a calculator. First reply with one JSON tool call and nothing else:
{"tool": "add", "a": 1, "b": 2}
Tools: add, subtract, multiply. Then give the answer."""
ASK = "{question}\nJSON tool call, please."
EXAMPLE: tuple[ChatCompletionMessageParam, ...] = (
    {"role": "user", "content": ASK.format(question="A train has 58 passengers and 17 get off. How many are left?")},
    {"role": "assistant", "content": '{"tool": "subtract", "a": 58, "b": 17}'},
    {"role": "user", "content": "Result: 41"},
    {"role": "assistant", "content": "The answer is 41."},
)


def opening(question: str) -> list[ChatCompletionMessageParam]:
    """The history before the first call: system prompt, one worked example, the question."""
    ask = ASK.format(question=question)
    return [{"role": "system", "content": SYSTEM}, *EXAMPLE, {"role": "user", "content": ask}]


def run_tool(text: str) -> str:
    """Carry out the call the model wrote. What is wrong with it goes back to the model in place of a result."""
    try:
        call = json.loads(text)
        tool, a, b = TOOLS[call["tool"]], call["a"], call["b"]
    except (ValueError, RecursionError):
        return "Error: that is no JSON."
    except (KeyError, TypeError):
        return "Error: give tool (add, subtract or multiply), a and b."
    if type(a) is not int or type(b) is not int:
        return "Error: a and b must be whole numbers."
    return f"Result: {tool(a, b)}"


def main() -> None:
    client = OpenAI()
    model = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    messages = opening(sys.argv[1])

    def ask() -> str:
        completion = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
        return completion.choices[0].message.content or ""

    call = ask()
    messages += [{"role": "assistant", "content": call}, {"role": "user", "content": run_tool(call)}]
    print(ask())


if __name__ == "__main__":
    main()
