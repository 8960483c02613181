"""An agent with one key that talks through a gateway to a `TokenEngine`, and what may be asked about it afterwards."""

from __future__ import annotations

from outrider.trajectory import build

USER = {"role": "user", "content": "What is 2 + 3?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"path":"é","n":1.0}}\n</tool_call>'
END = "<|im_end|>"


class Talk:
    """An agent with one key, and the ids that the engine is told to say."""

    def __init__(self, gateway, engine, renderer, **session):
        self.gateway, self.engine, self.renderer = gateway, engine, renderer
        self.key = gateway.open(**session)

    def ids(self, text):
        return self.renderer.text.encode(text)

    def ask(self, messages, say="ok" + END, **fields):
        """The message that the agent gets; `say` is sampled as text or ids."""
        self.engine.says.append(self.ids(say) if isinstance(say, str) else say)
        if len(self.engine.says) > 1:
            self.engine.says.popleft()
        got = self.gateway.chat(self.key, messages=messages, **fields)
        assert got.status == 200, got.body
        if fields.get("stream"):
            return streamed(got.events)
        return got.json["choices"][0]["message"]

    def prompt(self, number=-1):
        return self.engine.prompts[number]

    def continues(self, said, number=-1):
        """The last prompt begins with the one before and the ids of `said`."""
        before = self.prompt(number - 1) + (self.ids(said) if isinstance(said, str) else said)
        return self.prompt(number)[: len(before)] == before

    def counted(self):
        return self.gateway.client._request("GET", "/admin/stats")["continuation"]

    def samples(self):
        calls = self.gateway.store.calls("attempt-1")
        return build(calls).samples(rollout_id="r", group_id="g")


def streamed(events):
    """The message that a stream of chat chunks adds up to."""
    assert events[-1] == "[DONE]"
    message = {"role": "", "content": None}
    calls = {}
    for chunk in events[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["role"] += delta.get("role", "")
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                assert call["index"] not in calls
                calls[call.pop("index")] = call
    message["content"] = message["content"] or (None if calls else "")
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def result(message, content="5", number=0):
    return {"role": "tool", "tool_call_id": message["tool_calls"][number]["id"], "content": content}
