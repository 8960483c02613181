"""A scripted engine that takes prompts as ids, and as messages, and answers with the ids it is told to sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fakes.engine import SSE_HEADERS, Answer, Received, Reply, Sampled, ScriptedEngine, json_answer, sse
from outrider.renderers.template import TemplateRenderer
from outrider.wire import ReplyDelta

Ids = list[int]


class TokenEngine(ScriptedEngine):
    """Over ``/v1/completions`` it takes ids as they are. Over chat it renders the messages, as engines do."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        super().__init__()
        self.renderer = renderer

    def forget(self) -> None:
        super().forget()
        self.says: deque[Ids] = deque()
        """Ids of the next answers, the last one again and again."""
        self.pick: Callable[[Sequence[int]], Ids] | None = None
        """Ids of the answer to a prompt, in place of `says`."""
        self.prompts: list[Ids] = []
        """All prompts so far, as ids."""
        self.finish_reason = "stop"
        self.calls: list[dict[str, Any]] = []
        """What chat answers tell as calls, in place of what is parsed from the ids."""

    def default(self, received: Received) -> Answer:
        if received.path not in ("/v1/chat/completions", "/v1/completions"):
            return json_answer({"detail": "Not Found"}, status=404)
        asked = received.json
        chat = received.path == "/v1/chat/completions"
        self.prompt_ids = self._render(asked) if chat else asked["prompt"]
        self.prompts.append(list(self.prompt_ids))
        sampled = [self._sampled(asked, chat) for _ in range(asked.get("n") or 1)]
        reply = Reply(
            asked=asked, chat=chat, sampled=sampled, prompt_ids=self.prompt_ids, id=f"cmpl-{len(self.prompts)}"
        )
        if asked.get("stream"):
            return Answer(headers=dict(SSE_HEADERS), chunks=sse(*reply.chunks()), delay_s=self.delay_s)
        return json_answer(reply.body(), delay_s=self.delay_s)

    def _sampled(self, asked: dict[str, Any], chat: bool) -> Sampled:
        ids = self.choose(asked, chat)
        pieces = [self.renderer.text.decode([token]) for token in ids]
        calls = self.calls if chat else []
        reason = "tool_calls" if calls else self.finish_reason
        if calls:
            pieces = [""] * len(ids)
        elif chat:  # what an engine's own parser makes of it
            said = self._parsed(ids, asked.get("tools") or [])
            pieces = [said.content, *[""] * (len(ids) - 1)]
            calls = [
                {"id": f"call_{len(self.prompts)}_{n}", "type": "function"}
                | {"function": {"name": call.name, "arguments": call.arguments}}
                for n, call in enumerate(said.calls)
            ]
            reason = "tool_calls" if calls else reason
        return Sampled(pieces=pieces, ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason, tool_calls=calls)

    def choose(self, asked: dict[str, Any], chat: bool) -> Ids:
        """What is sampled after `self.prompt_ids`."""
        if self.pick is not None:
            return self.pick(self.prompt_ids)
        return self.says.popleft() if len(self.says) > 1 else self.says[0]

    def _parsed(self, ids: Ids, tools: list[dict[str, Any]]) -> ReplyDelta:
        parser = self.renderer.parser(self.prompt_ids, tools)
        parts = [parser.feed(ids), parser.finish()]
        return ReplyDelta(
            content="".join(part.content for part in parts), calls=tuple(c for part in parts for c in part.calls)
        )

    def _render(self, asked: dict[str, Any]) -> Ids:
        messages = [{**message, "content": _text(message.get("content"))} for message in asked["messages"]]
        return self.renderer.render(messages, asked.get("tools") or [], asked.get("chat_template_kwargs") or {})


def _text(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
