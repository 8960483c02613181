"""Groups in flight: how far ahead, handed out whole, carried over, replaced, resumed."""

import contextlib
import random
import threading
import zlib
from collections import Counter

import pytest

from outrider.errors import RunError
from outrider.samplers.difficulty import Difficulty
from outrider.samplers.shuffle import Shuffle
from outrider.schedule import NO_SIGNAL, Position, Scheduler
from outrider.types import Rollout, RolloutState, Task

TASKS = [Task(id=f"t{i}", fields={}) for i in range(5)]
SIZE = 2


def plan(index, task):
    return [Rollout(id=f"g{index}-{m}", task=TASKS[task], group_id=f"g{index}", step=index) for m in range(SIZE)]


def ended(rollout, reward):
    return Rollout(
        id=rollout.id, task=rollout.task, group_id=rollout.group_id, state=RolloutState.SUCCEEDED, reward=reward
    )


class Fake:
    """A reconciler on virtual time: each rollout takes as many ticks as `ticks(rollout)` says.

    It fails when two threads work with it at the same time.
    """

    def __init__(self, ticks=lambda rollout: 1, reward=lambda rollout: float(rollout.id[-1])):
        self.ticks, self.reward = ticks, reward
        self.left, self.done, self.submitted, self.cancelled, self.now = {}, {}, [], False, 0
        self.abandoned = []
        self.rollouts = {}
        self.broken = None
        self.user = threading.Lock()

    @contextlib.contextmanager
    def alone(self):
        assert self.user.acquire(blocking=False), "two threads work with the reconciler"
        yield
        self.user.release()

    def submit(self, rollouts):
        with self.alone():
            for rollout in rollouts:
                self.submitted.append(rollout.group_id)
                self.rollouts[rollout.id] = rollout
                self.left[rollout.id] = self.ticks(rollout)

    def tick(self, patience_s=0.5):
        if self.broken:
            raise self.broken
        with self.alone():
            self.now += 1
            for rollout_id in list(self.left):
                self.left[rollout_id] -= 1
                if self.left[rollout_id] <= 0:
                    del self.left[rollout_id]
                    rollout = self.rollouts[rollout_id]
                    self.done[rollout_id] = ended(rollout, self.reward(rollout))

    def abandon(self, rollout_ids):
        with self.alone():
            self.abandoned += rollout_ids
            for rollout_id in rollout_ids:
                self.left.pop(rollout_id, None)
                self.done.pop(rollout_id, None)

    @property
    def idle(self):
        return not self.left

    def take(self):
        with self.alone():
            done, self.done = list(self.done.values()), {}
            return done

    def cancel(self):
        self.cancelled = True


def make(fake, **changes):
    settings = {"mode": "sync", "per_step": 3, "ahead": 1} | changes
    return Scheduler(fake, plan, Shuffle(TASKS, seed=0, success=1.0), **settings)


def differ(group):
    return len({rollout.reward for rollout in group.rollouts}) > 1


def indices(groups):
    return [group.index for group in groups]


def test_sync_submits_a_step_when_it_begins_and_nothing_else():
    fake = Fake(ticks=lambda rollout: 1 + int(rollout.id[1]))
    with make(fake) as scheduler:
        assert sorted(indices(scheduler.take())) == [0, 1, 2]
        assert not fake.left
        assert Counter(fake.submitted) == {"g0": 2, "g1": 2, "g2": 2}
        assert sorted(indices(scheduler.take())) == [3, 4, 5]
        assert scheduler.position() == Position(next=6)
    assert fake.cancelled


def test_carry_over_does_not_wait_for_a_slow_group_and_hands_it_out_later():
    fake = Fake(ticks=lambda rollout: 4 if rollout.group_id == "g0" else 1)
    with make(fake, mode="collocated") as scheduler:
        first = indices(scheduler.take())
        assert 0 not in first
        assert len(first) == 3
        assert fake.now < 4
        later = [indices(scheduler.take()) for _ in range(4)]
        assert 0 in [index for step in later for index in step]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_groups_are_open_than_the_staleness_allows(ahead):
    fake = Fake(ticks=lambda rollout: 1 + zlib.crc32(rollout.id.encode()) % 5)
    with make(fake, mode="collocated", ahead=ahead) as scheduler:
        for step in range(6):
            scheduler.take()
            admitted = len(set(fake.submitted))
            assert admitted <= (step + 1 + ahead) * 3  # each is trained by a policy at most `ahead` versions newer
            assert len(scheduler.position().open) <= ahead * 3


def test_groups_without_signal_are_replaced_and_counted():
    fake = Fake(reward=lambda rollout: 1.0 if rollout.group_id in ("g0", "g2") else float(rollout.id[-1]))
    with make(fake, has_signal=differ) as scheduler:
        got = scheduler.take()
        assert indices(got) == [1, 3, 4]
        assert all(differ(group) for group in got)
        assert scheduler.dropped == {NO_SIGNAL: 2}


