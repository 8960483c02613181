from __future__ import annotations

import pytest

from fakes.chat_format import write_format
from fakes.talk import Talk
from fakes.token_engine import TokenEngine
from outrider.renderers.template import TemplateRenderer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_format(tmp_path_factory.mktemp("format") / "qwen", "qwen")


@pytest.fixture(scope="module")
def renderer(folder):
    return TemplateRenderer(folder)


@pytest.fixture(scope="module")
def shared_engine(renderer):
    with TokenEngine(renderer) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    shared_engine.forget()
    return shared_engine


@pytest.fixture
def gateway(start, folder):
    with start(mode="train", tokenizer=str(folder)) as gateway:
        yield gateway


@pytest.fixture
def talk(gateway, engine, renderer):
    return Talk(gateway, engine, renderer)
