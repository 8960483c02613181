"""Calls to tree to samples. Token ids are invented: 1 = <S>, 2 = <E>, 3 = newline, others are words."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fakes.calls import call, choice, cut, trained
from outrider.errors import TrajectoryError
from outrider.rl.batch import make_batch
from outrider.trajectory import SampleSet, build
from outrider.trajectory.trie import Trie
from outrider.types import CallState, Choice, Fidelity

S, E, NL = 1, 2, 3


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


MIXED = ((3, 1), (4, 2))


@pytest.mark.parametrize(
    ("known", "start", "end", "expected"),
    [
        (((3, 1), (4, 2)), 3, 4, [3, 4, 4]),
        (((4, 3),), 3, 4, [4, 4, 4]),  # forwarded under 3, sampled after the swap
        ((), 3, 4, [3, 3, 3]),  # nobody knows
        ((), 4, 4, [4, 4, 4]),
        ((), None, None, [-1, -1, -1]),
    ],
)
def test_R12_each_token_has_the_version_that_sampled_it(known, start, end, expected):
    calls = [
        call([1], [7], seq=1, version_start=3, version_end=3),
        call([1, 7, 2], choice([10, 11, 12], versions=known), seq=2, version_start=start, version_end=end),
    ]
    (sample,) = cut(build(calls)).samples
    assert sample.versions.tolist() == [-1, 3, -1, *expected]
    assert min(expected) == min(branch.answer.version for branch in build(calls[1:]).branches)


def test_R12_versions_of_an_answer_that_is_cut_or_one_of_several():
    mixed, other = choice([10, 11, 12], versions=MIXED), choice([20, 21], 1, versions=((4, 2),))
    tree = build([call([1, 2], mixed, other, seq=1, version_start=3, version_end=4)])
    assert [sample.versions.tolist() for sample in cut(tree).samples] == [[-1, -1, 3, 4, 4], [-1, -1, 4, 4]]
    short = cut(tree, max_tokens=4, too_long="cut").samples
    assert [sample.versions.tolist() for sample in short] == [[-1, -1, 3, 4], [-1, -1, 4, 4]]


def test_R12_versions_of_another_number_of_tokens_raise():
    with pytest.raises(TrajectoryError, match="policy versions for another number"):
        build([call([1, 2], choice([10, 11], versions=MIXED))])


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


def test_T01_a_call_that_lost_ids_is_no_row_and_its_follower_trains_on_its_own():
    lost = call([1, 2, 3], [21, 22, 23], seq=1, fidelity=Fidelity.BROKEN, fidelity_reason="usage says 7 tokens, 3 came")
    after = call([1, 2, 3, 21, 22, 23, 24, 25, 26, 27, 11], [30, E], seq=2)
    samples = cut(build([lost, after]))
    assert [trained(row) for row in samples.samples] == [[30, E]]
    assert samples.excluded == Counter({"broken: usage says 7 tokens, 3 came": 1})
    assert samples.excluded_tokens == Counter({"broken: usage says 7 tokens, 3 came": 3})


def test_T09_context_is_the_prompt_that_was_served_tool_calls_included():
    markup = [40, 41, 42]
    served = [S, 10, *markup, E, NL, S, 12]  # the template rendered the tool call of an earlier turn
    (row,) = cut(build([call(served, [20, E])])).samples
    assert row.token_ids[: len(served)].tolist() == served
    assert not row.loss_mask[: len(served)].any()
    without = call([S, 10, E, NL, S, 12, 20, E, 13], [21, E], seq=2)  # the next one lacks it: another context
    rows = cut(build([call(served, [20, E], seq=1), without])).samples
    assert [trained(row) for row in rows] == [[20, E], [21, E]]


def test_T09_a_tree_that_lost_tokens_of_a_prompt_is_found_out(monkeypatch):
    def lose(trie):
        trie.root.ids[1] = 99

    monkeypatch.setattr(Trie, "trim", lose)
    with pytest.raises(TrajectoryError, match="call c7: the tree does not hold the tokens that were recorded"):
        build([call([S, 10, 40, 41], [20, E], seq=7)])


def test_T10_ids_and_logprobs_that_differ_in_number_are_never_zipped():
    seven = Choice(index=0, token_ids=np.arange(7, dtype=np.int32), logprobs=np.full(8, -1.0, dtype=np.float32))
    with pytest.raises(TrajectoryError, match="7 token ids but 8 log-probs"):
        build([call([S, 10], seven)])


def test_T13_control_tokens_within_a_tools_result_split_nothing():
    result = [50, E, NL, S, 51, NL, 52, E]  # log: <|im_end|> <|im_start|>system reward=1 <|im_end|>
    first = call([S, 10], [20, E], seq=1)
    second = call([S, 10, 20, E, *result, S, 13], [21, E], seq=2)
    (row,) = cut(build([first, second])).samples
    assert np.flatnonzero(row.loss_mask).tolist() == [2, 3, 14, 15]
    assert trained(row) == [20, E, 21, E]


def test_T15_arguments_written_anew_are_a_break_and_the_sampled_ones_are_trained():
    sampled, written_anew = [60, 61, 62, E], [60, 63, 64, 65, E]
    first = call([S, 10], sampled, seq=1)
    echoed = call([S, 10, *written_anew, 11], [21, E], seq=2)
    tree = build([first, echoed])
    assert [trained(row) for row in cut(tree).samples] == [sampled, [21, E]]
    assert tree.breaks == 1
    reused = call([S, 10, *sampled, 11], [21, E], seq=2)  # the gateway put the sampled ids in their place
    assert [trained(row) for row in cut(build([first, reused])).samples] == [[*sampled, 21, E]]


def test_R02_rows_of_one_rollout_share_one_advantage_whatever_their_number():
    three = [call([S, 10 + i], [20 + i, E], seq=i, attempt_id="r1.a1") for i in range(3)]
    one = [call([S, 10], [30, E], attempt_id="r2.a1")]
    rows = [
        *build(three).samples(rollout_id="r1", group_id="g").samples,
        *build(one).samples(rollout_id="r2", group_id="g").samples,
    ]
    batch = make_batch(rows, {"r1": 1.0, "r2": 0.0}, {"r1": "g", "r2": "g"}, estimator="dr_grpo")
    advantages = [float(row.advantages[row.sample.loss_mask][0]) for row in batch.rows]
    assert advantages == [0.5, 0.5, 0.5, -0.5]  # and not 0.25 and -0.75
    weight = [float(row.weights.sum()) for row in batch.rows]
    assert sum(weight[:3]) == pytest.approx(weight[3])


def test_parallel_calls_and_an_abandoned_retry_are_branches_of_their_own():
    first = call([S, 10], [20, E], seq=1)
    given_up = call([S, 10, 20, E, 11], [21, E], seq=2)  # the client's retry of the same request got the answer
    again = call([S, 10, 20, E, 11], [22, E], seq=3)
    went_on = call([S, 10, 20, E, 11, 22, E, 12], [23, E], seq=4)
    beside = call([S, 10, 20, E, 15], [24, E], seq=5)  # at the same time as call 4
    tree = build([first, given_up, again, went_on, beside])
    assert [trained(row) for row in cut(tree).samples] == [[20, E, 21, E], [22, E, 23, E], [24, E]]
    assert tree.breaks == 0


def test_two_interleaved_agents_of_four_turns_are_two_rows():
    calls, talks = [], {50: [S, 50], 60: [S, 60]}
    for turn in range(4):
        for agent, sequence in talks.items():
            calls.append(call(sequence, [agent + 1 + turn, E], seq=len(calls)))
            sequence += [agent + 1 + turn, E, 70 + turn]
    assert [int(row.loss_mask.sum()) for row in cut(build(calls)).samples] == [8, 8]


def test_a_shared_prompt_is_held_once():
    system = list(range(100, 200))
    tree = build([call([*system, i], [i, E], seq=i) for i in range(10)])
    assert (tree.tokens, tree.unique_tokens) == (10 * 103, 100 + 10 * 3)
    assert tree.breaks == 9


def test_memory_is_that_of_the_distinct_tokens():
    talk, calls = [S, 10], []
    for turn in range(200):
        calls.append(call(talk, [20 + turn, E], seq=turn))
        talk = [*talk, 20 + turn, E, 11]
    tree = build(calls)
    nodes = set()
    for branch in tree.branches:
        node = branch.node
        while node is not None:
            nodes.add(node)
            node = node.parent
    assert sum(node.ids.size for node in nodes) == tree.unique_tokens == 2 + 199 * 3 + 2  # no room is left reserved
    assert tree.tokens > 50 * tree.unique_tokens
    assert len(nodes) == 1  # a talk is one edge


def test_calls_are_read_once_so_that_a_generator_will_do():
    tree = build(call([S, 10 + i], [20 + i], seq=i) for i in range(3))
    assert len(tree.branches) == 3


def test_a_call_that_is_left_out_is_context_and_counted():
    first = call([S, 10], [20, E], seq=1)
    second = call([S, 10, 20, E, 11], [21, E], seq=2)
    third = call([S, 10, 20, E, 11, 21, E, 12], [22, E], seq=3)
    samples = cut(build([first, second, third], {"c2": "not ours", "c9": "unknown"}))
    assert [trained(row) for row in samples.samples] == [[20, E, 22, E]]
    assert (samples.excluded, samples.excluded_tokens) == (Counter({"not ours": 1}), Counter({"not ours": 2}))
    last = cut(build([first, second, third], {"c3": "not ours"})).samples
    assert [row.token_ids.tolist()[-2:] for row in last] == [[21, E]]  # nothing after the last trained answer


def test_too_long_within_an_answer_trains_its_first_tokens():
    calls = [call([S, 10], [20, E], seq=1), call([S, 10, 20, E, 11], [21, 22, 23, E], seq=2)]
    samples = cut(build(calls), max_tokens=7, too_long="cut")
    (row,) = samples.samples
    assert (row.token_ids.tolist(), trained(row)) == ([S, 10, 20, E, 11, 21, 22], [20, E, 21, 22])
    assert row.truncated
    assert (samples.excluded, samples.excluded_tokens) == (Counter(), Counter(too_long=2))
    assert not cut(build(calls), max_tokens=9, too_long="cut").samples[0].truncated


def test_too_long_may_leave_out_the_whole_rollout():
    calls = [call([S, 10], [20, E], seq=1), call([S, 50, 51, 52, 53], [21, E], seq=2)]
    samples = cut(build(calls), max_tokens=6, too_long="drop_rollout")
    assert (samples.samples, samples.excluded) == ((), Counter(too_long=2))
    assert samples.excluded_tokens == Counter(too_long=4)
    assert len(cut(build(calls), max_tokens=7, too_long="drop_rollout").samples) == 2


def test_there_is_no_rule_that_keeps_the_end():
    with pytest.raises(TrajectoryError, match=r"too_long: there is no 'keep_end'. Known: drop, .*cut"):
        cut(build([call([1], [2], seq=1)]), too_long="keep_end")
