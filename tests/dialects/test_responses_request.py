"""Responses requests as chat requests."""

from __future__ import annotations

import pytest

from dialects.responses_items import (
    CUSTOM_PARAMETERS,
    FUNCTION,
    PATCH,
    body,
    call,
    chat_call,
    message,
    messages_of,
    output,
    user,
)
from outrider.dialects.openai_responses_request import to_chat
from outrider.dialects.openai_responses_tools import custom_input
from outrider.dialects.translate_reasoning import seal
from outrider.errors import RequestError

# -- input -------------------------------------------------------------------------------------------------------------


def test_a_string_is_what_the_user_says():
    assert messages_of(instructions="be brief") == [{"role": "system", "content": "be brief"}, user("hi")]


def test_roles_and_parts():
    assert messages_of(
        message("developer", "D"),
        message("system", "S"),
        message("user", "a", "b"),
        {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        message("developer", "late"),
        user("go"),
    ) == [
        {"role": "system", "content": "D\n\nS"},
        user("a\nb"),
        {"role": "assistant", "content": "x"},
        {"role": "system", "content": "late"},
        user("go"),
    ]


def test_images_and_files():
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"},
        {"type": "input_image", "file_id": "file_1", "detail": "auto"},
    ]
    translation = to_chat(body({"role": "user", "content": parts}))
    assert translation.request["messages"][0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"}},
        {"type": "text", "text": "[input_image left out]"},
    ]
    assert translation.notes == ("part: input_image",)


def test_items_of_one_answer_are_one_message():
    assert messages_of(
        user("go"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("hm")},
        message("assistant", "I will.", kind="output_text"),
        call("c1"),
        call("c2", arguments='{"a" :1}'),
        output("x", "c1"),
        output([{"type": "input_text", "text": "y"}, {"type": "input_text", "text": "z"}], "c2"),
        message("assistant", "Done.", kind="output_text"),
    ) == [
        user("go"),
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "hm",
            "tool_calls": [chat_call("c1"), chat_call("c2", arguments='{"a" :1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "tool", "tool_call_id": "c2", "content": "y\nz"},
        {"role": "assistant", "content": "Done."},
    ]


def test_two_messages_in_a_row_are_two():
    two = [message("assistant", text, kind="output_text") for text in ("a", "b")]
    assert messages_of(user("go"), *two) == [
        user("go"),
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize("between", [call(), {"type": "reasoning", "id": "rs_1", "summary": [{"text": "hm"}]}])
def test_two_messages_with_a_call_or_a_thought_between_them_are_of_one_answer(between):
    first, second = (message("assistant", text, kind="output_text") for text in ("a", "b"))
    answers = [message for message in messages_of(user("go"), first, between, second) if message["role"] == "assistant"]
    assert [answer["content"] for answer in answers] == ["ab"]


def test_images_in_outputs_follow_the_last_of_them():
    shot = [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    messages = messages_of(call("c1"), call("c2"), output(shot, "c1"), output("x", "c2"), user("see?"))
    assert messages[1:] == [
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
        user("see?"),
    ]


# -- tools -------------------------------------------------------------------------------------------------------------


def test_C03_a_custom_tool_is_shown_as_a_function_of_one_string_and_hosted_ones_are_dropped():
    translation = to_chat(body(user("go"), tools=[PATCH, {"type": "web_search"}, {**FUNCTION, "strict": False}]))
    patch, bash = translation.request["tools"]
    assert patch["function"] == {
        "name": "apply_patch",
        "description": "Patch.\n\nThe input must match this lark grammar:\nstart: /.+/s",
        "parameters": CUSTOM_PARAMETERS,
    }
    assert bash["function"] == {"name": "bash", "description": "run", "parameters": FUNCTION["parameters"]}
    assert translation.notes == ("hosted tool: web_search",)


def test_C03_a_custom_call_and_its_output_come_back():
    patch = '*** Begin Patch\n+"é"\n'
    item = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "apply_patch", "input": patch}
    messages = messages_of(user("go"), item, output("Done", kind="custom_tool_call_output"), tools=[PATCH])
    (made,) = messages[1]["tool_calls"]
    assert made["id"] == "c1"
    assert custom_input(made["function"]["arguments"]) == patch
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "Done"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "a"}', "a"),
        ('"a"', "a"),
        ("a\nb", "a\nb"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "a\nb"}', "a\nb"),
        ("{bad", "{bad"),
        ("", ""),
    ],
)
def test_C03_a_model_that_writes_the_input_in_another_way_is_understood(arguments, found):
    assert custom_input(arguments) == found


