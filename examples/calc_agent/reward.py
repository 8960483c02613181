"""The calculator agent's reward: a well-formed call, the right tool, the right arguments, the right final answer.

Partial credit shows a weak model the way: it has a call in the right form long before it has a right answer. The answer
counts only where the right call was made and its result stood in the prompt, so that guessing a number pays nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outrider.types import Call, CallState, Episode, Score

WEIGHTS = {"format": 0.1, "tool": 0.2, "arguments": 0.2, "answer": 0.5}
TOOLS = ("add", "subtract", "multiply")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def score(episode: Episode) -> Score:
    """Raises `ValueError` where no answered call was recorded: then there is nothing to judge."""
    calls = [call for call in episode.calls if call.state is CallState.COMPLETE and call.status == 200]
    if not calls:
        raise ValueError("the attempt has no answered call")
    task = episode.task.fields
    parts = dict.fromkeys(WEIGHTS, 0.0)
    reason = _judge(task, calls, episode.attempt.stdout_tail, parts)
    return Score(value=round(sum(parts.values()), 6), reason=reason, parts=parts)


def _judge(task: Mapping[str, Any], calls: list[Call], stdout: str, parts: dict[str, float]) -> str:
    """Fill in `parts`; return the sentence that says where credit ended."""
    reply = reply_text(calls[0])
    call = parse_call(reply)
    if call is None:
        return f"The first reply is no JSON tool call: {_short(reply)}"
    parts["format"] = WEIGHTS["format"]
    given, wanted = [call["a"], call["b"]], [task["a"], task["b"]]
    same_arguments = given == wanted or (call["tool"] != "subtract" and given == wanted[::-1])
    if call["tool"] == task["tool"]:
        parts["tool"] = WEIGHTS["tool"]
    if same_arguments:
        parts["arguments"] = WEIGHTS["arguments"]
    if call["tool"] != task["tool"]:
        return f"The tool is {call['tool']}; {task['tool']} was needed."
    if not same_arguments:
        return f"The arguments are {given}; {wanted} were needed."
    if len(calls) < 2 or last_message(calls[1]) != f"Result: {task['answer']}":
        return "The model was not shown the result."
    if not answers(stdout, task):
        return f"The final answer is not {task['answer']}: {_short(stdout)}"
    parts["answer"] = WEIGHTS["answer"]
    return "Right call, right answer."


def parse_call(text: str) -> dict[str, Any] | None:
    """The tool call, if `text` is one JSON object with a known tool and two whole numbers, and nothing else."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or set(call) != {"tool", "a", "b"} or call["tool"] not in TOOLS:
        return None
    return call if type(call["a"]) is int and type(call["b"]) is int else None


def answers(text: str, task: Mapping[str, Any]) -> bool:
    """Whether `text` ends on the answer. Numbers not from the task spoil it: listing many is no answer."""
    numbers = [float(number.replace(",", "")) for number in NUMBER.findall(text)]
    return bool(numbers) and numbers[-1] == task["answer"] and set(numbers) <= {task["a"], task["b"], task["answer"]}


def reply_text(call: Call) -> str:
    """What the model wrote, from the recorded response. Raises where that is no chat completion."""
    content = json.loads(call.response)["choices"][0]["message"]["content"]
    return content if isinstance(content, str) else ""


def last_message(call: Call) -> str:
    """The newest message the model was shown, from the recorded request."""
    content = json.loads(call.request)["messages"][-1]["content"]
    return content if isinstance(content, str) else ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:79] + "…"
