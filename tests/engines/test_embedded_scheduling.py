"""Requests that join, leave and share; weights that change under way."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.real_engine import slow_steps
from outrider.errors import EngineError

PATIENCE_S = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.fixture
def slow(monkeypatch) -> Iterator[threading.Event]:
    slow = slow_steps(monkeypatch)
    yield slow
    slow.clear()


def ids(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(250) for _ in range(length)]


def test_requests_that_share_a_prompt_prefill_it_once(start_engine):
    engine = start_engine(slots=32, max_model_len=256)
    shared = ids(1, 150)
    prompts = [shared + ids(100 + i, 13) for i in range(32)]
    engine.control.pause()  # so that all are there when the first is admitted
    with ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(engine.complete, prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
        wait_for(lambda: engine.control.stats()["waiting"] == 32)
        engine.control.resume()
        bodies = [future.result() for future in asked]
    assert sum(body["usage"]["completion_tokens"] for body in bodies) == 128
    # The first computes 163; the others only what differs, and at most what it shares beyond a whole block.
    assert engine.control.stats()["prefill_tokens"] <= 163 + 31 * 13


@pytest.mark.parametrize("cache", [0, 1024])
def test_choices_of_one_prompt_prefill_it_once(start_engine, cache):
    engine = start_engine(slots=8, prefix_cache_tokens=cache)
    body = engine.complete(ids(2, 100), n=8, max_tokens=4, ignore_eos=True)
    assert len(body["choices"]) == 8
    assert engine.control.stats()["prefill_tokens"] <= 100 + 7


def test_without_a_prefix_cache_requests_share_nothing(start_engine):
    engine = start_engine(prefix_cache_tokens=0)
    for _ in range(2):
        engine.complete(ids(2, 50), max_tokens=2, ignore_eos=True)
    assert engine.control.stats()["prefill_tokens"] == 100


def test_a_second_turn_finds_the_first_one_with_its_answer(start_engine):
    engine = start_engine()
    prompt = ids(3, 40)
    answer = engine.complete(prompt, max_tokens=30, ignore_eos=True)["choices"][0]["token_ids"]
    second = engine.complete(prompt + answer + ids(4, 5), max_tokens=2)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_a_prompt_longer_than_a_step_is_computed_in_pieces(start_engine, monkeypatch):
    monkeypatch.setattr("outrider.engines.embedded.scheduler.PREFILL_TOKENS", 32)
    engine = start_engine(prefix_cache_tokens=0)
    whole = start_engine(prefix_cache_tokens=0)
    prompt = ids(5, 200)
    before = engine.control.stats()["steps"]
    found = engine.complete(prompt, temperature=0, max_tokens=8, ignore_eos=True)
    assert engine.control.stats()["steps"] - before >= 7 + 7
    monkeypatch.undo()
    expected = whole.complete(prompt, temperature=0, max_tokens=8, ignore_eos=True)
    assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]


def test_more_requests_than_slots_all_end(start_engine):
    engine = start_engine(slots=3)
    with ThreadPoolExecutor(16) as pool:
        bodies = list(pool.map(lambda i: engine.complete(ids(i, 10 + i), max_tokens=3 + i, ignore_eos=True), range(16)))
    assert [body["usage"]["completion_tokens"] for body in bodies] == [3 + i for i in range(16)]
    assert engine.control.stats()["running"] == 0


def test_a_short_request_overtakes_a_long_one(start_engine, slow):
    engine = start_engine(slots=2)
    ended = []
    slow.set()
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(engine.complete, ids(1, 10), max_tokens=240, ignore_eos=True)
        long.add_done_callback(lambda _: ended.append("long"))
        wait_for(lambda: engine.control.stats()["running"] == 1)
        engine.complete(ids(2, 10), max_tokens=2, ignore_eos=True)
        ended.append("short")
        slow.clear()
        long.result()
    assert ended == ["short", "long"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(start_engine, stream):
    engine = start_engine(slots=1, max_model_len=512)
    ask = {"prompt": ids(1, 5), "max_tokens": 500, "ignore_eos": True, "n": 60, "stream": stream}
    body = json.dumps(ask).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(engine.url).port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: engine.control.stats()["running"] == 1)
        if stream:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
    wait_for(lambda: engine.control.stats()["cancelled"] == 1)
    found = engine.control.stats()
    assert (found["running"], found["waiting"]) == (0, 0)
    assert found["steps"] < 60 * 500
    assert engine.complete(ids(2, 5), max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_pause_lets_running_ones_end_and_admits_no_other(start_engine, slow):
    engine = start_engine()
    slow.set()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(engine.complete, ids(1, 10), max_tokens=200, ignore_eos=True)
        wait_for(lambda: engine.control.stats()["running"] == 1)
        engine.control.pause()
        slow.clear()
        waiting = pool.submit(engine.complete, ids(2, 10), max_tokens=2, ignore_eos=True)
        assert running.result()["usage"]["completion_tokens"] == 200
        wait_for(lambda: engine.control.stats()["waiting"] == 1)
        assert not waiting.done()
        engine.control.resume()
        assert waiting.result()["usage"]["completion_tokens"] == 2


def greedy(engine) -> list[int]:
    return engine.complete(ids(6, 40), temperature=0, max_tokens=12, ignore_eos=True)["choices"][0]["token_ids"]


def test_new_weights_serve_under_their_version(start_engine, other_weights, tiny):
    engine, other = start_engine(version=3), start_engine(model=str(tiny))
    before = greedy(engine)
    assert engine.control.version() == 3
    engine.control.load_weights(other_weights, 4)
    assert engine.control.version() == 4
    after = greedy(engine)
    assert after != before
    other.control.load_weights(other_weights, 1)
    assert greedy(other) == after  # also: no prefix of the old weights was used
    response = engine.post("/v1/completions", prompt=ids(6, 40), max_tokens=1)
    assert response.headers["x-outrider-policy-version"] == "4"
    engine.control.load_weights(tiny, 5)
    assert greedy(engine) == before


def spoil(tiny, folder, change):
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def rename(tensors):
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


def reshape(tensors):
    tensors["model.norm.weight"] = torch.zeros(65)


def poison(tensors):
    tensors["model.norm.weight"][3] = torch.inf


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rename, "lacks 1 of the model's tensors: model.layers.1.mlp.up_proj.weight"),
        (reshape, "model.norm.weight .* has shape \\(65,\\), the model's is \\(64,\\)"),
        (poison, "model.norm.weight .* not finite"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unknown"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(engine, tiny, tmp_path, change, says):
    before = greedy(engine)
    with pytest.raises(EngineError, match=says):
        engine.control.load_weights(spoil(tiny, tmp_path / "spoilt", change), 9)
    assert engine.control.version() == 0
    assert greedy(engine) == before


def test_weights_that_cannot_be_read_change_nothing(engine, tiny, tmp_path):
    before = greedy(engine)
    with pytest.raises(EngineError, match="no folder"):
        engine.control.load_weights(tmp_path / "nowhere", 9)
    with pytest.raises(EngineError, match=r"no model\.safetensors"):
        engine.control.load_weights(tmp_path, 9)
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(EngineError, match="cannot be read"):
        engine.control.load_weights(tmp_path, 9)
    for body in ({"path": 3, "version": 1}, {"path": str(tiny)}, {"path": str(tiny), "version": "4"}):
        assert engine.post("/control/load_weights", **body).status_code == 400
    assert engine.control.version() == 0
    assert greedy(engine) == before


def test_a_swap_amid_a_request_shows_in_its_versions(start_engine, slow, other_weights, tiny):
    engine = start_engine(max_model_len=512)
    stop = threading.Event()
    slow.set()

    def swap() -> None:
        version = 0
        wait_for(lambda: engine.control.stats()["running"] == 1)
        while not stop.is_set():
            version += 1
            engine.control.load_weights(other_weights if version % 2 else tiny, version)
            slow.clear()

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        body = engine.complete(ids(1, 20), max_tokens=480, ignore_eos=True, logprobs=0)
    finally:
        stop.set()
        thread.join()
    versions = [version for version, _ in body["choices"][0]["policy_versions"]]
    assert len(versions) > 1
    assert versions == sorted(set(versions))
    assert np.isfinite(body["choices"][0]["logprobs"]["token_logprobs"]).all()
    last = engine.control.version()
    engine.control.load_weights(tiny, last + 1)
    fresh = start_engine()
    assert greedy(engine) == greedy(fresh)  # nothing that two sets of weights computed was kept


def level(tensors):
    """Every token is as likely as any other, to the last bit."""
    tensors["model.norm.weight"].zero_()


@pytest.fixture(scope="module")
def level_weights(tiny, tmp_path_factory):
    return spoil(tiny, tmp_path_factory.mktemp("level") / "weights", level)


def counted(runs, size):
    assert sum(count for _, count in runs) == size
    return [version for version, count in runs for _ in range(count)]


def levelled(values):
    """1 for each log-prob that only the level weights give, else 0."""
    return [int(abs(value - values[-1]) < 1e-6) for value in values]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chat", [True, False])
def test_R12_a_stream_says_from_which_token_on_new_weights_sampled(start_engine, slow, tiny, level_weights, chat, n):
    engine = start_engine(max_model_len=1024)
    slow.set()
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True} if chat else {"prompt": ids(1, 20)}
    ask = {"logprobs": 0, **body, "n": n, "max_tokens": 600, "ignore_eos": True, "return_token_ids": True}
    versions = {index: [] for index in range(n)}
    values = {index: [] for index in range(n)}
    told = 0
    url = "/v1/chat/completions" if chat else "/v1/completions"
    with engine.http.stream("POST", url, json=ask | {"stream": True}) as response:
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            found, size = versions[choice["index"]], len(choice.get("token_ids", ()))
            if "policy_versions" in choice:
                told += 1
                found += counted(choice["policy_versions"], size)
            else:
                found += found[-1:] * size
            if size:
                logprobs = choice["logprobs"]
                values[choice["index"]] += (
                    [entry["logprob"] for entry in logprobs["content"]] if chat else logprobs["token_logprobs"]
                )
            if len(found) == 5 and engine.control.version() == 0:
                engine.control.load_weights(level_weights, 1)
                slow.clear()
    assert told == 2 * n  # at the first token and at the swap
    for index in range(n):
        assert versions[index] == levelled(values[index])
        assert set(versions[index]) == {0, 1}


def test_R12_a_plain_answer_says_it_too(start_engine, slow, level_weights):
    engine = start_engine(max_model_len=1024)
    slow.set()
    ask = {"n": 2, "max_tokens": 900, "ignore_eos": True, "logprobs": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.complete, [ids(1, 20), ids(2, 9)], **ask)
        wait_for(lambda: engine.control.stats()["decode_tokens"] > 40)
        engine.control.load_weights(level_weights, 1)
        slow.clear()
        choices = answer.result()["choices"]
    assert len(choices) == 4
    for choice in choices:
        found = counted(choice["policy_versions"], len(choice["token_ids"]))
        assert found == levelled(choice["logprobs"]["token_logprobs"])
        assert set(found) == {0, 1}


def test_resetting_the_prefix_cache_empties_it(start_engine):
    engine = start_engine()
    engine.complete(ids(1, 50), max_tokens=1)
    assert engine.control.stats()["prefix_blocks"] == 3
    engine.control.reset_prefix_cache()
    assert engine.control.stats()["prefix_blocks"] == 0
    assert engine.complete(ids(1, 50), max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_weights_whose_numbers_overflow_fail_the_request_and_not_the_engine(start_engine, tiny, tmp_path):
    def blow_up(tensors):
        tensors["model.norm.weight"] *= 1e30
        tensors["model.embed_tokens.weight"] *= 1e10

    engine = start_engine()
    engine.control.load_weights(spoil(tiny, tmp_path / "huge", blow_up), 1)
    response = engine.post("/v1/completions", prompt=ids(1, 5), max_tokens=3)
    assert response.status_code == 500
    assert "not finite" in response.json()["error"]["message"]
    events_response = engine.http.post("/v1/completions", json={"prompt": ids(1, 5), "stream": True})
    assert events_response.status_code == 500  # known before the stream is opened
    engine.control.load_weights(tiny, 2)
    assert len(greedy(engine)) == 12


def test_holes_left_by_ended_requests_are_closed(start_engine):
    """Short and long ones in turn: the long ones are moved together and go on as if nothing had happened."""
    engine, calm = start_engine(slots=8), start_engine(slots=8)
    lengths = [60 if i % 2 else 4 for i in range(8)]
    ask = [{"prompt": ids(i, 20 + i), "max_tokens": n, "temperature": 0} for i, n in enumerate(lengths)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: engine.complete(**body, ignore_eos=True), ask))
    alone = [calm.complete(**body, ignore_eos=True) for body in ask]
    assert [b["choices"][0]["token_ids"] for b in together] == [b["choices"][0]["token_ids"] for b in alone]
