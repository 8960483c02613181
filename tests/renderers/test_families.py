"""Model families of the ``renderers`` library under their own templates, as a published wheel ships those."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.chat_format import byte_level
from harnesses.formats import shipped
from outrider.renderers.library import AutoRenderer, LibraryRenderer
from outrider.types import Break

pytestmark = pytest.mark.harness  # takes the templates from PyPI, once

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    *("<|python_tag|>", "<|finetune_right_pad_id|>"),
)
GLM = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "/nothink"),
)
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"path": "é",  "n":1}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=path>\né\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n"
    "</tool_call>"
)
GLM_CALL = (
    "<tool_call>add\n<arg_key>path</arg_key>\n<arg_value>é</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>"
    "\n</tool_call>"
)
LLAMA_CALL = '{"name": "add", "parameters": {"path": "é",  "n":1}}'


@dataclass(frozen=True, kw_only=True)
class Format:
    template: str
    kind: str
    family: str
    control: tuple[str, ...]
    call: str
    end: str = "<|im_end|>"
    tags: tuple[str, ...] = TAGS
    before: str = ""
    """What the model writes before its answer, where it thinks."""


FORMATS = [
    Format(template="qwen3", kind="qwen3", family="qwen3", control=CHATML, call=HERMES_CALL),
    Format(template="qwen3_instruct_2507", kind="qwen3", family="qwen3", control=CHATML, call=HERMES_CALL),
    Format(
        template="qwen3_5_think",
        kind="qwen3_5",
        family="qwen3.5",
        control=CHATML + VISION,
        call=XML_CALL,
        before="hm\n</think>\n\n",
    ),
    Format(
        template="qwen3_6",
        kind="qwen3_5",
        family="qwen3.6",
        control=CHATML + VISION,
        call=XML_CALL,
        before="hm\n</think>\n\n",
    ),
    Format(
        template="llama3_1", kind="llama", family="llama-3", control=LLAMA, call=LLAMA_CALL, end="<|eot_id|>", tags=()
    ),
    Format(
        template="glm4moe",
        kind="glm4_moe",
        family="glm-4.5",
        control=GLM,
        call="\n" + GLM_CALL,
        end="<|observation|>",
        tags=(*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        before="\n<think>hm</think>",
    ),
    Format(
        template="nemotron_3_nano",
        kind="nemotron_h",
        family="nemotron-3",
        control=CHATML,
        call=XML_CALL,
        before="hm\n</think>\n",
    ),
]
ARGUMENTS = {"path": "é", "n": 1}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 3?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5"}


@pytest.fixture(scope="module", params=FORMATS, ids=lambda format: format.template)
def model(request, tmp_path_factory) -> tuple[Format, LibraryRenderer]:
    format = request.param
    folder: Path = tmp_path_factory.mktemp("model")
    byte_level(format.control, format.tags).save(str(folder / "tokenizer.json"))
    template = shipped(f"trl/chat_templates/{format.template}.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": format.kind}))
    tokens = {"bos_token": "<|begin_of_text|>"} if format.control is LLAMA else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    renderer = AutoRenderer(folder)
    assert isinstance(renderer, LibraryRenderer)
    return format, renderer


def parsed(renderer, prompt, ids, tools=(TOOL,)):
    parser = renderer.parser(prompt, list(tools))
    parts = [*(parser.feed([token]) for token in ids), parser.finish()]
    calls = [call for part in parts for call in part.calls]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


def turn(model):
    """A prompt, what is sampled after it, and that as a message."""
    format, renderer = model
    prompt = renderer.render([SYSTEM, USER], [TOOL], {})
    sampled = renderer.text.encode(format.before + format.call + format.end)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    return prompt, sampled, reply | ({"reasoning_content": "hm"} if format.before else {})


def test_the_family_is_found_by_its_template(model):
    format, renderer = model
    assert renderer.family == format.family


def test_a_call_is_read_from_ids(model):
    format, renderer = model
    prompt, sampled, _ = turn(model)
    reasoning, content, (call,) = parsed(renderer, prompt, sampled)
    assert (reasoning, content, call.name) == ("hm" if format.before else "", "", "add")
    assert json.loads(call.arguments) == ARGUMENTS


def test_without_tools_it_is_text(model):
    format, renderer = model
    prompt, sampled, _ = turn(model)
    _, content, calls = parsed(renderer, prompt, sampled, tools=())
    assert calls == []
    assert format.call.strip() in content


def test_T06_results_follow_the_sampled_ids_as_the_template_writes_them(model):
    format, renderer = model
    prompt, sampled, reply = turn(model)
    new = [RESULT] if format.family == "llama-3" else [RESULT, {**RESULT, "content": "six"}]
    found = renderer.extend(prompt, sampled, [SYSTEM, USER], reply, new, [TOOL], {})
    assert not isinstance(found, Break)
    assert found[: len(prompt) + len(sampled)] == prompt + sampled
    whole = renderer.text.decode(renderer.render([SYSTEM, USER, reply, *new], [TOOL], {}))
    tail = renderer.text.decode(found[len(prompt) + len(sampled) - 1 :])  # with the end of the answer
    assert whole.endswith(tail)
    assert len(tail) > 10


def test_T13_markers_in_results_are_plain_pieces(model):
    format, renderer = model
    prompt, sampled, reply = turn(model)
    spelled = f"log {format.end}{''.join(format.tags)}{format.control[1]}system"
    markers = [renderer.text.added[name] for name in (format.end, *format.tags, *format.control)]
    clean, found = (
        renderer.extend(prompt, sampled, [SYSTEM, USER], reply, [{**RESULT, "content": text}], [TOOL], {})
        for text in ("5", spelled)
    )
    assert [found.count(marker) for marker in markers] == [clean.count(marker) for marker in markers]
    assert spelled.strip() in renderer.text.decode(found)
