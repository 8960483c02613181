"""Weights that are swapped while a call runs: which version sampled each of its tokens."""

from __future__ import annotations

import http.client
import json
import math
import shutil
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fakes.engine import chunk, entries, plain, raw_stream, sse, stream, usage
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES, HostedGateway, wait_for
from fakes.real_engine import RealEngine, slow_steps
from fakes.tiny_model import save_tiny
from outrider import trajectory
from outrider.engines.embedded.client import EmbeddedEngine
from outrider.gateway.versions import versions_of
from outrider.types import Call, Fidelity
from outrider.wire import SampledChoice

PATIENCE_S = 60


def runs(call: Call) -> list[list[tuple[int, int]]]:
    return [list(choice.versions) for choice in call.choices]


def in_force(call: Call) -> tuple[int | None, int | None]:
    return call.version_start, call.version_end


# -- an engine that says it ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def level(model, tmp_path_factory):
    """Weights under which every token is as likely as any other: its log-prob tells that they sampled it."""
    folder = tmp_path_factory.mktemp("level") / "weights"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def real(model):
    with RealEngine(model) as engine:
        yield engine


ASKED = {
    "chat, prompt made by the engine": (CHAT, {"messages": MESSAGES}, "engine"),
    "chat, prompt made by the gateway": (CHAT, {"messages": MESSAGES}, "gateway"),
    "completions of token ids": (COMPLETIONS, {"prompt": [1, 2, 3, 4]}, "engine"),
    "another protocol": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 900}, "engine"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_R12_each_token_of_a_stream_keeps_the_version_that_sampled_it(
    host, real, model, level, tmp_path, asked, monkeypatch
):
    """The engine, the gateway, the store and the training row agree; the agent sees nothing of it."""
    slow = slow_steps(monkeypatch)
    slow.set()
    path, body, tokens = ASKED[asked]
    made = {"tokens": tokens, "tokenizer": str(model)} if tokens == "gateway" else {"tokens": tokens}
    with HostedGateway(host, real, tmp_path / "store.sqlite3", mode="train", model="policy", **made) as gateway:
        key = gateway.open(sampling={"max_tokens": 900, "ignore_eos": True})
        gateway.client.resume(0)
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
        connection.request("POST", f"/s/{key}{path}", json.dumps({"model": "policy", **body, "stream": True}))
        answer = connection.getresponse()
        seen = b"".join(answer.readline() for _ in range(40))
        EmbeddedEngine(real.base_url).load_weights(level, 1)
        gateway.client.resume(1)
        slow.clear()
        seen += answer.read()
        connection.close()
        call = gateway.call()
        assert b"policy_version" not in seen
        assert b"token_ids" not in seen
        assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
        assert in_force(call) == (0, 1)
        (choice,) = call.choices
        assert [version for version, _ in choice.versions] == [0, 1]
        uniform = -math.log(json.loads((model / "config.json").read_text())["vocab_size"])
        sampled_by = [int(abs(value - uniform) < 1e-6) for value in choice.logprobs.tolist()]
        assert [version for version, count in choice.versions for _ in range(count)] == sampled_by
        (sample,) = trajectory.build([call]).samples(rollout_id="r", group_id="g").samples
        assert sample.versions[sample.loss_mask].tolist() == sampled_by


def told(*versions, ids=(5, 6, 7)):
    fields = {"token_ids": list(ids), "policy_versions": [list(run) for run in versions]}
    return plain({**fields, "logprobs": entries(*[-1.0] * len(ids))}, completion=len(ids))


def test_a_call_of_one_version_says_no_more_than_its_two_numbers(engine, gateway):
    gateway.client.resume(3)
    engine.answers.append(told((3, 3)))
    got = gateway.chat(gateway.open())
    call = gateway.call()
    assert (in_force(call), runs(call), call.fidelity) == ((3, 3), [[]], Fidelity.EXACT)
    assert "policy_versions" not in got.json["choices"][0]


def test_an_agent_that_asks_for_ids_itself_gets_the_versions_with_them(engine, gateway):
    gateway.client.resume(3)
    engine.answers.append(told((3, 3)))
    got = gateway.chat(gateway.open(), return_token_ids=True)
    assert got.json["choices"][0]["policy_versions"] == [[3, 3]]


def test_R12_the_engine_may_know_of_a_publish_before_the_gateway(engine, gateway):
    """It serves new weights a moment before the resume: its word counts."""
    gateway.client.resume(3)
    engine.answers.append(told((3, 1), (4, 2)))
    gateway.chat(gateway.open())
    call = gateway.call()
    assert (in_force(call), runs(call), call.fidelity) == ((3, 4), [[(3, 1), (4, 2)]], Fidelity.EXACT)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ([(2, 3)], "versions: choice 0 was sampled under version 2, older than 3 which it was forwarded under"),
        ([(4, 1), (3, 2)], "versions: those of choice 0 go back"),
        ([(3, 4), (4, -1)], "versions: an entry of choice 0 is none"),
        ([(2**40, 3)], "versions: an entry of choice 0 is none"),
        ([(3, 2)], "reply: choice 0: policy_versions of 2 tokens for 3"),
        ([(3, 2), (4, 2)], "reply: choice 0: policy_versions of 4 tokens for 3"),
        ([(3, "3")], "reply: a field of the reply has another type"),
    ],
)
def test_versions_that_cannot_be_so_make_a_call_broken(engine, gateway, versions, reason):
    gateway.client.resume(3)
    engine.answers.append(told(*versions))
    assert gateway.chat(gateway.open()).status == 200
    call = gateway.call()
    assert call.fidelity is Fidelity.BROKEN
    assert call.fidelity_reason.startswith(reason)
    assert runs(call) == [[]]


