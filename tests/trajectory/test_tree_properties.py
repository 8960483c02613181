"""Random attempts against slow obvious references, and what holds for every tree and every cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.calls import call, cut
from outrider.trajectory import build
from outrider.types import Call, Choice, Fidelity


@st.composite
def attempts(draw, temperatures=(1.0,)) -> list[Call]:
    """Calls over a tiny vocabulary: prompts extend an earlier branch, cut one short, repeat one, or start anew."""
    word = st.integers(0, 2)
    known: list[list[int]] = []
    prompts: list[list[int]] = []
    calls = []
    for seq in range(draw(st.integers(1, 9))):
        base = draw(st.sampled_from(known)) if known and draw(st.booleans()) else []
        base = base[: draw(st.integers(0, len(base)))] if draw(st.integers(0, 3)) == 0 else base
        prompt = base + draw(st.lists(word, min_size=0 if base else 1, max_size=3))
        if prompts and draw(st.integers(0, 5)) == 0:
            prompt = draw(st.sampled_from(prompts))  # a client's retry, or best of n by several calls
        completions = draw(st.lists(st.lists(word, min_size=1, max_size=3), min_size=1, max_size=2))
        calls.append(call(prompt, *completions, seq=seq, temperature=draw(st.sampled_from(temperatures))))
        prompts.append(prompt)
        known += [prompt + completion for completion in completions]
    return calls


def sequences(calls) -> dict[tuple[str, int], list[int]]:
    """Prompt and answer of each choice, by call and index."""
    return {
        (item.id, answer.index): item.prompt_ids.tolist() + answer.token_ids.tolist()
        for item in calls
        for answer in item.choices
    }


def trained_positions(calls, rows) -> Counter:
    """How often each (call, whole context and token, log-prob) is trained."""
    return Counter(
        (calls[int(row.call_index[at])].id, tuple(row.token_ids[: at + 1].tolist()), float(row.logprobs[at]))
        for row in rows
        for at in np.flatnonzero(row.loss_mask)
    )


def sampled_positions(calls) -> Counter:
    return Counter(
        (item.id, tuple(whole[: len(item.prompt_ids) + offset + 1]), float(value))
        for item in calls
        for answer in item.choices
        for whole in [item.prompt_ids.tolist() + answer.token_ids.tolist()]
        for offset, value in enumerate(answer.logprobs)
    )


@given(calls=attempts(), shuffle=st.randoms(use_true_random=False))
def test_tree_agrees_with_a_slow_obvious_reference(calls, shuffle):
    shuffled = list(calls)
    shuffle.shuffle(shuffled)
    tree = build(shuffled)
    recorded = sequences(calls)
    everything = [branch.token_ids().tolist() for branch in tree.branches]
    assert everything == list(recorded.values())  # in order of commit
    for branch in tree.branches:
        prompt = branch.token_ids()[: branch.start].tolist()
        prefixes = [other for other in everything if prompt[: len(other)] == other]
        longest = max(prefixes, key=len, default=None)  # the first of equal ones
        parent = branch.parent
        assert (parent.token_ids().tolist() if parent else None) == longest
        if parent is not None:
            assert tree.branches.index(parent) == everything.index(longest)

    # Memory and work: distinct prefixes are counted once.
    assert tree.unique_tokens == len({tuple(ids[: n + 1]) for ids in everything for n in range(len(ids))})
    roots = {tuple(branch.token_ids()[: branch.start]) for branch in tree.branches if branch.parent is None}
    assert tree.breaks == len(roots) - 1

    # Every sampled token is trained once, in the context and with the log-prob it was sampled with.
    rows = cut(tree).samples
    assert trained_positions(calls, rows) == sampled_positions(calls)
    assert all(row.token_ids.tolist() in everything for row in rows)  # nothing stitched
    assert len(rows) == sum(all(other.parent is not branch for other in tree.branches) for branch in tree.branches)

    # An answer is trained by the first leaf, in order of commit, whose path holds it.
    leaves = [branch for branch in tree.branches if all(other.parent is not branch for other in tree.branches)]
    for branch in tree.branches:
        owner = next(place for place, leaf in enumerate(leaves) if branch in leaf.path())
        sampled = slice(branch.start, branch.end)
        assert (rows[owner].call_index[sampled] == branch.answer.call_index).all()

    # The order in which calls are handed over changes nothing.
    plain = cut(build(calls)).samples
    for one, other in zip(plain, rows, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.call_index, other.call_index)


@given(
    calls=attempts(temperatures=(1.0, 1.0, 0.5, 0.0)),
    broken=st.sets(st.integers(0, 8)),
    unwanted=st.sets(st.integers(0, 8)),
    budget=st.integers(1, 12),
    too_long=st.sampled_from(["drop", "drop_rollout", "keep_start", "cut"]),
)
def test_a_cut_accounts_for_every_token(calls, broken, unwanted, budget, too_long):
    calls = [replace(item, fidelity=Fidelity.TEXT) if i in broken else item for i, item in enumerate(calls)]
    left_out = {calls[i].id: "unwanted" for i in unwanted if i < len(calls)}
    got = cut(build(calls, left_out), max_tokens=budget, too_long=too_long)
    exact = [item for item in calls if item.fidelity is Fidelity.EXACT]
    trainable = [item for item in exact if item.id not in left_out and item.sampling["temperature"] > 0]
    trained, sampled = trained_positions(calls, got.samples), sampled_positions(trainable)
    assert trained <= sampled  # at most once each, in a context that was seen, and nothing else
    assert sum(len(a.token_ids) for c in calls for a in c.choices) == trained.total() + got.excluded_tokens.total()
    assert all(len(row.token_ids) <= budget for row in got.samples)
    assert all(row.loss_mask[-1] for row in got.samples)  # nothing is computed for nothing
    for row in got.samples:
        temperatures = {calls[int(i)].sampling["temperature"] for i in row.call_index if i >= 0}
        assert temperatures == {row.temperature}

    fitting = {key for key in sampled if len(key[1]) <= budget}
    whole = {
        (item.id, tuple(item.prompt_ids.tolist() + answer.token_ids.tolist()[: n + 1]), float(value))
        for item in trainable
        for answer in item.choices
        if len(item.prompt_ids) + len(answer.token_ids) <= budget
        for n, value in enumerate(answer.logprobs)
    }
    if too_long == "cut":
        assert set(trained) == fitting
    elif too_long == "keep_start":
        assert set(trained) == whole
    elif too_long == "drop":
        assert set(trained) <= whole
    else:
        assert set(trained) in (set(), set(sampled))
        assert bool(trained) == (whole == set(sampled) and bool(sampled))


def versions_in(item: Call, answer: Choice) -> list[int]:
    """Of each token, by hand."""
    return [version for version, count in answer.versions for _ in range(count)] or [
        min(item.version_start, item.version_end)
    ] * len(answer.token_ids)


@given(
    calls=attempts(),
    published=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=18, max_size=18),
    budget=st.integers(1, 12),
)
def test_R12_every_trained_token_has_the_version_that_sampled_it(calls, published, budget):
    """Each choice may be cut in two by a publish, in the middle of what it says or outside of it."""
    at = iter(published)
    marked = []
    for item in calls:
        choices = []
        for answer in item.choices:
            version, first = next(at)
            first = min(first, len(answer.token_ids))
            runs = ((version, first), (version + 1, len(answer.token_ids) - first))
            runs = tuple(run for run in runs if run[1])
            choices.append(replace(answer, versions=runs if first else ()))
        marked.append(replace(item, choices=tuple(choices), version_start=3, version_end=5))
    by_id = {
        (item.id, tuple(item.prompt_ids.tolist() + answer.token_ids.tolist()[: offset + 1]), float(value), version)
        for item in marked
        for answer in item.choices
        for offset, (value, version) in enumerate(zip(answer.logprobs, versions_in(item, answer), strict=True))
    }
    for row in cut(build(marked), max_tokens=budget, too_long="cut").samples:
        assert (row.versions[~row.loss_mask] == -1).all()
        for place in np.flatnonzero(row.loss_mask).tolist():
            context, item = tuple(row.token_ids[: place + 1].tolist()), marked[int(row.call_index[place])]
            assert (item.id, context, float(row.logprobs[place]), int(row.versions[place])) in by_id


@pytest.mark.parametrize("seed", range(5))
def test_a_long_attempt_with_everything_in_it(seed):
    """Sub-agents, compaction, edits and best of n over 120 calls: each sampled token once, in its own context."""
    rng = np.random.default_rng(seed)
    talks = [[1000 + agent] for agent in range(4)]
    calls = []
    for seq in range(120):
        talk = int(rng.integers(4))
        how = rng.integers(10)
        if how == 0:  # compaction
            talks[talk] = [1000 + talk, *rng.integers(0, 50, 5).tolist()]
        elif how == 1 and len(talks[talk]) > 3:  # the history is edited
            talks[talk] = talks[talk][: int(rng.integers(1, len(talks[talk])))]
        answers = [rng.integers(0, 50, rng.integers(1, 6)).tolist() for _ in range(int(rng.integers(1, 4)))]
        calls.append(call(talks[talk], *answers, seq=seq))
        talks[talk] = talks[talk] + answers[int(rng.integers(len(answers)))] + rng.integers(50, 60, 3).tolist()
    shuffled = list(calls)
    rng.shuffle(shuffled)
    tree = build(shuffled)
    assert trained_positions(calls, cut(tree).samples) == sampled_positions(calls)
    assert tree.unique_tokens < tree.tokens / 3
