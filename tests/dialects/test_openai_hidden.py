"""What is cut out of a reply's text is what taking it apart would leave out, and the rest keeps its bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.dialects import openai_hidden
from outrider.dialects.openai_chat import OpenAIChat
from outrider.wire import UpstreamRequest

NAMES = ("token_ids", "prompt_token_ids", "policy_versions", "logprobs", "model", "content")
WORDS = st.sampled_from(["a", 'say "token_ids": [1]', '"model"', "token_ids", '\\"logprobs', "é\n", ""])
IDS = st.lists(st.integers(0, 10**6), max_size=3)
OTHER = st.one_of(
    WORDS, st.none(), st.dictionaries(st.sampled_from(NAMES), st.one_of(WORDS, IDS, st.none()), max_size=2)
)
LOGPROBS = st.one_of(
    st.none(),
    st.fixed_dictionaries({"content": st.lists(st.fixed_dictionaries({"logprob": st.just(-0.5), "token": WORDS}))}),
)
CHOICE = st.fixed_dictionaries(
    {"message": st.fixed_dictionaries({"content": WORDS}, optional={"extra": OTHER})},
    optional={
        "token_ids": st.none() | IDS,
        "policy_versions": st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 3)), max_size=2),
        "prompt_token_ids": IDS,
        "logprobs": LOGPROBS,
        "x": OTHER,
    },
)
REPLY = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE, min_size=1, max_size=2)},
    optional={"prompt_token_ids": st.none() | IDS, "model": WORDS, "usage": st.none(), "x": OTHER},
)
WRITTEN = st.sampled_from([{"separators": (",", ":")}, {}, {"indent": 1}, {"indent": 40}, {"indent": "\t"}])
HIDDEN = st.frozensets(st.sampled_from(["token_ids", "logprobs", "usage"]))


def shuffled(value, random):
    if isinstance(value, dict):
        items = [(name, shuffled(child, random)) for name, child in value.items()]
        random.shuffle(items)
        return dict(items)
    return [shuffled(child, random) for child in value] if isinstance(value, list) else value


def without(reply, hidden, model):
    """By hand, on the parsed reply."""
    reply = json.loads(json.dumps(reply))
    if "token_ids" in hidden:
        reply.pop("prompt_token_ids", None)
        for choice in reply["choices"]:
            choice.pop("prompt_token_ids", None)
            choice.pop("token_ids", None)
            choice.pop("policy_versions", None)
    if "logprobs" in hidden:
        for choice in reply["choices"]:
            if "logprobs" in choice:
                choice["logprobs"] = None
    if model and "model" in reply:
        reply["model"] = model
    return reply


@given(REPLY, WRITTEN, HIDDEN, st.sampled_from(["", "gpt"]), st.randoms(use_true_random=False))
def test_the_agent_gets_all_but_what_is_hidden(reply, written, hidden, model, random):
    reply = shuffled(reply, random)
    body = json.dumps(reply, **written).encode()
    shown = OpenAIChat().reader(UpstreamRequest(body=b"", sampling={}, hidden=hidden, model=model)).body(body)
    assert json.loads(shown) == without(reply, hidden, model)
    if without(reply, hidden, model) == reply:
        assert shown == body


@pytest.fixture
def never_taken_apart(monkeypatch):
    monkeypatch.delattr(openai_hidden, "_taken_apart")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"prompt_token_ids":[1,2], "choices" : [{}]}', b'{"choices" : [{}]}'),
        (b'{"choices":[{}] , "prompt_token_ids" : [ 1,\n2 ] }', b'{"choices":[{}]  }'),
        (b'{"choices":[{"token_ids":[]}]}', b'{"choices":[{}]}'),
        (
            b'{"model":"policy","choices":[{"token_ids":[1],"prompt_token_ids":[2],"logprobs":{"content":[]},"x":"\\u00e9"}]}',
            b'{"model":"gpt","choices":[{"logprobs":null,"x":"\\u00e9"}]}',
        ),
        (
            b'{"choices":[{"logprobs":null,"x":1,"prompt_token_ids":[2],"token_ids":[1]}],"model":"gpt"}',
            b'{"choices":[{"logprobs":null,"x":1}],"model":"gpt"}',
        ),
        (
            b'{"choices":[{"text":"\\"token_ids\\": [1]","token_ids":[3]},{"index":1,"token_ids":[4]}]}',
            b'{"choices":[{"text":"\\"token_ids\\": [1]"},{"index":1}]}',
        ),
        (
            b'{"choices":[{"token_ids":[1, 2] , "policy_versions": [[3, 1], [4,1]],"x":[1]}, '
            b'{"a":1,"token_ids":[3],"policy_versions":[[4,1]]}]}',
            b'{"choices":[{"x":[1]}, {"a":1}]}',
        ),
        (
            b'{"choices":[{"token_ids":[1],"policy_versions":[],"message":{"policy_versions":[]}}]}',
            b'{"choices":[{"message":{"policy_versions":[]}}]}',
        ),
    ],
)
@pytest.mark.usefixtures("never_taken_apart")
def test_the_usual_shapes_are_cut_and_every_other_byte_stays(body, expected):
    reader = OpenAIChat().reader(
        UpstreamRequest(body=b"", sampling={}, hidden=frozenset({"token_ids", "logprobs"}), model="gpt")
    )
    assert reader.body(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"token_ids":[1],"message":{"token_ids":[9]}}]}',
        b'{"choices":[{"token_ids":[1],"token_ids":[2]}]}',
        b'{"choices":[{"token_ids":null}]}',
        b'{"choices":[{"token\\u005fids":[1]}]}',
        b'{"choices":[{"policy_versions":[[1,1]],"token_ids":[1]}]}',
        b'{"prompt_token_ids":[1],"policy_versions":[],"choices":[{"policy_versions":[[1,1]],"token_ids":[1]}]}',
        b'{"choices":[{"logprobs":{"logprobs":{}}}]}',
        b'{"choices":[{"a":1,' + b" " * 100 + b'"token_ids":[1]}]}',
    ],
)
def test_what_is_not_certain_is_taken_apart(body):
    reader = OpenAIChat().reader(UpstreamRequest(body=b"", sampling={}, hidden=frozenset({"token_ids", "logprobs"})))
    shown = json.loads(reader.body(body))
    assert "token_ids" not in shown["choices"][0]
    assert "policy_versions" not in shown["choices"][0]
    assert not shown["choices"][0].get("logprobs")
    if b"message" in body:  # what is within it is the agent's
        assert shown["choices"][0]["message"] == json.loads(body)["choices"][0]["message"]
