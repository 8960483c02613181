from __future__ import annotations

import pytest

from fakes.chat_format import TEMPLATES, write_format
from outrider.renderers.template import TemplateRenderer


@pytest.fixture(scope="session")
def renderers(tmp_path_factory):
    """A renderer for each way in which templates behave."""
    root = tmp_path_factory.mktemp("formats")
    return {name: TemplateRenderer(write_format(root / name, name)) for name in TEMPLATES}


@pytest.fixture
def smol(renderers):
    return renderers["smol"]


@pytest.fixture
def qwen(renderers):
    return renderers["qwen"]


@pytest.fixture
def llama(renderers):
    return renderers["llama"]


@pytest.fixture
def make_renderer(tmp_path):
    """A renderer with a template of the test's own."""
    return lambda name, template: TemplateRenderer(write_format(tmp_path / "own", name, template=template))
