"""Calls to tree to samples. Token ids are invented: 1 = <S>, 2 = <E>, 3 = newline, others are words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import TrajectoryError
from outrider.trajectory import SampleSet, Tree, build
from outrider.types import Call, CallState, Choice, Fidelity, Sample

S, E, NL = 1, 2, 3


def choice(ids: Sequence[int], index: int = 0, finish: str = "stop", first: float = -0.25) -> Choice:
    logprobs = np.array([first - 0.01 * position for position in range(len(ids))], dtype=np.float32)
    return Choice(index=index, token_ids=np.array(ids, dtype=np.int32), logprobs=logprobs, finish_reason=finish)


def call(
    prompt: Sequence[int] | None,
    *completions: Sequence[int] | Choice,
    seq: int = 0,
    temperature: float | None = 1.0,
    **changes,
) -> Call:
    choices = tuple(c if isinstance(c, Choice) else choice(c, index) for index, c in enumerate(completions))
    made = Call(
        id=f"c{seq}",
        attempt_id="a1",
        dialect="openai_chat",
        model="policy",
        state=CallState.COMPLETE,
        status=200,
        streamed=False,
        request=b"",
        response=b"",
        prompt_ids=None if prompt is None else np.array(prompt, dtype=np.int32),
        choices=choices,
        usage=None,
        fidelity=Fidelity.EXACT,
        sampling={} if temperature is None else {"temperature": temperature},
        version_start=0,
        version_end=0,
        seq=seq,
    )
    return replace(made, **changes)


def cut(tree: Tree, **options) -> SampleSet:
    return tree.samples(rollout_id="r1", group_id="g1", **options)


def trained(sample: Sample) -> list[int]:
    return sample.token_ids[sample.loss_mask].tolist()


def test_two_turns_join_in_one_row_with_context_masked():
    first = call([S, 10, 11], [20, E], seq=1, version_start=3, version_end=3)
    second = call([S, 10, 11, 20, E, 12, 13], [21, 22, E], seq=2, version_start=4, version_end=5)
    (row,) = cut(build([first, second])).samples
    assert row.token_ids.tolist() == [S, 10, 11, 20, E, 12, 13, 21, 22, E]
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3
    np.testing.assert_allclose(row.logprobs, [0, 0, 0, -0.25, -0.26, 0, 0, -0.25, -0.26, -0.27])
    assert row.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4, 4, 4]  # the older version of a mixed call
    assert row.call_index.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, 1, 1]
    assert (row.rollout_id, row.group_id, row.attempt_id) == ("r1", "g1", "a1")


def test_T03_row_uses_the_sampled_ids_not_a_shorter_encoding_of_their_text():
    h, a, v, ing, hav = 30, 31, 32, 33, 34
    sampled = [h, a, v, ing]
    echoed = call([S, 10, h, a, v, ing, 40, 41], [50], seq=2)
    (row,) = cut(build([call([S, 10], sampled, seq=1), echoed])).samples
    assert trained(row) == [h, a, v, ing, 50]

    reencoded = call([S, 10, hav, ing, 40, 41], [50], seq=2)  # the engine rendered text: two ids for four
    rows = cut(build([call([S, 10], sampled, seq=1), reencoded])).samples
    assert [trained(row) for row in rows] == [sampled, [50]]
    assert rows[1].token_ids.tolist() == [S, 10, hav, ing, 40, 41, 50]
    for row in rows:
        assert row.loss_mask.sum() == (row.logprobs != 0).sum() == len(trained(row))


def test_T04_newline_after_end_marker_is_context_and_none_is_invented_at_the_end():
    first = call([S, 10], [20, E], seq=1)
    second = call([S, 10, 20, E, NL, S, 11, NL, S, 12, NL], [21, E], seq=2)
    (row,) = cut(build([first, second])).samples
    assert trained(row) == [20, E, 21, E]
    assert not row.loss_mask[4:11].any()
    assert row.token_ids[-1] == E


def test_T05_dropped_thinking_opens_a_second_row_with_the_context_the_policy_saw():
    think = 60
    a1 = call([S, 10], [think, 20, E], seq=1)
    a2 = call([S, 10, think, 20, E, 70], [think, 21, E], seq=2)
    a3 = call([S, 10, 20, E, 70, 21, E, 11], [think, 22, E], seq=3)  # template dropped both <think>
    tree = build([a1, a2, a3])
    rows = cut(tree).samples
    assert [trained(row) for row in rows] == [[think, 20, E, think, 21, E], [think, 22, E]]
    assert rows[1].token_ids[:8].tolist() == [S, 10, 20, E, 70, 21, E, 11]
    assert tree.breaks == 1


def test_T12_all_sampled_ids_are_trained_though_the_text_lost_the_stop_string():
    first = call([S, 10], [5, 6, 7, 8, 9], seq=1)
    second = call([S, 10, 5, 6, 7, 80], [81], seq=2)  # built from text without ids 8 and 9
    tree = build([first, second])
    assert [trained(row) for row in cut(tree).samples] == [[5, 6, 7, 8, 9], [81]]
    assert tree.breaks == 1


def test_T17_truncation_comes_from_the_finish_reason_alone():
    stopped = cut(build([call([S, 10], choice([20, 7], finish="stop"))])).samples[0]  # 7 is no eos of any tokenizer
    cut_off = cut(build([call([S, 10], choice([20, E], finish="length"))])).samples[0]  # ends with <E> all the same
    assert not stopped.truncated
    assert stopped.loss_mask.tolist() == [False, False, True, True]
    assert cut_off.truncated


def test_T18_no_prompt_ids_means_no_row():
    for prompt in (None, []):
        samples = cut(build([call(prompt, [5, 6])]))
        assert samples.samples == ()
        assert samples.excluded == Counter(no_prompt_ids=1)
    with pytest.raises(TrajectoryError, match="negative"):
        build([call([-1, 12, 13], [5, 6])])


def test_R01_compaction_and_interleaved_subagent():
    main1 = call([S, 9, 10], [20, E], seq=1)
    sub1 = call([S, 8, 50], [51, E], seq=2)
    main2 = call([S, 9, 10, 20, E, 11], [21, E], seq=3)
    sub2 = call([S, 8, 50, 51, E, 52], [53, E], seq=4)
    summary = call([S, 10, 20, E, 11, 21, E, 12], [30, E], seq=5)  # no tools in the system block
    after = call([S, 9, 30], [22, E], seq=6)
    sub3 = call([S, 8, 50, 51, E, 52, 53, E, 54], [55, E], seq=7)
    tree = build([main1, sub1, main2, sub2, summary, after, sub3])
    rows = cut(tree).samples
    assert sorted(trained(row) for row in rows) == [[20, E, 21, E], [22, E], [30, E], [51, E, 53, E, 55, E]]
    assert tree.breaks == 3


def test_choices_are_branches_and_the_shared_answer_is_trained_once():
    first = call([S, 10], [20], [30], seq=1)
    followed_a = call([S, 10, 20, 11], [21], seq=2)
    followed_b = call([S, 10, 20, 12], [22], seq=3)
    rows = cut(build([first, followed_a, followed_b])).samples
    assert [trained(row) for row in rows] == [[30], [20, 21], [22]]
    assert rows[2].token_ids.tolist() == [S, 10, 20, 12, 22]  # context, not trained again


def test_equal_choices_are_two_samples_of_the_policy():
    rows = cut(build([call([S, 10], [20], [20], seq=1), call([S, 10, 20, 11], [21], seq=2)])).samples
    assert sorted(trained(row) for row in rows) == [[20], [20, 21]]


def test_temperatures_of_one_tree_are_told_apart():
    hot = call([S, 10], [20, E], seq=1, temperature=1.0)
    warm = call([S, 10, 20, E, 11], [21, E], seq=2, temperature=0.5)
    unset = call([S, 10, 20, E, 11, 21, E, 12], [22, E], seq=3, temperature=None)
    rows = cut(build([hot, warm, unset])).samples
    assert [(row.temperature, trained(row)) for row in rows] == [(1.0, [20, E, 22, E]), (0.5, [21, E])]
    assert len(rows[1].token_ids) == 7  # nothing after the last trained token


def test_greedy_answers_stay_context():
    greedy = call([S, 10], [20, E], seq=1, temperature=0)
    sampled = call([S, 10, 20, E, 11], [21, E], seq=2)
    samples = cut(build([greedy, sampled]))
    assert [trained(row) for row in samples.samples] == [[21, E]]
    assert samples.excluded == Counter(greedy=1)


def test_exclusions_are_counted_by_reason():
    calls = [
        call([S, 10], [20], seq=1, state=CallState.FAILED),
        call([S, 10], [20], seq=2, state=CallState.CANCELLED),
        call([S, 10], [20], [21], seq=3, fidelity=Fidelity.TEXT),
        call([S, 10], [20], seq=4, fidelity=Fidelity.BROKEN, fidelity_reason="usage"),
        call([S, 10], [], seq=5),
        call([S, 10], seq=6),
    ]
    samples = cut(build(calls))
    assert samples.samples == ()
    assert samples.excluded == Counter(
        {"failed": 1, "cancelled": 1, "text": 2, "broken: usage": 1, "empty_completion": 1, "no_choices": 1}
    )


def test_too_long_rows_are_dropped_or_cut_at_an_answer_never_at_the_front():
    first = call([S, 10], [20, E], seq=1)
    second = call([S, 10, 20, E, 11], [21, E], seq=2)
    sibling = call([S, 10, 20, E], [22], seq=3)
    calls = [first, second, sibling]
    dropped = cut(build(calls), max_tokens=6)
    assert [trained(row) for row in dropped.samples] == [[20, E, 22]]  # the short sibling takes over the first answer
    assert dropped.excluded == Counter(too_long=1)
    alone = cut(build(calls[:2]), max_tokens=6)
    assert (alone.samples, alone.excluded) == ((), Counter(too_long=2))
    shortened = cut(build(calls[:2]), max_tokens=6, too_long="keep_start")
    assert [row.token_ids.tolist() for row in shortened.samples] == [[S, 10, 20, E]]
    assert shortened.excluded == Counter(too_long=1)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Choice(index=0, token_ids=np.array([1, 2], np.int32), logprobs=np.array([-1.0], np.float32)), "2 token ids"),
        (Choice(index=0, token_ids=np.array([1], np.int32), logprobs=np.array([np.nan], np.float32)), "finite"),
        (Choice(index=0, token_ids=np.array([1], np.int32), logprobs=np.array([0.5], np.float32)), "at most 0"),
        (Choice(index=0, token_ids=np.array([-1], np.int32), logprobs=np.array([-1.0], np.float32)), "negative"),
    ],
)
def test_an_exact_call_that_contradicts_itself_raises(broken, message):
    with pytest.raises(TrajectoryError, match=message):
        build([call([S, 10], broken)])


def test_attempts_are_not_mixed_and_calls_not_repeated():
    with pytest.raises(TrajectoryError, match="several attempts"):
        build([call([S], [5], seq=1), call([S], [5], seq=2, attempt_id="a2")])
    with pytest.raises(TrajectoryError, match="twice"):
        build([call([S], [5], seq=1), call([S], [6], seq=1)])


def test_no_calls_no_rows():
    assert cut(build([])) == SampleSet(samples=(), excluded=Counter(), excluded_tokens=Counter())


@st.composite
def attempts(draw) -> list[Call]:
    """Calls over a tiny vocabulary: prompts extend an earlier branch, cut one short, or start anew."""
    word = st.integers(0, 2)
    known: list[list[int]] = []
    calls = []
    for seq in range(draw(st.integers(1, 7))):
        base = draw(st.sampled_from(known)) if known and draw(st.booleans()) else []
        base = base[: draw(st.integers(0, len(base)))] if draw(st.integers(0, 3)) == 0 else base
        prompt = base + draw(st.lists(word, min_size=0 if base else 1, max_size=3))
        completions = draw(st.lists(st.lists(word, min_size=1, max_size=3), min_size=1, max_size=2))
        calls.append(call(prompt, *completions, seq=seq))
        known += [prompt + completion for completion in completions]
    return calls


@given(calls=attempts(), shuffle=st.randoms(use_true_random=False))
def test_tree_agrees_with_a_slow_obvious_reference(calls, shuffle):
    shuffled = list(calls)
    shuffle.shuffle(shuffled)
    tree = build(shuffled)
    everything = [branch.token_ids().tolist() for branch in tree.branches]
    for branch in tree.branches:
        prompt = branch.token_ids()[: branch.start].tolist()
        prefixes = [other for other in everything if prompt[: len(other)] == other]
        longest = max(prefixes, key=len, default=None)
        assert (branch.parent.token_ids().tolist() if branch.parent else None) == longest

    # Every sampled token is trained once, in the context and with the log-prob it was sampled with.
    rows = cut(tree).samples
    seen: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        for position in np.flatnonzero(row.loss_mask):
            index = int(row.call_index[position])
            seen[(shuffled[index].id, tuple(row.token_ids[: position + 1].tolist()), row.logprobs[position])] += 1
    expected: Counter[tuple[object, ...]] = Counter()
    for item in calls:
        for answer in item.choices:
            whole = item.prompt_ids.tolist() + answer.token_ids.tolist()
            for offset, value in enumerate(answer.logprobs):
                expected[(item.id, tuple(whole[: len(item.prompt_ids) + offset + 1]), value)] += 1
    assert seen == expected
    assert all(row.token_ids.tolist() in everything for row in rows)  # nothing stitched
    assert len(rows) == sum(all(other.parent is not branch for other in tree.branches) for branch in tree.branches)

    # The order in which calls are handed over changes nothing but the numbering of calls.
    assert [row.token_ids.tolist() for row in cut(build(calls)).samples] == [row.token_ids.tolist() for row in rows]