def test_namespaces_become_part_of_the_name():
    given = [
        {"type": "namespace", "name": "functions", "description": "", "tools": [PATCH]},
        {"type": "namespace", "name": "team", "description": "d", "tools": [{**FUNCTION, "name": "ask"}]},
        FUNCTION,
    ]
    translation = to_chat(
        body(
            {"type": "additional_tools", "role": "developer", "tools": given},
            user("go"),
            call("c1", "ask", namespace="team"),
            call("c2", "bash", namespace=None),
            {
                "type": "custom_tool_call",
                "call_id": "c3",
                "name": "apply_patch",
                "namespace": "functions",
                "input": "x",
            },
            call("c4", "gone", namespace="old"),
        )
    )
    names = [tool["function"]["name"] for tool in translation.request["tools"]]
    assert names == ["apply_patch", "team__ask", "bash"]
    assert [message["role"] for message in translation.request["messages"]] == ["user", "assistant"]
    made = [call["function"]["name"] for call in translation.request["messages"][1]["tool_calls"]]
    assert made == ["team__ask", "bash", "apply_patch", "old__gone"]
    tools = translation.state.tools
    assert (tools.find("team__ask").namespace, tools.find("team__ask").name) == ("team", "ask")
    assert tools.find("apply_patch").custom
    assert tools.find("made_up").name == "made_up"


def test_two_tools_never_share_a_name():
    ask = {**FUNCTION, "name": "ask"}
    given = [
        {**FUNCTION, "name": "a__ask"},
        {"type": "namespace", "name": "a", "tools": [ask]},
        {"type": "namespace", "name": "n" * 64, "tools": [ask]},
        {"type": "namespace", "name": "o" * 64, "tools": [ask]},
        FUNCTION,
        FUNCTION,
    ]
    translation = to_chat(body(user("go"), tools=given))
    names = [tool["function"]["name"] for tool in translation.request["tools"]]
    assert names == ["a__ask", "a__ask_2", "ask", "ask_2", "bash"]
    assert translation.state.tools.find("ask_2").namespace == "o" * 64
    assert translation.notes == ("tool given twice: bash",)


@pytest.mark.parametrize(
    ("choice", "expected", "notes"),
    [
        ("auto", "auto", ()),
        ("required", "required", ()),
        ("none", "none", ()),
        ({"type": "function", "name": "bash"}, {"type": "function", "function": {"name": "bash"}}, ()),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}, ()),
        ({"type": "web_search"}, None, ("tool_choice: web_search",)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "bash"}]},
            {"type": "function", "function": {"name": "bash"}},
            (),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]},
            "auto",
            ("tool_choice: allowed_tools, where chat can only force one",),
        ),
    ],
)
def test_tool_choice(choice, expected, notes):
    translation = to_chat(body(user("go"), tools=[FUNCTION, PATCH], tool_choice=choice))
    assert translation.request.get("tool_choice") == expected
    assert translation.notes == notes


# -- parameters --------------------------------------------------------------------------------------------------------


def test_parameters():
    schema = {"type": "object", "properties": {}}
    translation = to_chat(
        body(
            max_output_tokens=50,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            stream=True,
            parallel_tool_calls=False,
            tools=[FUNCTION],
            reasoning={"effort": "xhigh", "summary": "auto"},
            text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
            include=["reasoning.encrypted_content", "message.output_text.logprobs"],
            top_logprobs=2,
            prompt_cache_key="k",
            client_metadata={"a": "b"},
            store=False,
            truncation="auto",
        )
    )
    request = translation.request
    assert {name: request[name] for name in request if name not in ("messages", "tools")} == {
        "model": "m",
        "parallel_tool_calls": False,
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    state = translation.state
    assert (state.sealed_reasoning, state.summaries, state.logprobs, state.history) == (True, True, True, None)


def test_hosted_items_are_left_out_and_noted():
    translation = to_chat(body(user("go"), {"type": "web_search_call", "id": "ws_1", "status": "completed"}))
    assert translation.request["messages"] == [user("go")]
    assert translation.notes == ("item: web_search_call",)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input.0.content.0.type"),
        ({"input": ["x"]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": ""}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": ""}]}, "input.0.name"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "x"}]}, "input.0.arguments"),
        ({"input": [{"type": "custom_tool_call", "call_id": "x", "name": "x"}]}, "input.0.input"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input.0.output"),
        ({"input": [{"type": 3}]}, "input.0.type"),
        ({"model": None}, "model"),
        ({"instructions": 3}, "instructions"),
        ({"tools": [{"name": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "x", "parameters": 3}]}, "tools.0.parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.name"),
        ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_p": "x"}, "top_p"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
def test_a_mistake_names_its_field(change, field):
    with pytest.raises(RequestError) as caught:
        to_chat(body() | change)
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: ")
    assert caught.value.status == 400
