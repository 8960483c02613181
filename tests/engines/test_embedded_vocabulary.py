"""The tokenizer's bytes, templates and end tokens."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.engines.embedded.vocabulary import TemplateError, Vocabulary
from outrider.errors import ConfigError
from outrider.renderers.template import TemplateRenderer

MAPPING = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments|items %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def save(tmp_path, write_tokenizer):
    """Writes a tokenizer and configs; returns the vocabulary that is read from them."""

    def write(template=None, **generation):
        write_tokenizer(tmp_path, *([template] if template else []))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
        if generation:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return Vocabulary(tmp_path)

    return write


def test_bytes_of_tokens_join_to_the_decoded_text(tmp_path, save):
    vocabulary, tokenizer = save(), AutoTokenizer.from_pretrained(tmp_path)
    source = random.Random(0)
    for _ in range(50):
        ids = [source.randrange(len(tokenizer)) for _ in range(20)]
        joined = b"".join(vocabulary.token_bytes(i) for i in ids).decode("utf-8", "replace")
        assert joined == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_bytes_of_a_sentencepiece_vocabulary(tmp_path, save):
    pieces = {"<unk>": 0, "▁the": 1, "x": 2, "<0xF0>": 3, "<0x9F>": 4, "▁": 5, "</s>": 6}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    vocabulary = Vocabulary(tmp_path)
    assert [vocabulary.token_bytes(i) for i in range(1, 7)] == [b" the", b"x", b"\xf0", b"\x9f", b" ", b"</s>"]


def test_ids_past_the_end_of_the_vocabulary_have_no_bytes(tmp_path, save):
    vocabulary = save()
    assert vocabulary.token_bytes(10**6) == b""


def test_T17_end_tokens_come_from_all_four_places(tmp_path, save):
    vocabulary = save(eos_token_id=[3, 5])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    named = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert vocabulary.stop_ids == {3, 5, 7} | named


def test_a_template_without_an_end_token_adds_none(tmp_path, save):
    vocabulary = save("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert vocabulary.stop_ids == {7, AutoTokenizer.from_pretrained(tmp_path).eos_token_id}


TAKES_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(("template", "joined"), [(None, "a\n b"), (TAKES_PARTS, "a b")])
def test_text_parts_are_lines_unless_the_template_takes_parts(tmp_path, save, template, joined):
    """As vLLM has it, and as a gateway does that makes the prompts itself."""
    vocabulary = save(template) if template else save()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    whole = vocabulary.render([{"role": "user", "content": joined}], None)
    assert vocabulary.render([{"role": "user", "content": parts}], None) == whole
    assert TemplateRenderer(tmp_path).joint.join(["a", " b"]) == joined


def test_T08_arguments_are_a_mapping_for_the_template(tmp_path, save):
    vocabulary, tokenizer = save(MAPPING), AutoTokenizer.from_pretrained(tmp_path)

    def rendered(arguments):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ids = vocabulary.render([{"role": "assistant", "content": None, "tool_calls": [call]}], None)
        return tokenizer.decode(ids)

    assert rendered('{"city": "Paris"}') == "assistant:[city=Paris]"
    assert rendered({"city": "Paris"}) == "assistant:[city=Paris]"


@pytest.mark.parametrize("arguments", ["", "{bad", "[1]"])
def test_T08_arguments_that_are_no_object_are_a_clear_refusal(tmp_path, save, arguments):
    vocabulary = save(MAPPING)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(TemplateError, match="the chat template refused"):
        vocabulary.render([{"role": "assistant", "content": "", "tool_calls": [call]}], None)


def test_tools_reach_the_template(tmp_path, save):
    vocabulary = save("{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    ids = vocabulary.render([{"role": "user", "content": "x"}], tools)
    assert AutoTokenizer.from_pretrained(tmp_path).decode(ids) == "addx"


def test_a_model_without_a_template_says_so(tmp_path, save):
    save()
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(TemplateError, match="no chat template"):
        Vocabulary(tmp_path).render([{"role": "user", "content": "x"}], None)


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path, save):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="tokenizer"):
        Vocabulary(tmp_path)