def test_oversampling_ends_when_nothing_has_signal():
    with make(Fake(reward=lambda rollout: 0.0), has_signal=differ, oversample=2.0) as scheduler:
        assert scheduler.take() == []
        assert scheduler.dropped == {NO_SIGNAL: 6}


def test_what_replaces_a_group_has_signal_too_where_that_is_asked_for():
    fake = Fake(reward=lambda rollout: 1.0 if rollout.group_id in ("g3", "g4") else float(rollout.id[-1]))
    with make(fake, has_signal=differ) as scheduler:
        scheduler.take()
        assert scheduler.replace("too old").index == 5
        assert scheduler.dropped == {"too old": 1, NO_SIGNAL: 2}


@pytest.mark.parametrize("mode", ["sync", "collocated"])
def test_a_group_that_got_too_old_is_replaced_whole(mode):
    fake = Fake()
    with make(fake, mode=mode) as scheduler:
        got = scheduler.take()
        replacement = scheduler.replace("too old")
        assert replacement.index not in indices(got)
        assert len(replacement.rollouts) == SIZE
        assert scheduler.dropped == {"too old": 1}


def test_a_resumed_run_goes_on_with_the_groups_that_were_open():
    fake = Fake(ticks=lambda rollout: 9 if rollout.group_id in ("g0", "g4") else 1)
    with make(fake, mode="collocated") as scheduler:
        taken = indices(scheduler.take())
        position = scheduler.position()
    again = Fake()
    with make(again, mode="collocated", position=position) as scheduler:
        assert scheduler.position() == position
        rest = [index for _ in range(3) for index in indices(scheduler.take())]
    assert not set(taken) & set(rest)
    assert {0, 4} <= set(rest)
    assert len(set(taken + rest)) == 12


def test_a_group_from_before_a_restart_may_be_too_old_at_once():
    asked = []
    fake = Fake(ticks=lambda rollout: 99 if rollout.group_id == "g0" else 1)
    settings = {"mode": "collocated", "ahead": 2, "position": Position(next=5, open=(0,))}
    with make(fake, too_old=lambda ids: asked.append(ids) or "", **settings) as scheduler:
        scheduler.take()
        scheduler.take()
        assert asked == [["g0-0", "g0-1"]]  # those that were asked for since have until step 4


@pytest.mark.parametrize("mode", ["sync", "collocated", "disaggregated"])
@pytest.mark.parametrize("seed", range(5))
def test_however_often_a_run_dies_a_group_is_in_one_finished_step_at_most_and_none_is_forgotten(mode, seed):
    rng = random.Random(seed)
    position, finished = Position(), []
    for _ in range(5):
        fake = Fake(ticks=lambda rollout: min(40, int(rng.paretovariate(0.8))))
        with make(fake, mode=mode, ahead=2, position=position) as scheduler:
            for _ in range(rng.randrange(1, 4)):
                step = indices(scheduler.take())
                if rng.random() < 0.7:  # else it dies before the step's checkpoint is complete
                    finished += step
                    position = scheduler.position()
                else:
                    break
    assert len(finished) == len(set(finished))
    assert set(finished) | set(position.open) == set(range(position.next)), "neither trained nor open: forgotten"


def test_rollouts_beside_groups_leave_those_in_flight_alone():
    fake = Fake(ticks=lambda rollout: 9 if rollout.group_id == "g0" else 1)
    with make(fake, mode="collocated") as scheduler:
        scheduler.take()
        wanted = [Rollout(id=f"eval-{i}", task=TASKS[0], group_id="eval") for i in range(3)]
        scheduler.start(wanted)
        assert [r.id for r in scheduler.finish(wanted)] == ["eval-0", "eval-1", "eval-2"]
        assert 0 in scheduler.position().open


def test_in_the_background_rollouts_go_on_while_nobody_waits():
    fake = Fake(ticks=lambda rollout: 50)
    with make(fake, mode="disaggregated") as scheduler:
        scheduler.take()
        wait_until(lambda: len(set(fake.submitted)) == 6 and not fake.left)  # the next step's are there already
        assert len(indices(scheduler.take())) == 3


def wait_until(condition):
    waiting = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("waited in vain")


def test_back_pressure_on_rollouts_sleeps_until_a_step_is_taken():
    fake = Fake()
    with make(fake, mode="disaggregated", ahead=2) as scheduler:
        scheduler.take()
        wait_until(lambda: len(set(fake.submitted)) == 9 and fake.idle and not fake.done)
        before = fake.now
        threading.Event().wait(0.3)  # the trainer trains
        assert fake.now - before <= 3, "the rollout thread polls though there is nothing to do"
        assert len(set(fake.submitted)) == 9
        scheduler.take()
        wait_until(lambda: len(set(fake.submitted)) == 12)


