from __future__ import annotations

import dataclasses
import io
import re

import numpy as np
import pytest
from fabricate import WORDS, ReadStore, fabricate
from rich.console import Console

from outrider.errors import ConfigError
from outrider.reports.inspect import list_rollouts, show_rollout
from outrider.reports.tokens import pieces, strength
from outrider.types import CallState, Fidelity, Retry, RolloutState


@pytest.fixture
def store(run_dir):
    return fabricate(run_dir, hostile=True)


def plain(width=150):
    return Console(file=io.StringIO(), width=width, color_system=None)


def listed(store, **filters) -> str:
    console = plain()
    list_rollouts(store, console, **filters)
    return console.file.getvalue()


def seen(store, rollout_id, **options) -> str:
    console = plain()
    show_rollout(store, rollout_id, console, **options)
    return console.file.getvalue()


def change_calls(store, rollout_id, **changes):
    attempt = store.all_attempts[rollout_id][-1].id
    store.all_calls[attempt] = [dataclasses.replace(call, **changes) for call in store.all_calls[attempt]]


def test_a_list_shows_whole_ids_and_counts_what_it_hides(store):
    text = listed(store, split="train", limit=5)
    rows = [line for line in text.splitlines() if line.startswith("step-")]
    assert [row.split()[0] for row in rows[:2]] == ["step-0001-000-0", "step-0001-000-1"]
    assert len(rows) == 5
    assert "reward_invalid  the reward returned NaN" in rows[1]
    assert "train: 1 failed, 31 succeeded, mean reward 0." in text
    assert "Showing 5 of 32; more with --limit." in text


def test_a_list_in_a_narrow_pipe_is_not_cut(store):
    console = plain(width=40)
    list_rollouts(store, console, state=RolloutState.FAILED)
    row = next(line for line in console.file.getvalue().splitlines() if line.startswith("step-"))
    assert row.rstrip().endswith("the reward returned NaN")


def test_a_list_takes_its_filters_together(store):
    rows = [r for r in listed(store, split="train", step=3, state="succeeded").splitlines() if r.startswith("step-")]
    assert len(rows) == 4
    assert all(row.startswith("step-0003") for row in rows)


def test_a_list_without_a_match_helps(store):
    assert "Did you mean --split before/greedy?" in listed(store, split="before/gredy")
    assert "There are no rollouts in this run yet." in listed(ReadStore())


def test_a_rollout_is_shown_in_full(store):
    text = seen(store, "step-0001-000-0", tokenizer=WORDS)
    for words in (
        "step-0001-000-0  succeeded",
        "split train, step 1, group step-0001-000, mode train",
        '"question": "What is 1 times 7?"',
        "attempt 1  (kept, not counted)",
        "engine: the engine answered 503",
        "stderr: Traceback",
        "attempt 2  (its calls count)",
        "call 1 of 2",
        "exact  HTTP 200  openai_chat, model policy, policy version 0",
        "102 prompt and 12 completion tokens, temperature 1.0, max_tokens 64",
        "continues call 1: 7 messages as there",
        "I think 1 times 7 is about 14.<|end|>",
        "12 tokens, log-prob sum -",
        "least expected: ",
        "final 0.4  the reply was no JSON tool call",
        "by calc,",
    ):
        assert words in text
    assert text.count("You use a calculator") == 1  # what call 1 showed is not shown again


def test_every_token_is_listed_on_demand(store):
    text = seen(store, "step-0002-000-0", tokenizer=WORDS, all_tokens=True)
    call = store.all_calls["step-0002-000-0.a1"][0]
    for position, (token, logprob) in enumerate(
        zip(call.choices[0].token_ids, call.choices[0].logprobs, strict=True)
    ):  # fmt: skip
        assert re.search(rf"^ +{position} +{token} +{logprob:.4f} ", text, re.MULTILINE)
    assert "context tokens]" not in text


def test_without_a_tokenizer_ids_are_shown(store):
    ids = store.all_calls["step-0002-000-0.a1"][0].choices[0].token_ids.tolist()
    text = " ".join(seen(store, "step-0002-000-0").split())
    assert " ".join(map(str, ids)) in text


def test_tokens_are_coloured_by_mask_and_strength(store):
    call = store.all_calls["step-0002-000-0.a1"][0]
    logprobs = np.zeros_like(call.choices[0].logprobs)
    logprobs[0] = -9.0
    choice = dataclasses.replace(call.choices[0], logprobs=logprobs)
    store.all_calls["step-0002-000-0.a1"] = [dataclasses.replace(call, choices=(choice,))]
    console = Console(file=io.StringIO(), width=150, force_terminal=True, color_system="standard", _environ={})
    show_rollout(store, "step-0002-000-0", console, tokenizer=WORDS)
    coloured = console.file.getvalue()
    assert "\x1b[1;31mI\x1b[0m" in coloured  # the unlikely first token, bold red
    assert "\x1b[2;32m think\x1b[0m" in coloured  # a certain one
    assert re.search(r"\x1b\[2m[^\x1b]*assistant", coloured)  # context is dim


