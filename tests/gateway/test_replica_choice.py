"""Which replica a rollout goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.upstreams.errors import Timeouts
from outrider.gateway.upstreams.replicas import HealthCheck, Replicas


def make(count):
    urls = [f"http://replica-{number}:8000" for number in range(count)]
    return Replicas(urls, Timeouts(), HealthCheck())


async def test_gateways_that_know_nothing_of_each_other_choose_alike():
    one, other = make(5), make(5)
    try:
        for number in range(200):
            assert one.choose(f"a{number}").name == other.choose(f"a{number}").name
    finally:
        one.close()
        other.close()


async def test_rollouts_of_a_dead_replica_are_spread_and_the_others_stay():
    replicas = make(5)
    try:
        before = {f"a{number}": replicas.choose(f"a{number}") for number in range(200)}
        dead = before["a0"]
        dead.up = False
        after = {pin: replicas.choose(pin) for pin in before}
        assert all(after[pin] is before[pin] for pin in before if before[pin] is not dead)
        moved = [pin for pin in before if before[pin] is dead]
        assert len({after[pin] for pin in moved}) == 4
        dead.up = True
        assert all(replicas.choose(pin) is after[pin] for pin in before)  # and not back again
        assert dead.moved == len(moved)
    finally:
        replicas.close()


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.text(min_size=1))
def test_a_new_rollout_never_goes_to_a_replica_far_above_the_mean(loads, pin):
    replicas = make(len(loads))
    replicas.watch = lambda: None  # there is no event loop here
    for replica, load in zip(replicas._all, loads, strict=True):
        replica.upstream.in_flight = load
    chosen = replicas.choose(pin).upstream.in_flight
    assert chosen < 1.25 * (sum(loads) + 1) / len(loads) + 1