def test_back_pressure_on_the_trainer_waits_for_whole_groups():
    gate = threading.Event()

    class Slow(Fake):
        def tick(self, patience_s=0.5):
            gate.wait(0.01)
            if gate.is_set():
                super().tick()

    got = []
    with make(Slow(), mode="disaggregated") as scheduler:
        trainer = threading.Thread(target=lambda: got.extend(scheduler.take()))
        trainer.start()
        trainer.join(0.1)
        assert trainer.is_alive()
        gate.set()
        trainer.join(30)
    assert [len(group.rollouts) for group in got] == [SIZE] * 3


@pytest.mark.parametrize("mode", ["sync", "collocated", "disaggregated"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_times_groups_are_whole_in_no_step_twice_and_no_more_open_than_allowed(mode, seed):
    rng = random.Random(seed)
    ahead = rng.randrange(3)
    times = {}
    fake = Fake(ticks=lambda rollout: times.setdefault(rollout.id, min(50, int(rng.paretovariate(0.8)))))
    with make(fake, mode=mode, ahead=ahead) as scheduler:
        allowed = 3 * ((0 if mode == "sync" else ahead) + 1)
        handed_out = []
        for step in range(8):
            groups = scheduler.take()
            handed_out += indices(groups)
            assert all(len(group.rollouts) == SIZE for group in groups)
            assert len(set(fake.submitted)) <= allowed + 3 * step
            if rng.random() < 0.3:
                handed_out.append(scheduler.replace("too old").index)
                allowed += 1
    assert len(handed_out) == len(set(handed_out))
    assert set(Counter(fake.submitted).values()) == {SIZE}


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_group_that_got_too_old_under_way_makes_room_for_another(mode):
    fake = Fake(ticks=lambda rollout: 10**9 if rollout.id in ("g0-1", "g1-1") else 2)
    asked = []

    def too_old(rollout_ids):
        asked.append(rollout_ids[0])
        return "too old" if rollout_ids[0] == "g0-0" else ""

    with make(fake, mode=mode, ahead=1, too_old=too_old) as scheduler:
        scheduler.take()
        scheduler.take()
        assert asked == []  # within the bound, whatever the tokens
        taken = indices(scheduler.take())
        assert asked == ["g0-0", "g1-0"]
        assert scheduler.dropped == {"too old": 1}
        wait_until(lambda: fake.abandoned == ["g0-0", "g0-1"])
        assert not {0, 1} & set(taken)
        assert 0 not in scheduler.position().open
        assert 1 in scheduler.position().open
        scheduler.take()
        assert scheduler.dropped == {}


def test_extra_groups_are_in_flight_before_replacements_are_needed():
    fake = Fake(reward=lambda rollout: 1.0 if rollout.group_id in ("g0", "g2") else float(rollout.id[-1]))
    with make(fake, has_signal=differ, extra=2) as scheduler:
        assert indices(scheduler.take()) == [1, 3, 4]
        assert fake.now == 1  # all at once: nobody waited for a replacement to start


def test_a_group_is_judged_by_what_is_known_when_it_is_handed_out():
    fake = Fake(reward=lambda rollout: 0.0)
    late = {"g0-1": 1.0}  # a reward that came after its attempt had ended

    def refresh(rollout):
        return ended(rollout, late.get(rollout.id, rollout.reward))

    with make(fake, has_signal=differ, refresh=refresh, oversample=1.0) as scheduler:
        (group,) = scheduler.take()
        assert [r.reward for r in group.rollouts] == [0.0, 1.0]
        assert scheduler.dropped == {NO_SIGNAL: 2}


def test_an_error_in_the_background_reaches_the_trainer():
    fake = Fake(ticks=lambda rollout: 10**9)
    with make(fake, mode="disaggregated") as scheduler:
        fake.broken = RunError("the engine died for good")
        with pytest.raises(RunError, match="for good"):
            scheduler.take()


def test_shuffle_uses_every_task_once_an_epoch_whatever_the_order_of_asking():
    sampler = Shuffle(TASKS, seed=3, success=1.0)
    order = [sampler.choose(index) for index in range(15)]
    assert [Shuffle(TASKS, seed=3, success=1.0).choose(index) for index in reversed(range(15))] == order[::-1]
    assert all(sorted(order[start : start + 5]) == [0, 1, 2, 3, 4] for start in (0, 5, 10))
    assert [Shuffle(TASKS, seed=4, success=1.0).choose(index) for index in range(15)] != order


def test_difficulty_prefers_tasks_that_are_solved_sometimes():
    sampler = Difficulty(TASKS, seed=0, success=1.0)
    for _ in range(20):
        for place, task in enumerate(TASKS):
            rewards = {0: (0.0, 0.0), 1: (1.0, 1.0)}.get(place, (0.0, 1.0))
            sampler.observe([ended(Rollout(id="r", task=task, group_id="g"), reward) for reward in rewards])
    drawn = Counter(sampler.choose(index) for index in range(600))
    assert min(drawn[place] for place in (2, 3, 4)) > 5 * max(drawn[0], drawn[1])
    assert drawn[0] > 0, "a task that is never solved must still be met"
    sampler.observe([ended(Rollout(id="r", task=TASKS[0], group_id="g"), None)])  # unscored: nothing learnt, no error