def test_a_choice_without_versions_beside_one_that_has_them_is_broken():
    with_versions = SampledChoice(index=0, token_ids=[1, 2], versions=((3, 1), (4, 1)))
    found = versions_of([with_versions, SampledChoice(index=1, token_ids=[1])], start=3, end=4, arrived=None)
    assert found.problem == "versions: choice 1 has 1 token ids, 0 of them with a version"


def test_weights_that_are_not_ours_have_no_versions(engine, gateway):
    engine.answers.append(told((9, 3)))
    gateway.chat(gateway.open())
    call = gateway.call()
    assert (in_force(call), runs(call), call.fidelity) == ((None, None), [[]], Fidelity.EXACT)


def test_a_chunk_without_versions_goes_on_under_the_last_one(engine, gateway):
    gateway.client.resume(3)
    pieces = [{"token_ids": [5], "policy_versions": [[3, 1]]}, {"token_ids": [6]}, {"token_ids": []}]
    pieces += [{"token_ids": [7, 8], "policy_versions": [[3, 1], [4, 1]]}, {"token_ids": [9]}]
    chunks = [chunk({"content": "a"}, **piece, logprobs=entries(*[-1.0] * len(piece["token_ids"]))) for piece in pieces]
    chunks[0]["prompt_token_ids"] = [1, 2]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    engine.answers.append(stream(*chunks, usage(2, 5)))
    got = gateway.chat(gateway.open(), stream=True)
    call = gateway.call()
    assert (call.fidelity_reason, runs(call)) == ("", [[(3, 3), (4, 2)]])
    assert b"policy_versions" not in got.body


# -- one that doesn't --------------------------------------------------------------------------------------------------


def piece(index, ids, finish_reason=None):
    found = chunk({"content": "a"}, token_ids=ids, logprobs=entries(*[-1.0] * len(ids)), finish_reason=finish_reason)
    found["choices"][0]["index"] = index
    return found | {"prompt_token_ids": [1, 2]}


def test_R12_tokens_that_came_before_a_publish_are_of_the_version_until_then(engine, gateway):
    gateway.client.resume(3)
    gate = threading.Event()
    first = [piece(0, [5, 6]), piece(1, [7]), piece(0, [8])]
    last = [piece(1, [9, 10, 11], "stop"), piece(0, [12], "stop"), usage(2, 8)]
    parts = sse(*first, *last)
    engine.answers.append(raw_stream(*parts[:3], b"".join(parts[3:]), gate=gate))
    key = gateway.open()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    connection.request("POST", f"/s/{key}{CHAT}", json.dumps({"messages": MESSAGES, "stream": True, "n": 2}))
    answer = connection.getresponse()
    for _ in range(6):
        answer.readline()  # three events, each with its blank line
    gateway.client.pause(0.0)
    gateway.client.resume(3)  # nothing was published
    gateway.client.resume(4)
    gate.set()
    answer.read()
    connection.close()
    call = gateway.call()
    assert (call.fidelity_reason, in_force(call)) == ("", (3, 4))
    assert runs(call) == [[(3, 3), (4, 1)], [(3, 1), (4, 3)]]


def test_R12_a_stream_that_begins_after_a_publish_is_all_of_the_new_version(engine, gateway):
    gateway.client.resume(3)
    gate = threading.Event()
    engine.answers.append(raw_stream(b"".join(sse(piece(0, [5, 6], "stop"), usage(2, 2))), gate=gate))
    key = gateway.open()
    agent = threading.Thread(target=gateway.chat, args=(key,), kwargs={"stream": True})
    agent.start()
    wait_for(lambda: engine.received)
    gateway.client.resume(4)
    gate.set()
    agent.join(PATIENCE_S)
    assert (in_force(gateway.call()), runs(gateway.call())) == ((3, 4), [[(4, 2)]])


def test_R12_of_a_plain_answer_nobody_knows_so_the_older_version_counts(engine, gateway):
    gateway.client.resume(3)
    gate = threading.Event()
    engine.answers.append(replace(plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}), gate=gate))
    key = gateway.open()
    agent = threading.Thread(target=gateway.chat, args=(key,))
    agent.start()
    wait_for(lambda: engine.received)
    gateway.client.resume(4)
    gate.set()
    agent.join(PATIENCE_S)
    call = gateway.call()
    assert (in_force(call), runs(call)) == ((3, 4), [[]])
    (sample,) = trajectory.build([call]).samples(rollout_id="r", group_id="g").samples
    assert sample.versions[sample.loss_mask].tolist() == [3, 3]


def test_where_somebody_goes_back_to_older_weights_the_call_says_only_its_two_versions():
    choice = SampledChoice(index=0, token_ids=[1, 2, 3])
    found = versions_of([choice], start=5, end=4, arrived=((5, {0: 1}),))
    assert (found.runs, found.end, found.problem) == (((),), 4, "")


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=5), st.integers(0, 4))
def test_runs_by_arrival_hold_each_token_once_and_in_order(publishes, rest):
    version, tokens, arrived, expected = 0, 0, [], []
    for newer, count in publishes:
        tokens += count
        expected += [version] * count
        arrived.append((version, {0: tokens} if tokens else {}))
        version += newer
    expected += [version] * rest
    choice = SampledChoice(index=0, token_ids=list(range(len(expected))))
    found = versions_of([choice], start=0, end=version, arrived=tuple(arrived))
    if not publishes:
        assert found is None
    else:
        assert [v for v, count in found.runs[0] for _ in range(count)] == expected
        assert len({v for v, _ in found.runs[0]}) == len(found.runs[0])