def test_calls_without_ids_and_broken_ones_are_shown_with_their_reason(store):
    change_calls(store, "step-0003-000-0", fidelity=Fidelity.TEXT, prompt_ids=None, choices=(), usage=None)
    text = seen(store, "step-0003-000-0", tokenizer=WORDS)
    assert "no token ids: the upstream gave none" in text
    choice = store.all_calls["step-0004-000-0.a1"][0].choices[0]
    change_calls(
        store,
        "step-0004-000-0",
        fidelity=Fidelity.BROKEN,
        fidelity_reason="12 ids but 3 log-probs",
        choices=(dataclasses.replace(choice, logprobs=choice.logprobs[:3]),),
        prompt_ids=None,
        state=CallState.FAILED,
        status=502,
        version_end=3,
        first_token_s=None,
    )
    text = seen(store, "step-0004-000-0", tokenizer=WORDS, all_tokens=True)
    assert "broken: 12 ids but 3 log-probs  failed  HTTP 502" in text
    assert "policy version 0 to 3, swapped within the call" in text
    assert "[context unknown]" in text
    change_calls(store, "step-0004-000-0", choices=(dataclasses.replace(choice, logprobs=choice.logprobs[:0]),))
    assert "no log-probs" in seen(store, "step-0004-000-0")


def test_R12_a_call_says_which_of_its_tokens_are_of_which_version(store):
    choice = store.all_calls["step-0004-000-0.a1"][0].choices[0]
    size = len(choice.token_ids)
    mixed = dataclasses.replace(choice, versions=((2, 1), (3, size - 1)))
    change_calls(store, "step-0004-000-0", choices=(mixed,), version_start=2, version_end=3)
    text = seen(store, "step-0004-000-0", tokenizer=WORDS, all_tokens=True)
    assert "policy version 2 to 3, swapped within the call" in text
    assert f"finish reason stop; 1 of version 2, {size - 1} of version 3" in text
    rows = [line.split() for line in text.splitlines()]
    header = next(row for row in rows if row[:3] == ["t", "id", "log-prob"])
    found = [row[header.index("version")] for row in rows if len(row) > 4 and row[0].isdigit() and row[1].isdigit()]
    assert found[:size] == ["2", *["3"] * (size - 1)]
    assert "version" not in seen(store, "step-0003-000-0", tokenizer=WORDS, all_tokens=True).replace(
        "policy version", ""
    )


def test_a_rollout_that_never_ran(store):
    one = store.all_rollouts["step-0005-000-0"]
    store.all_rollouts[one.id] = dataclasses.replace(one, state=RolloutState.QUEUED, attempt=0, reward=None)
    store.all_attempts[one.id] = []
    assert "No attempt of it is in the store." in seen(store, one.id)


def test_a_harness_that_made_no_call_and_got_no_reward(store):
    store.all_calls["step-0006-000-0.a1"] = []
    store.all_rewards["step-0006-000-0.a1"] = []
    text = seen(store, "step-0006-000-0")
    assert "The harness made no call." in text
    assert "None was given" in text


@pytest.mark.parametrize("tokenizer", [None, WORDS])
@pytest.mark.parametrize("all_tokens", [False, True])
def test_hostile_text_steers_no_terminal(store, tokenizer, all_tokens):
    console = Console(file=io.StringIO(), width=150, force_terminal=True, color_system="standard", _environ={})
    list_rollouts(store, console, limit=1000)
    show_rollout(store, "after-0000-greedy-aaa", console, tokenizer=tokenizer, all_tokens=all_tokens)
    text = console.file.getvalue()
    text.encode("utf-8")
    left = re.sub(r"\x1b\[[0-9;]*m", "", text)  # rich's own colours
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", left)
    assert "⟨U+001B⟩" in left
    assert "[bold]rich[/bold] [/]" in " ".join(left.split())  # markup of rich stays text


def test_an_unknown_rollout_names_its_neighbours(store):
    with pytest.raises(ConfigError, match=r"no rollout 'step-0001-000-9' .*Near ones: step-0001-000-\d") as raised:
        show_rollout(store, "step-0001-000-9", plain())
    assert raised.value.exit_code == 2
    with pytest.raises(ConfigError, match="0 are there"):
        show_rollout(ReadStore(), "x\x1b", plain())


def test_strength_of_a_log_prob():
    probabilities = [0.01, 0.06, 0.31, 0.71, 0.96]
    assert [strength(float(np.log(p))) for p in probabilities] == [0, 1, 2, 3, 4]
    assert strength(float("nan")) == 0
    assert strength(float("-inf")) == 0


def test_pieces_are_one_for_each_id_or_none():
    assert pieces([0, 1], lambda ids: ["a", "b"]) == ["a", "b"]
    assert pieces([0, 1], lambda ids: ["ab"]) is None
    assert pieces([0, 1], None) is None


def test_a_call_shows_how_its_prompt_came_about(store):
    change_calls(store, "step-0001-000-1", continuation="engine: a forced tool call")
    assert "prompt engine: a forced tool call" in " ".join(seen(store, "step-0001-000-1").split())


def test_a_call_shows_which_replica_answered_and_what_was_tried_before(store):
    tried = Retry(replica="http://gpu-1", status=0, error="upstream_cut: gone", duration_s=1.5, wait_s=0.1)
    refused = dataclasses.replace(tried, status=503, error="")
    change_calls(store, "step-0001-000-1", replica="http://gpu-2", retries=(tried, refused))
    text = seen(store, "step-0001-000-1")
    assert "http://gpu-2" in text
    assert "sent before: no answer of http://gpu-1 after 1.5 s (upstream_cut: gone); HTTP 503 of http://gpu-1" in text
