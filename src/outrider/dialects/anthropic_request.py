"""From an Anthropic Messages request to a chat-completions request.

What has no counterpart there (`UNSPOKEN`; tools and blocks that only Anthropic's servers can act on) is left out and
noted. Fields that Anthropic doesn't know are meant for the engine, and go to it as they are.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from outrider.dialects.translate import (
    ChatTranslation,
    LateSystem,
    ask_for_effort,
    ask_for_stream,
    bad,
    carry_extensions,
    content_of,
    dumps,
    file_part,
    function_tool,
    image_part,
    join_head,
    place_late_system,
    text_part,
    tool_call,
    tool_messages,
    want_count,
    want_list,
    want_name,
    want_number,
    want_object,
    want_text,
)
from outrider.dialects.translate_reasoning import unseal
from outrider.types import Json

PREFIX = "msg_"  # of an answer's id
# Claude Code puts a line of this kind, different in each request, before its system prompt.
BILLING_HEADER = "x-anthropic-billing-header:"
# Anthropic's own name for a tool input that is no JSON object, when it has to travel as one.
INVALID_JSON = "INVALID_JSON"

# All fields that Anthropic knows, of its beta and of the clouds that resell it too: those that are translated, and
# those that chat has no word for or that only Anthropic's servers can act on.
SPOKEN = frozenset({
    "model", "max_tokens", "messages", "system", "temperature", "top_p", "top_k", "stop_sequences", "stream", "tools",
    "tool_choice", "thinking", "output_config", "output_format",
})  # fmt: skip
UNSPOKEN = frozenset({
    "anthropic_beta", "anthropic_version", "betas", "billing_policy", "cache_control", "compaction", "container",
    "context_management", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "mcp_servers",
    "metadata", "service_tier", "speed", "thread", "user_profile_id", "workspace_id",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesState:
    """What the way back needs of a Messages request."""

    id: str
    """Of the answer: ``msg_…``."""
    model: str
    stream: bool = False
    eager_tools: frozenset[str] = frozenset()
    """Tools whose input the client wants piece by piece, be it valid or not."""
    thinking: bool = True
    """False where the client switched thinking off."""
    thinking_text: bool = True
    """False where the client wants thinking blocks with the signature only."""
    shows_ids: bool = False
    """The client itself asked for token ids."""


def to_chat(body: Json, *, id: str = "", late_system: LateSystem = "system") -> ChatTranslation[MessagesState]:
    """Translate a body of ``POST /v1/messages``. The answer's `id` is made up where none is given.

    Raises `RequestError` naming the field that is wrong.
    """
    if "max_tokens" not in body:
        raise bad("max_tokens", "is required.")
    return _Translator(body, late_system, id).translate()


def count_to_chat(body: Json, *, late_system: LateSystem = "system") -> ChatTranslation[MessagesState]:
    """Translate a body of ``POST /v1/messages/count_tokens``: the chat request whose prompt is to be counted.

    It has the prompt of the Messages call with the same fields, to the token.
    """
    return _Translator({**body, "stream": False}, late_system).translate()


class _Translator:
    def __init__(self, body: Json, late_system: LateSystem, id: str = "") -> None:
        self.id = id or PREFIX + uuid.uuid4().hex[:24]
        self.body = body
        self.late_system = late_system
        self.notes: list[str] = []

    def translate(self) -> ChatTranslation[MessagesState]:
        body = self.body
        request: Json = {"model": want_name(body.get("model"), "model"), "messages": self._messages()}
        tools = self._tools()
        if tools:
            request["tools"] = tools
        self._tool_choice(request, {tool["function"]["name"] for tool in tools})
        self._sampling(request)
        self._format(request)
        last = request["messages"][-1]
        if last["role"] == "assistant" and "tool_calls" not in last:
            # The client began the answer itself. vLLM's and SGLang's words for going on with it.
            request |= {"continue_final_message": True, "add_generation_prompt": False}
        self.notes += carry_extensions(body, request, spoken=SPOKEN, unspoken=UNSPOKEN)
        if body.get("stream") is True:
            ask_for_stream(request)
        thinking = body.get("thinking")
        thinking = thinking if isinstance(thinking, dict) else {}
        state = MessagesState(
            id=self.id,
            model=request["model"],
            stream=body.get("stream") is True,
            eager_tools=frozenset(
                tool["name"] for tool in body.get("tools") or () if _is_own(tool) and tool.get("eager_input_streaming")
            ),
            thinking=thinking.get("type") != "disabled",
            thinking_text=thinking.get("display") != "omitted",
            shows_ids=body.get("return_token_ids") is True,
        )
        return ChatTranslation(request=request, state=state, notes=tuple(self.notes))

    # -- parameters ------------------------------------------------------------------------------------------------

    def _sampling(self, request: Json) -> None:
        body = self.body
        if "max_tokens" in body:
            request["max_tokens"] = want_count(body["max_tokens"], "max_tokens")
        for name in ("temperature", "top_p", "top_k"):
            if body.get(name) is not None:
                request[name] = want_number(body[name], name)
        stop = body.get("stop_sequences")
        if stop:
            request["stop"] = [
                want_text(text, f"stop_sequences.{index}")
                for index, text in enumerate(want_list(stop, "stop_sequences"))
            ]

    def _format(self, request: Json) -> None:
        config = self.body.get("output_config")
        ask_for_effort(config, request)
        wanted = config.get("format") if isinstance(config, dict) else None
        wanted = wanted or self.body.get("output_format")
        if not wanted:
            return
        schema = want_object(wanted, "output_config.format").get("schema")
        request["response_format"] = {
            "type": "json_schema",
            "json_schema": {
                "name": "output",
                "schema": want_object(schema, "output_config.format.schema"),
                "strict": True,
            },
        }

    # -- tools -----------------------------------------------------------------------------------------------------

    def _tools(self) -> list[Json]:
        tools = []
        for index, tool in enumerate(want_list(self.body.get("tools") or [], "tools")):
            where = f"tools.{index}"
            if not _is_own(want_object(tool, where)):
                self.notes.append(f"hosted tool: {tool['type']}")
                continue
            name = want_name(tool.get("name"), f"{where}.name")
            schema = want_object(tool.get("input_schema"), f"{where}.input_schema")
            tools.append(function_tool(name, tool.get("description"), schema, strict=tool.get("strict") is True))
        return tools

    def _tool_choice(self, request: Json, names: set[str]) -> None:
        choice = self.body.get("tool_choice")
        if choice is None:
            return
        kind = want_object(choice, "tool_choice").get("type")
        if kind not in ("auto", "any", "tool", "none"):
            raise bad("tool_choice.type", f"must be auto, any, tool or none, not {kind!r}.")
        if not names:
            self.notes.append("tool_choice: there are no tools")
            return
        if kind == "tool":
            name = want_name(choice.get("name"), "tool_choice.name")
            if name not in names:
                raise bad("tool_choice.name", f"there is no tool {name!r} in tools.")
            request["tool_choice"] = {"type": "function", "function": {"name": name}}
        else:
            request["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[kind]
        if choice.get("disable_parallel_tool_use") is True:
            request["parallel_tool_calls"] = False

    # -- messages --------------------------------------------------------------------------------------------------

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        system = self._system(self.body.get("system"))
        if system:
            messages.append({"role": "system", "content": system})
        given = want_list(self.body.get("messages"), "messages")
        if not given:
            raise bad("messages", "at least one message is required.")
        for index, message in enumerate(given):
            where = f"messages.{index}"
            role = want_object(message, where).get("role")
            if role == "assistant":
                messages.append(self._assistant(message.get("content"), f"{where}.content"))
            elif role == "user":
                messages += self._user(message.get("content"), f"{where}.content")
            elif role == "system":
                text = content_of(self._parts(message.get("content"), f"{where}.content", only_text=True))
                messages.append({"role": "system", "content": text})
            else:
                raise bad(f"{where}.role", f"must be user, assistant or system, not {role!r}.")
        return place_late_system(join_head(messages), self.late_system)

    def _system(self, system: Any) -> str:
        """The system prompt without the billing line, which would make each call's prompt differ from the last."""
        if system is None:
            return ""
        parts = self._parts(system, "system", only_text=True)
        texts = [_without_billing_line(part["text"]) for part in parts]
        return "\n".join(text for text in texts if text)

    def _user(self, content: Any, where: str) -> list[Json]:
        """Results of tools first, each as a message of its own, then what else the user says."""
        if isinstance(content, str):
            return [{"role": "user", "content": content}]
        messages: list[Json] = []
        media: list[Json] = []
        rest: list[Any] = []
        for index, block in enumerate(want_list(content, where)):
            at = f"{where}.{index}"
            if want_object(block, at).get("type") == "tool_result":
                message, others = self._tool_result(block, at)
                messages.append(message)
                media += others
            else:
                rest.append(block)
        parts = media + self._parts(rest, where)
        if parts or not messages:
            messages.append({"role": "user", "content": content_of(parts)})
        return messages

    def _tool_result(self, block: Json, where: str) -> tuple[Json, list[Json]]:
        id = want_name(block.get("tool_use_id"), f"{where}.tool_use_id")
        message, others = tool_messages(id, self._parts(block.get("content"), f"{where}.content"))
        if block.get("is_error") is True and "error" not in message["content"].lower():
            message["content"] = f"Error: {message['content']}".rstrip()  # chat has no flag for it
        return message, others

    def _assistant(self, content: Any, where: str) -> Json:
        if isinstance(content, str):
            return {"role": "assistant", "content": content}
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(want_list(content, where)):
            at = f"{where}.{index}"
            kind = want_object(block, at).get("type")
            if kind == "text":
                texts.append(want_text(block.get("text"), f"{at}.text"))
            elif kind == "thinking":
                thoughts.append(unseal(block.get("signature")) or want_text(block.get("thinking"), f"{at}.thinking"))
            elif kind == "tool_use":
                calls.append(_tool_use(block, at))
            elif not isinstance(kind, str):
                raise bad(f"{at}.type", "is required.")
            else:
                self.notes.append(f"block: {kind}")
        # The model's words were cut into blocks by us; joined without a seam they are its words again.
        message: Json = {"role": "assistant", "content": "".join(texts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _parts(self, content: Any, where: str, *, only_text: bool = False) -> list[Json]:
        if content is None:
            return []
        if isinstance(content, str):
            return [text_part(content)] if content else []
        parts = []
        for index, block in enumerate(want_list(content, where)):
            at = f"{where}.{index}"
            kind = want_object(block, at).get("type")
            if not isinstance(kind, str):
                raise bad(f"{at}.type", "is required.")
            if kind == "text":
                parts.append(text_part(want_text(block.get("text"), f"{at}.text")))
            elif only_text:
                raise bad(f"{at}.type", f"only text blocks are allowed here, not {kind!r}.")
            else:
                parts += self._part(kind, block, at)
        return parts

    def _part(self, kind: str, block: Json, where: str) -> list[Json]:
        if kind == "image":
            source = want_object(block.get("source"), f"{where}.source")
            return self._source(source, f"{where}.source", image_part, "image")
        if kind == "document":
            return self._document(block, where)
        if kind == "search_result":
            head = f"{block.get('title') or ''}\n{block.get('source') or ''}".strip()
            parts = self._parts(block.get("content"), f"{where}.content", only_text=True)
            return [text_part(head), *parts] if head else parts
        if kind == "tool_reference":
            return [text_part(str(block.get("tool_name") or ""))]
        self.notes.append(f"block: {kind}")
        return []

    def _document(self, block: Json, where: str) -> list[Json]:
        source = want_object(block.get("source"), f"{where}.source")
        head = [text_part(block["title"])] if isinstance(block.get("title"), str) else []
        if source.get("type") == "text":
            return [*head, text_part(want_text(source.get("data"), f"{where}.source.data"))]
        if source.get("type") == "content":
            return head + self._parts(source.get("content"), f"{where}.source.content")
        return self._source(source, f"{where}.source", lambda url: file_part(url, block.get("title")), "document")

    def _source(self, source: Json, where: str, part: Any, kind: str) -> list[Json]:
        if source.get("type") == "base64":
            media_type = want_name(source.get("media_type"), f"{where}.media_type")
            return [part(f"data:{media_type};base64,{want_text(source.get('data'), f'{where}.data')}")]
        if source.get("type") == "url" and kind == "image":
            return [part(want_name(source.get("url"), f"{where}.url"))]
        self.notes.append(f"{kind}: its source is {source.get('type')!r}")
        return [text_part(f"[{kind} left out]")]


def _is_own(tool: Json) -> bool:
    """The client runs it itself."""
    return tool.get("type") in (None, "custom")


def _tool_use(block: Json, where: str) -> Json:
    id, name = want_name(block.get("id"), f"{where}.id"), want_name(block.get("name"), f"{where}.name")
    arguments = want_object(block.get("input"), f"{where}.input")
    raw = arguments.get(INVALID_JSON)
    if isinstance(raw, str) and len(arguments) == 1:
        return tool_call(id, name, raw)  # what the model really wrote
    return tool_call(id, name, dumps(arguments))


def _without_billing_line(text: str) -> str:
    if not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")
