"""What comes out is what the model says: against transformers, alone and in company, streamed and plain."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 24


def random_prompt(seed: int, length: int, shared: int = 0) -> list[int]:
    head, rest = random.Random(0), random.Random(seed)
    return [head.randrange(250) for _ in range(shared)] + [rest.randrange(250) for _ in range(length - shared)]


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def greedy_reference(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return list(out[0, len(prompt) :].tolist())


def logprobs_reference(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    found = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    return np.asarray(found)


def test_greedy_equals_transformers_generate(engine, reference):
    for seed, length in enumerate((1, 2, 15, 16, 17, 90)):
        prompt = random_prompt(seed, length)
        body = engine.complete(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True)
        assert body["choices"][0]["token_ids"] == greedy_reference(reference, prompt, TOKENS)


def test_greedy_is_the_same_in_company_and_with_shared_prefixes(start_engine, reference):
    engine = start_engine(slots=6)
    prompts = [random_prompt(seed, 30 + 7 * seed, shared=25 * (seed % 3)) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        bodies = list(
            pool.map(lambda p: engine.complete(p, temperature=0, max_tokens=TOKENS, ignore_eos=True), prompts)
        )
    for prompt, body in zip(prompts, bodies, strict=True):
        assert body["choices"][0]["token_ids"] == greedy_reference(reference, prompt, TOKENS)


def test_logprobs_of_a_request_do_not_depend_on_the_others(start_engine):
    engine = start_engine(slots=8)
    prompts = [random_prompt(seed, 20 + 11 * seed, shared=20) for seed in range(8)]
    ask = {"temperature": 1.0, "max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True}

    def one(seed: int) -> Any:
        return engine.complete(prompts[seed], seed=seed, **ask)["choices"][0]

    alone = [one(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
    for a, b in zip(alone, together, strict=True):
        assert a["token_ids"] == b["token_ids"]
        np.testing.assert_allclose(a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"], atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_R05_logprobs_are_those_of_the_distribution_at_the_temperature(engine, reference, temperature):
    prompt = random_prompt(3, 40)
    choice = engine.complete(prompt, temperature=temperature, max_tokens=TOKENS, logprobs=0, seed=5, ignore_eos=True)
    found = choice["choices"][0]
    expected = logprobs_reference(reference, prompt, found["token_ids"], temperature)
    np.testing.assert_allclose(found["logprobs"]["token_logprobs"], expected, atol=1e-4)


def test_greedy_logprobs_are_at_temperature_one(engine, reference):
    prompt = random_prompt(4, 40)
    found = engine.complete(prompt, temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)["choices"][0]
    expected = logprobs_reference(reference, prompt, found["token_ids"])
    np.testing.assert_allclose(found["logprobs"]["token_logprobs"], expected, atol=1e-4)


def test_a_seed_reproduces_and_another_differs(engine):
    ask = {"prompt": random_prompt(1, 20), "max_tokens": TOKENS, "ignore_eos": True, "n": 2}
    first, again, other = (engine.complete(**ask, seed=seed)["choices"] for seed in (7, 7, 8))
    assert [c["token_ids"] for c in first] == [c["token_ids"] for c in again]
    assert [c["token_ids"] for c in first] != [c["token_ids"] for c in other]
    assert first[0]["token_ids"] != first[1]["token_ids"]


def test_requests_without_a_seed_differ(engine):
    ask = {"prompt": random_prompt(1, 20), "max_tokens": TOKENS, "ignore_eos": True}
    assert engine.complete(**ask)["choices"][0]["token_ids"] != engine.complete(**ask)["choices"][0]["token_ids"]


def test_several_prompts_and_choices_are_ordered(engine):
    prompts = [random_prompt(1, 12), random_prompt(2, 30)]
    body = engine.complete(prompts, n=2, max_tokens=3, ignore_eos=True, temperature=0)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert body["choices"][0]["token_ids"] == body["choices"][1]["token_ids"]
    assert body["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 42,
        "completion_tokens": 12,
        "total_tokens": 54,
        "prompt_tokens_details": None,
    }


def test_greedy_text_is_the_same_with_and_without_the_prefix_cache(start_engine, reference):
    prompts = [random_prompt(seed, 70, shared=50) for seed in range(4)]
    texts = []
    for size in (0, 1024):
        engine = start_engine(prefix_cache_tokens=size)
        found = [
            engine.complete(p, temperature=0, max_tokens=TOKENS, ignore_eos=True) for p in prompts for _ in range(2)
        ]
        texts.append([body["choices"][0]["text"] for body in found])
        cached = sum(body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in found)
        assert (cached > 0) == (size > 0)
    assert texts[0] == texts[1]


PARAMETERS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 20),
        "temperature": st.sampled_from([0, 0.4, 1.0, 3.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "top_k": st.sampled_from([-1, 1, 5, 400]),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 1000),
        "ignore_eos": st.booleans(),
        "stop": st.lists(st.sampled_from(["e", "th", "quick", " a", "\n"]), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 290), max_size=2),
        "skip_special_tokens": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARAMETERS, st.integers(0, 4), st.booleans())
def test_ids_logprobs_and_usage_agree_and_a_stream_says_the_same(engine, parameters, top, chat):
    if chat:
        route, ask = "/v1/chat/completions", {"messages": [{"role": "user", "content": "the quick fox"}]}
        ask |= {"logprobs": True, "top_logprobs": top}
    else:
        route, ask = "/v1/completions", {"prompt": random_prompt(9, 23), "logprobs": top}
    ask |= {**parameters, "return_token_ids": True}
    plain = engine.post(route, **ask).json()
    events = engine.stream(route, **ask, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert events[-1]["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert plain["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in plain["choices"])
    prompt = plain["prompt_token_ids"] if chat else plain["choices"][0]["prompt_token_ids"]
    assert plain["usage"]["prompt_tokens"] == len(prompt)
    streamed_prompts = [event.get("prompt_token_ids") for event in events]
    if chat:
        assert streamed_prompts[0] == prompt
        assert not any(streamed_prompts[1:])
    for choice in plain["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert [i for part in parts for i in part.get("token_ids") or []] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if chat:
            assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
            entries = choice["logprobs"]["content"]
            assert all(len(entry["top_logprobs"]) == top for entry in entries)
            streamed = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
            assert [e["bytes"] for e in streamed] == [e["bytes"] for e in entries]
            np.testing.assert_allclose([e["logprob"] for e in streamed], [e["logprob"] for e in entries], atol=1e-4)
            assert len(entries) == len(choice["token_ids"])
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            streamed = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
            np.testing.assert_allclose(streamed, choice["logprobs"]["token_logprobs"], atol=1e-4)
            offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]
            assert {len(choice["logprobs"][key]) for key in ("tokens", "token_logprobs", "top_logprobs")} == {
                len(choice["token_ids"])
            }
        assert (choice["finish_reason"] == "length") <= (len(choice["token_ids"]) == parameters["max_tokens"])
        text = choice["message"]["content"] if chat else choice["text"]
        assert not any(stop in text for stop in parameters["stop"])


def test_text_is_the_tokenizers_own(engine, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for seed in range(5):
        found = engine.complete("the quick", seed=seed, temperature=1.5, max_tokens=40, ignore_eos=True)["choices"][0]
        whole = tokenizer.decode(found["token_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert whole.startswith(found["text"])  # characters left incomplete at the end are dropped
        assert set(whole[len(found["text"]) :]) <= {"\N{REPLACEMENT CHARACTER}"}


def test_T17_any_of_several_end_tokens_stops_and_the_reason_tells(start_engine, tiny, reference):
    """The template's <|im_end|> ends an answer although the tokenizer's eos is another token."""
    engine = start_engine()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    seen = set()
    for seed in range(60):
        found = engine.complete("a", seed=seed, temperature=3.0, max_tokens=100)["choices"][0]
        if found["finish_reason"] == "stop":
            seen.add(found["token_ids"][-1])
            assert found["stop_reason"] is None
            assert not set(found["token_ids"][:-1]) & set(ends)
        else:
            assert len(found["token_ids"]) == 100
    assert seen == set(ends)


def test_T12_stop_text_is_held_back_and_its_ids_are_not(engine, reference, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for seed in range(20):
        free = engine.complete("the", seed=seed, max_tokens=30, ignore_eos=True, temperature=1.0)["choices"][0]
        pieces = [tokenizer.decode([i]) for i in free["token_ids"]]
        if "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[8:11]) and len("".join(pieces[8:11]).strip()) > 2:
            break
    stop = "".join(pieces[8:11])  # spelled by three tokens
    at = free["text"].index(stop)
    ask = {"prompt": "the", "seed": seed, "max_tokens": 30, "ignore_eos": True, "stop": [stop], "logprobs": 0}
    found = engine.complete(**ask)["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    assert found["text"] == free["text"][:at]
    assert found["token_ids"] == free["token_ids"][: len(found["token_ids"])]
    assert len(found["logprobs"]["token_logprobs"]) == len(found["token_ids"])
    assert tokenizer.decode(found["token_ids"]).endswith(stop)  # the ids that spell it are all there
    events = engine.stream("/v1/completions", **ask, return_token_ids=True)
    held = [event["choices"][0] for event in events if event["choices"][0]["text"] == ""]
    assert all(len(choice["token_ids"]) == 1 for choice in held)
    assert len(held) >= 3  # text waits, ids don't
