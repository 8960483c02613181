"""Anthropic Messages requests as chat requests."""

from __future__ import annotations

import json

import pytest

from outrider.dialects.anthropic_request import INVALID_JSON, count_to_chat, to_chat
from outrider.dialects.translate_reasoning import seal, unseal
from outrider.errors import RequestError

TOOL = {"name": "Read", "description": "reads", "input_schema": {"type": "object", "properties": {}}}


def body(*messages, **more):
    return {"model": "m", "max_tokens": 100, "messages": list(messages) or [user("hi")], **more}


def user(content):
    return {"role": "user", "content": content}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(value, **more):
    return {"type": "text", "text": value, **more}


def tool_use(id="toolu_1", name="Read", **input):
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def tool_result(content, id="toolu_1", **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def messages_of(*messages, **more):
    return to_chat(body(*messages, **more)).request["messages"]


# -- system ------------------------------------------------------------------------------------------------------------


def test_A05_system_inside_messages_keeps_its_place():
    system = [text("S")]
    reminder = {"role": "system", "content": "<total_tokens>900 tokens left</total_tokens>"}
    one = messages_of(user("do"), reminder, system=system)
    assert one == [{"role": "system", "content": "S"}, user("do"), reminder]
    later = {"role": "system", "content": [text("<total_tokens>800 tokens left</total_tokens>")]}
    two = messages_of(user("do"), reminder, assistant(text("done")), user("more"), later, system=system)
    assert two[: len(one)] == one
    assert two[-1] == {"role": "system", "content": "<total_tokens>800 tokens left</total_tokens>"}


def test_A05_a_template_that_refuses_a_late_system_message_gets_a_marked_user_message():
    reminder = {"role": "system", "content": "be brief"}
    translation = to_chat(body(user("do"), reminder, system="S"), late_system="user")
    assert translation.request["messages"] == [
        {"role": "system", "content": "S"},
        user("do"),
        user("<system>\nbe brief\n</system>"),
    ]


@pytest.mark.parametrize("as_list", [True, False])
def test_A06_the_billing_line_is_stripped_so_that_the_head_is_the_same_in_each_call(as_list):
    heads = set()
    for hash in ("a1b2", "c3d4"):
        line = f"x-anthropic-billing-header: cc_version=9.9; cch={hash};"
        system = [text(line), text("You are."), text("Be.")] if as_list else f"{line}\nYou are.\nBe."
        given = body(user("hi"), system=system)
        before = json.dumps(given)
        heads.add(to_chat(given).request["messages"][0]["content"])
        assert json.dumps(given) == before, "the original request is for the log"
    assert heads == {"You are.\nBe."}


def test_A06_only_that_line_is_stripped():
    line = "x-anthropic-billing-header: cch=1;"
    said = user(f"what is {line}")
    at_start = user([text(line)])
    messages = messages_of(said, at_start, system=[text("first"), text(f"about {line}\nrest")])
    assert messages == [
        {"role": "system", "content": f"first\nabout {line}\nrest"},
        said,
        user(line),
    ]


def test_empty_system_is_no_message():
    assert messages_of(user("hi"), system="") == [user("hi")]
    assert messages_of(user("hi"), system=[]) == [user("hi")]
    assert messages_of(user("hi"), system=[text("x-anthropic-billing-header: cch=1;")]) == [user("hi")]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_A10_cosmetic_differences_translate_to_the_same_and_real_ones_do_not():
    plain = messages_of(user("hi"))
    assert messages_of(user([text("hi", cache_control={"type": "ephemeral"})])) == plain
    assert messages_of(user([{"text": "hi", "type": "text"}])) == plain
    assert messages_of(user("hi ")) != plain
    images = [messages_of(user([image(data), text("see")])) for data in ("AAAA", "AAAB")]
    assert images[0] != images[1]


def image(data="AAAA"):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_images_become_image_url_parts():
    by_url = {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}
    assert messages_of(user([text("see"), image(), by_url])) == [
        user(
            [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}},
            ]
        )
    ]


def test_tool_results_become_tool_messages_before_what_the_user_says():
    messages = messages_of(
        user("go"),
        assistant(text("I will."), tool_use("t1", file="é"), tool_use("t2")),
        user([text("also"), tool_result("x", "t1"), tool_result([text("y"), text("z")], "t2"), text("this")]),
    )
    assert messages == [
        user("go"),
        {
            "role": "assistant",
            "content": "I will.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "Read", "arguments": '{"file": "é"}'}},
                {"id": "t2", "type": "function", "function": {"name": "Read", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "x"},
        {"role": "tool", "tool_call_id": "t2", "content": "y\nz"},
        user("also\nthis"),
    ]


def test_images_in_tool_results_follow_in_a_user_message():
    messages = messages_of(assistant(tool_use()), user([tool_result([text("shot"), image()]), text("see?")]))
    assert messages[1:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "shot"},
        user(
            [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "see?"},
            ]
        ),
    ]


@pytest.mark.parametrize(
    ("content", "shown"),
    [("no such file", "Error: no such file"), ("Error: gone", "Error: gone"), ("", "Error:"), (None, "Error:")],
)
def test_a_failed_tool_result_says_so(content, shown):
    messages = messages_of(user([tool_result(content, is_error=True)]))
    assert messages == [{"role": "tool", "tool_call_id": "toolu_1", "content": shown}]


def test_documents_and_search_results_become_text():
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
    }
    found = {"type": "search_result", "title": "A", "source": "u", "content": [text("b")]}
    assert messages_of(user([document, found])) == [user("T\nbody\nA\nu\nb")]


