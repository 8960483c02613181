"""A model that never saw the tools it was offered is told of."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fabricate import ReadStore, Words

from fakes.records import make_call, make_rollout
from outrider.reports.offered import unseen_in_run, unseen_tools

SCHEMA = {"type": "object", "properties": {"fruit": {"type": "string"}}}
CHAT = {"tools": [{"type": "function", "function": {"name": "price", "parameters": SCHEMA}}]}
MESSAGES = {"tools": [{"name": "price", "input_schema": SCHEMA}, {"type": "web_search"}]}
RESPONSES = {"tools": [{"type": "function", "name": "price", "parameters": SCHEMA}]}


@pytest.fixture
def words():
    return Words()


def recorded(words, request, prompt, id="a"):
    return make_call(id, request=json.dumps(request).encode(), prompt_ids=np.array(words.encode(prompt), np.int32))


@pytest.mark.parametrize("request_body", [CHAT, MESSAGES, RESPONSES])
def test_a_prompt_without_the_tools_of_its_request_is_told(words, request_body):
    assert "dropped price" in unseen_tools([recorded(words, request_body, "What is it?")], words)
    assert unseen_tools([recorded(words, request_body, "You may call price of a fruit. What is it?")], words) == ""
    assert "dropped price" in unseen_tools([recorded(words, request_body, "Call price. What is it?")], words)


def test_nothing_is_told_without_tools_or_without_a_way_to_read_the_prompt(words):
    assert unseen_tools([recorded(words, {}, "What?")], words) == ""
    assert unseen_tools([recorded(words, CHAT, "What?")], None) == ""
    assert unseen_tools([make_call("b", request=b"{", prompt_ids=None)], words) == ""
    assert unseen_tools([], words) == ""


def test_a_run_is_told_by_its_rollouts(words):
    calls = {f"{id}.a1": [recorded(words, CHAT, "What?", id)] for id in ("r1", "r2")}
    store = ReadStore(all_rollouts={id: make_rollout(id, attempt=1) for id in ("r1", "r2")}, all_calls=calls)
    assert "dropped price" in unseen_in_run(store, words)
    calls["r2.a1"] = [recorded(words, CHAT, "Call price of fruit.", "r2")]
    assert unseen_in_run(store, words) == ""
    assert unseen_in_run(ReadStore(), words) == ""
