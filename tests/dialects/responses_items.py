"""Items of Responses requests, and what they become in chat."""

from __future__ import annotations

from outrider.dialects.openai_responses_request import to_chat

FUNCTION = {
    "type": "function",
    "name": "bash",
    "description": "run",
    "parameters": {"type": "object", "properties": {}},
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": GRAMMAR}
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


def body(*items, **more):
    return {"model": "m", "input": list(items) or "hi", **more}


def messages_of(*items, **more):
    return to_chat(body(*items, **more)).request["messages"]


def user(text):
    return {"role": "user", "content": text}


def message(role, *texts, kind="input_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def call(id="c1", name="bash", arguments="{}", **more):
    return {"type": "function_call", "id": "fc_1", "call_id": id, "name": name, "arguments": arguments, **more}


def output(text="ok", id="c1", kind="function_call_output"):
    return {"type": kind, "call_id": id, "output": text}


def chat_call(id="c1", name="bash", arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