def test_what_only_anthropic_can_act_on_is_left_out_and_noted():
    server = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    file = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    translation = to_chat(
        body(
            user([file]),
            assistant(server, {"type": "redacted_thinking", "data": "x"}, text("ok")),
            user("go"),
            tools=[hosted, TOOL],
            mcp_servers=[{"type": "url", "name": "n", "url": "https://x.example"}],
        )
    )
    assert [tool["function"]["name"] for tool in translation.request["tools"]] == ["Read"]
    assert translation.request["messages"][1] == {"role": "assistant", "content": "ok"}
    assert sorted(translation.notes) == [
        "block: redacted_thinking",
        "block: server_tool_use",
        "field: mcp_servers",
        "hosted tool: web_search_20250305",
        "image: its source is 'file'",
    ]


def test_thinking_comes_back_as_reasoning():
    ours = {"type": "thinking", "thinking": "shown", "signature": seal("what it thought")}
    hidden = {"type": "thinking", "thinking": "", "signature": seal("what it thought")}
    foreign = {"type": "thinking", "thinking": "shown", "signature": "EqQBCg=="}
    got = [messages_of(assistant(block, tool_use()))[0].get("reasoning_content") for block in (ours, hidden, foreign)]
    assert got == ["what it thought", "what it thought", "shown"]
    assert "reasoning_content" not in messages_of(assistant(text("no thought")))[0]


def test_input_that_was_no_json_comes_back_as_the_model_wrote_it():
    (message,) = messages_of(assistant(tool_use(**{INVALID_JSON: "{bad"})))
    assert message["tool_calls"][0]["function"]["arguments"] == "{bad"


def test_text_blocks_of_an_answer_are_joined_without_a_seam():
    assert messages_of(assistant(text("Hel"), text("lo")), user("?"))[0] == {"role": "assistant", "content": "Hello"}


def test_an_answer_that_the_client_began_is_gone_on_with():
    request = to_chat(body(user("go"), assistant(text("{")))).request
    assert request["continue_final_message"] is True
    assert request["add_generation_prompt"] is False
    assert "continue_final_message" not in to_chat(body(user("go"), assistant(tool_use()))).request


# -- parameters --------------------------------------------------------------------------------------------------------


def test_parameters():
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    translation = to_chat(
        body(
            stop_sequences=["END"],
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            stream=True,
            metadata={"user_id": "u"},
            context_management={"edits": []},
            cache_control={"type": "ephemeral"},
            service_tier="auto",
            output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
            thinking={"type": "adaptive"},
        )
    )
    assert translation.request == {
        "model": "m",
        "messages": [user("hi")],
        "max_tokens": 100,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema, "strict": True},
        },
    }
    assert translation.notes == (
        "field: metadata",
        "field: context_management",
        "field: cache_control",
        "field: service_tier",
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "Read"}, {"tool_choice": {"type": "function", "function": {"name": "Read"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_tool_choice(choice, expected):
    request = to_chat(body(tools=[TOOL], tool_choice=choice)).request
    assert {name: request[name] for name in request if name in ("tool_choice", "parallel_tool_calls")} == expected


def test_tool_choice_without_tools_is_dropped():
    translation = to_chat(body(tools=[], tool_choice={"type": "auto"}))
    assert "tool_choice" not in translation.request
    assert "tools" not in translation.request
    assert translation.notes == ("tool_choice: there are no tools",)


def test_tools():
    strict = {**TOOL, "name": "S", "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}
    assert to_chat(body(tools=[TOOL, strict])).request["tools"] == [
        {"type": "function", "function": {"name": "Read", "description": "reads", "parameters": TOOL["input_schema"]}},
        {
            "type": "function",
            "function": {"name": "S", "description": "reads", "parameters": TOOL["input_schema"], "strict": True},
        },
    ]


def test_A07_count_tokens_has_the_prompt_of_the_same_call():
    given = body(user([text("see"), image()]), tools=[TOOL], system=[text("S")], stream=True)
    counted = {name: value for name, value in given.items() if name != "max_tokens"}
    call, count = to_chat(given).request, count_to_chat(counted).request
    assert (count["messages"], count["tools"]) == (call["messages"], call["tools"])
    assert "max_tokens" not in count
    assert "stream" not in count


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [user([{"text": "x"}])]}, "messages.0.content.0.type"),
        ({"messages": [user([{"type": "text"}])]}, "messages.0.content.0.text"),
        ({"messages": [user(["x"])]}, "messages.0.content.0"),
        ({"messages": [user([{"type": "tool_result", "content": "x"}])]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [assistant({"type": "tool_use", "name": "x", "input": {}})]}, "messages.0.content.0.id"),
        ({"messages": [assistant({"type": "tool_use", "id": "x", "name": "x"})]}, "messages.0.content.0.input"),
        ({"messages": [user([{"type": "image"}])]}, "messages.0.content.0.source"),
        ({"system": [image()]}, "system.0.type"),
        ({"system": 3}, "system"),
        ({"model": ""}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "Write"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_a_mistake_names_its_field(change, field):
    with pytest.raises(RequestError) as caught:
        to_chat(body() | change)
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: ")
    assert caught.value.status == 400


def test_max_tokens_is_required():
    given = body()
    del given["max_tokens"]
    with pytest.raises(RequestError, match="max_tokens: is required"):
        to_chat(given)


# -- sealed reasoning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "é 😀\n", "x" * 100_000])
def test_sealed_text_comes_back(value):
    assert unseal(seal(value)) == value


def test_what_is_not_ours_or_broken_is_none():
    ours = seal("text")
    for value in (
        None,
        3,
        "",
        "EqQBCg==",
        ours[:-4],
        ours[:20] + "AAAA" + ours[24:],
        "outrider.1.é",
        "outrider.1.AAAA",
    ):
        assert unseal(value) is None


def test_a_small_string_can_not_unpack_to_a_huge_one():
    assert unseal(seal("x" * (9 << 20))) is None
