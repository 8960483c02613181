"""Model folders that can't be used, and say so."""

from __future__ import annotations

import json

import pytest

from fakes.chat_format import SMOL, write_format
from outrider.errors import ConfigError
from outrider.renderers.template import TemplateRenderer


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{% if %}", "cannot be read"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "not valid JSON"),
    ],
)
def test_a_folder_that_lacks_something(tmp_path, file, text, problem):
    folder = write_format(tmp_path / "model", "smol")
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        TemplateRenderer(folder)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        TemplateRenderer(tmp_path / "nowhere")


@pytest.mark.parametrize("inline", [SMOL, [{"name": "default", "template": SMOL}]])
def test_templates_in_the_tokenizer_config(tmp_path, inline):
    folder = write_format(tmp_path / "model", "smol")
    wanted = TemplateRenderer(folder).render([{"role": "user", "content": "hi"}], [], {})
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    assert TemplateRenderer(folder).render([{"role": "user", "content": "hi"}], [], {}) == wanted


def test_blocks_for_trainers_render_as_their_inside(tmp_path):
    template = "{% for m in messages %}{% generation %}<|im_start|>{{ m.content }}{% endgeneration %}{% endfor %}"
    renderer = TemplateRenderer(write_format(tmp_path / "model", "smol", template=template))
    assert renderer.text.decode(renderer.render([{"role": "user", "content": "hi"}], [], {})) == "<|im_start|>hi"
