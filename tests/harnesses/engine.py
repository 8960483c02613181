"""A scripted engine that plays a model well enough to take any harness through one task with a tool.

A request that offers tools and holds no result yet gets one call to the simplest tool; a later one gets a final answer
that quotes the result, or a call to the tool that the harness ends a run with. Harnesses that put their protocol into
plain text get plain text. The engine speaks chat completions alone: other dialects are the gateway's to translate.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.engine import Answer, Json, Received, Reply, Sampled, ScriptedEngine, json_answer, sse

COMMAND = "expr 19 + 23"
QUOTE = "The tool said: "
"""Begins every final answer; the tool's own words follow."""

MARK_START, MARK_END = "<|im_start|>", "<|im_end|>"
_PIECES = re.compile(r"<\|im_(?:start|end)\|>|\w+|\s+|[^\w\s]")

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


@dataclass(slots=True)
class Vocabulary:
    """Gives each piece of text an id at first sight, so that equal texts have equal ids."""

    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> tuple[list[str], list[int]]:
        pieces = _PIECES.findall(text)
        return pieces, [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]


class ToolUsingEngine(ScriptedEngine):
    """With `odd_arguments` it spaces JSON as no serialiser does: a re-rendered history then differs from its tokens."""

    def __init__(self, *, odd_arguments: bool = False) -> None:
        super().__init__()
        self._separators = (" ,  ", " :  ") if odd_arguments else (", ", ": ")
        self._vocabulary = Vocabulary()

    def default(self, received: Received) -> Answer:
        if received.path != "/v1/chat/completions":
            return super().default(received)
        asked = received.json
        _, prompt_ids = self._vocabulary.encode(render(asked))
        sampled = self._sample(decide(asked), call_id=f"call_{len(self.received):08d}")
        reply = Reply(
            asked=asked, chat=True, sampled=[sampled], prompt_ids=prompt_ids, id=f"chatcmpl-{len(self.received)}"
        )
        if asked.get("stream"):
            return Answer(headers={"content-type": "text/event-stream; charset=utf-8"}, chunks=sse(*reply.chunks()))
        return json_answer(reply.body())

    def _sample(self, decision: Say | Use, *, call_id: str) -> Sampled:
        if isinstance(decision, Say):
            pieces, ids = self._vocabulary.encode(decision.text + MARK_END)
            return Sampled(pieces=[*pieces[:-1], ""], ids=ids, logprobs=[-0.5] * len(ids))
        arguments = json.dumps(decision.arguments, separators=self._separators)
        _, ids = self._vocabulary.encode(render_call(decision.tool, arguments) + MARK_END)
        call = {"id": call_id, "type": "function", "function": {"name": decision.tool, "arguments": arguments}}
        return Sampled(
            pieces=[""] * len(ids),
            ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason="tool_calls",
            tool_calls=[call],
        )


# -- the chat template -------------------------------------------------------------------------------------------------


def render(asked: Json) -> str:
    """The prompt of a chat request, in the manner of common templates: arguments are parsed and written anew."""
    parts = [f"{MARK_START}tools\n{json.dumps(asked.get('tools') or [])}{MARK_END}\n"]
    for message in asked["messages"]:
        body = text_of(message.get("content"))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            body += render_call(function["name"], json.dumps(json.loads(function["arguments"])))
        parts.append(f"{MARK_START}{message['role']}\n{body}{MARK_END}\n")
    return "".join(parts) + f"{MARK_START}assistant\n"


def render_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def text_of(content: Any) -> str:
    """The text of a message's content, given as a string or as blocks."""
    if isinstance(content, list):
        return "\n".join(str(block.get("text") or "") for block in content)
    return content or ""


# -- what the model does -----------------------------------------------------------------------------------------------


def decide(asked: Json) -> Say | Use:
    messages = asked["messages"]
    tools = {tool["function"]["name"]: tool["function"] for tool in asked.get("tools") or () if "function" in tool}
    result = tool_result(messages)
    prompt = "\n".join(text_of(message.get("content")) for message in messages if message["role"] != "assistant")
    if not tools:
        return decide_in_text(asked, prompt, result)
    if result is None:
        chosen = simplest(tools)
        return Use(tool=chosen["name"], arguments=fill(chosen.get("parameters") or {}))
    answer = QUOTE + result
    if SUBMIT in prompt and "bash" in tools:
        return Use(tool="bash", arguments={"command": submission(answer)})
    if "final_answer" in tools:
        return Use(tool="final_answer", arguments={"answer": answer})
    return Say(text=answer)


def decide_in_text(asked: Json, prompt: str, result: str | None) -> Say:
    """For harnesses that offer no tools in the protocol: theirs are in the prompt, or they only want a text."""
    schema = ((asked.get("response_format") or {}).get("json_schema") or {}).get("schema")
    if schema:
        return Say(text=json.dumps(fill(schema)))
    if SUBMIT in prompt:
        command = COMMAND if result is None else submission(QUOTE + result)
        return Say(text=f"THOUGHT: one step.\n\n```mswea_bash_command\n{command}\n```")
    if "<tools>" in prompt and result is None:
        offered = json.loads(re.search(r"<tools>\s*(\{.*\})", prompt)[1])  # type: ignore[index]
        function = offered.get("function", offered)
        return Say(text=render_call(function["name"], json.dumps(fill(function["parameters"]))))
    return Say(text="A sum" if result is None else QUOTE + result)


def tool_result(messages: Sequence[Json]) -> str | None:
    """What the last tool said, in one line; None before there was one."""
    for message in reversed(messages):
        text = text_of(message.get("content"))
        in_text = message["role"] == "user" and re.search(r"<tool_response>|Observation:|<returncode>", text)
        if message["role"] == "tool" or in_text:
            return " ".join(text.split())[-300:]
    return None


def simplest(tools: dict[str, Json]) -> Json:
    for name in PREFERRED:
        for offered, function in tools.items():
            if offered.lower() == name:
                return function
    usable = [function for name, function in tools.items() if name.lower() not in NEVER]
    return min(usable, key=lambda function: len((function.get("parameters") or {}).get("required") or ()))


def submission(answer: str) -> str:
    return f"printf '%s\\n' {SUBMIT} {shlex.quote(answer)}"


def fill(schema: Any, name: str = "") -> Any:
    """A value that fits a JSON schema, with what it requires and no more."""
    if isinstance(schema, list):  # Qwen-Agent describes parameters as a list
        return {entry["name"]: fill(entry, entry["name"]) for entry in schema}
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return fill(schema[choice][0], name)
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = dict.fromkeys([*(schema.get("required") or ()), *({"command", "cmd"} & properties.keys())])
        return {key: fill(properties.get(key) or {}, key) for key in wanted}
    if kind == "array":
        return COMMAND.split() if name == "command" else [fill(schema.get("items") or {}, name)]
    if kind in ("integer", "number"):
        return {"a": 19, "b": 23}.get(name, 1)
    if kind in ("boolean", "null"):
        return False if kind == "boolean" else None
    texts = {"command": COMMAND, "cmd": COMMAND, "security_risk": "LOW", "summary": "add two numbers"}
    return texts.get(name, "add two numbers")
