"""The beginning of an answer that an agent wrote, in a prompt, and the rest of such an answer."""

from __future__ import annotations

import pytest

from fakes.chat_format import END, QWEN, SMOL, spelled_out, write_library_format
from outrider.renderers.library import LibraryRenderer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 3? <|im_start|>"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
BEGUN = ("It is", "It is ", "{", '{"name"', "\n\nTool", "é 😀", " x")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return LibraryRenderer(write_library_format(tmp_path_factory.mktemp("begin") / "library"))


@pytest.fixture(params=["smol", "qwen", "llama", "library"])
def named(request, renderers):
    if request.param == "library":
        return "qwen", request.getfixturevalue("library")
    return request.param, renderers[request.param]


def begin(renderer, messages, begun, *, kept=0, tools=(), options=None):
    return renderer.begin(renderer.render(messages, tools, options or {}), kept, messages, begun, tools, options or {})


@pytest.mark.parametrize("begun", BEGUN)
def test_it_stands_where_the_template_writes_it(named, begun):
    name, renderer = named
    messages = [SYSTEM, {**USER, "content": "What is 2 + 3?"}]
    found = begin(renderer, messages, begun)
    if begun != begun.strip() and (name == "llama" or isinstance(renderer, LibraryRenderer)):
        assert found is None  # that template trims what is said, and the library what it reads
        return
    thought = "<think>\n\n</think>\n\n" if name == "qwen" else ""
    text = renderer.text.decode(renderer.render(messages, [], {})) + thought + begun
    assert renderer.text.decode(found) == text
    assert found == renderer.text.encode(text)  # so, what an engine makes of it


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize("rest", ["is five.", " five\n", f"\n{CALL}", f" five.\n\n{CALL}\n{CALL}", ""])
def test_the_rest_is_told_alone_and_parsed_with_it(named, begun, tools, rest):
    """However its ids are cut."""
    name, renderer = named
    messages = [SYSTEM, USER]
    found = begin(renderer, messages, begun, tools=tools)
    if found is None:
        assert begun != begun.strip()
        return
    ids = [*renderer.text.encode(rest), renderer.text.added[END[name]]]
    told = []
    for size in (1, 3, len(ids)):
        parser = renderer.parser(found, tools, begun=begun)
        parts = [parser.feed(ids[at : at + size]) for at in range(0, len(ids), size)] + [parser.finish()]
        assert not any(part.reasoning for part in parts)
        told.append(("".join(part.content for part in parts), [call for part in parts for call in part.calls]))
    assert told[0] == told[1] == told[2]
    text, calls = told[0]
    bare = name == "llama" and begun.startswith("{")  # its calls are such an answer
    assert len(calls) == (rest.count("<tool_call>") if tools and not bare else 0)
    if not calls:
        assert (begun + text).strip() == (begun + rest).strip()


def test_sampled_ids_before_it_are_kept(qwen):
    prompt = qwen.render([USER], [], {})
    completion = [*spelled_out(qwen.text._full, "The result"), qwen.text.added["<|im_end|>"]]
    said, more = {"role": "assistant", "content": "The result"}, {"role": "user", "content": "Sure?"}
    extended = qwen.extend(prompt, completion, [USER], said, [more], [], {})
    kept = len(prompt) + len(completion)
    found = qwen.begin(extended, kept, [USER, said, more], "It is", [], {})
    assert found[:kept] == prompt + completion
    assert qwen.text.decode(found).endswith("Sure?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nIt is")
    assert qwen.begin(extended, len(extended), [USER, said, more], "It is", [], {}) is None


def test_the_whole_history_is_asked_where_a_short_one_would_tell_otherwise(make_renderer):
    """This template writes another opening once a conversation has four messages."""
    opening = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable"
    assert opening in QWEN
    long = "{{- '<|im_start|>assistant\\n' + ('Well: ' if messages|length > 3 else '') }}\n    {%- if enable"
    renderer = make_renderer("qwen", QWEN.replace(opening, long))
    said, more = {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "Sure?"}
    for _ in range(2):
        assert begin(renderer, [USER, said, more, said, more], "It is") is None
        assert begin(renderer, [USER], "It is") is not None


def test_options_of_the_template_count(qwen):
    found = begin(qwen, [USER], "It is", options={"enable_thinking": False})
    assert qwen.text.decode(found).count("<think>\n\n</think>\n\nIt is") == 1
    assert qwen.text.decode(found).count("<think>") == 1


@pytest.mark.parametrize("begun", ["<think>\nhm", "<think>\nhm\n</think>\n\nIt is", "  <think>"])
def test_a_thought_that_was_begun_is_left_to_the_engine(named, begun):
    assert begin(named[1], [SYSTEM, USER], begun) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{{- message.content }}", "{{- message.content | upper }}"),
        ("{{- message.content }}", "{{- '<think>\\n' + message.content }}"),
        ("{{- message.content }}", "{{- '<think>\\n' }}{{ raise_exception('no') }}"),
        ("{{- '<|im_start|>assistant\\n' }}\n    {%- if enable", "{{- '<|im_start|>model\\n' }}\n    {%- if enable"),
    ],
)
def test_a_template_that_does_not_write_it_so_gives_no_proof(make_renderer, before, after):
    assert before in QWEN
    assert begin(make_renderer("qwen", QWEN.replace(before, after)), [USER], "It is") is None


def test_an_opening_without_a_control_token_gives_no_proof(make_renderer):
    """What stands behind the last one would be encoded again, and be people's text."""
    template = SMOL.replace("<|im_start|>", "### ").replace("<|im_end|>", "")
    assert begin(make_renderer("smol", template), [USER], "It is") is None
