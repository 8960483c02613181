"""The replicas of an upstream: which of them are up, and which one a call goes to."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.gateway.options import GatewayOptions
from outrider.gateway.upstreams.errors import Code, Timeouts, UpstreamError
from outrider.gateway.upstreams.retry import NEVER_SENT
from outrider.gateway.upstreams.upstream import Upstream
from outrider.types import Json

log = logging.getLogger("outrider.gateway")

PINS = 16_384  # rollouts whose replica is remembered; a forgotten one is given the same again unless it had moved
OVERLOAD = 1.25  # a replica takes no new rollout while it has this many times the mean of calls
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A replica is down after `fall` failures in a row, of probes or to connect, and up again after `rise` good probes.

    A probe is good when anything below 500 answers it: a provider that has no such path, or wants a key, is there.
    """

    path: str = "/health"
    interval_s: float = 2.0
    fall: int = 2
    rise: int = 1


class Replica:
    """One upstream and what is known of its health. Taken to be up until it is found to be down."""

    def __init__(self, url: str, timeouts: Timeouts, health: HealthCheck) -> None:
        """Raises `ConfigError`."""
        self.upstream = Upstream(url, timeouts=timeouts, ended=self._ended)
        self._prober = Upstream(url, timeouts=timeouts)
        self.name = self.upstream.name
        self.up = True
        self.calls = 0
        self.failures = 0
        """Calls that got no whole answer from it, since the start."""
        self.retries = 0
        """Calls that were sent again after it, there or elsewhere."""
        self.moved = 0
        """Rollouts that left it for another."""
        self.times_down = 0
        self.reason = ""
        """What failed last."""
        self._health = health
        self._bad = 0  # failures in a row
        self._good = 0  # good probes in a row
        self._proven_at = 0.0  # when it last answered
        self._watcher: asyncio.Task[None] | None = None

    def watch(self, *, always: bool) -> None:
        """Probe it from now on: for ever, or until it is up."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(always))

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self.upstream.close()
        self._prober.close()

    def _ended(self, code: Code | None, status: int) -> None:
        if code is None:
            if status < 500:
                self._bad = 0
                self._proven_at = time.monotonic()
        elif code not in ("aborted", "gateway_exhausted"):
            self.failures += 1
            if code in NEVER_SENT:  # other failures may be the call's own, and a probe tells
                self._failed(code)

    def _failed(self, reason: str) -> None:
        self.reason = reason
        self._good = 0
        self._bad += 1
        if self.up and self._bad >= self._health.fall:
            self.up = False
            self.times_down += 1
            log.warning("replica %s is down: %s", self.name, reason)
            self.watch(always=False)

    async def _watch(self, always: bool) -> None:
        interval_s = self._health.interval_s
        try:
            while always or not self.up:
                await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))
                if self.up and time.monotonic() - self._proven_at < interval_s:
                    continue  # a call has shown it
                problem = await self._probe()
                if problem:
                    self._failed(problem)
                    continue
                self._good += 1
                if self._good >= self._health.rise:
                    if not self.up:
                        log.warning("replica %s is up again", self.name)
                    self._bad = self._good = 0
                    self.up = True
        finally:
            self._watcher = None

    async def _probe(self) -> str:
        """What is wrong with it; empty where it answers well."""
        probe = self._prober.call("GET", self._health.path.encode(), [], b"", within_s=PROBE_TIMEOUT_S)
        try:
            await probe.start()
            await probe.read()
        except UpstreamError as error:
            return error.code
        finally:
            probe.abort()
        return f"{self._health.path} answers {probe.status}" if probe.status >= 500 else ""

    def state(self) -> Json:
        return {
            "replica": self.name,
            "up": self.up,
            "in_flight": self.upstream.in_flight,
            "calls": self.calls,
            "failures": self.failures,
            "retries": self.retries,
            "moved": self.moved,
            "times_down": self.times_down,
        }


class Replicas:
    """Chooses where a call goes, and keeps to it.

    A rollout's calls share long prefixes, which only the replica that has them cached need not compute again. So each
    rollout is pinned to one replica, and moves only when that one is down; it does not go back. Which one, is decided
    by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN
    1998): gateways that know nothing of each other choose alike. A replica that has far more calls under way than the
    mean is passed over, as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).
    """

    def __init__(self, urls: Sequence[str], timeouts: Timeouts, health: HealthCheck) -> None:
        """Raises `ConfigError`."""
        self._all = [Replica(url, timeouts, health) for url in urls]
        names = [replica.name for replica in self._all]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"upstream: name at least one, and each of them once: {', '.join(names)}.")
        self._only = self._all[0] if len(self._all) == 1 else None
        self._pins: OrderedDict[str, Replica] = OrderedDict()
        self._turn = 0
        self.retry_after_s = math.ceil(health.interval_s * health.rise)
        """How soon a replica that is down may be found to be up."""

    @property
    def any_up(self) -> bool:
        return any(replica.up for replica in self._all)

    def why(self) -> str:
        """What is wrong with those that are down."""
        return ", ".join(f"{replica.name}: {replica.reason}" for replica in self._all if not replica.up)

    def states(self) -> list[Json]:
        """Of each replica its URL, `replica`; `up`, `in_flight` and `pinned` as they are now; `calls`, `failures`,
        `retries`, `moved` and `times_down` since the start."""
        pinned = dict.fromkeys(self._all, 0)
        for replica in self._pins.values():
            pinned[replica] += 1
        return [replica.state() | {"pinned": pinned[replica]} for replica in self._all]

    def watch(self) -> None:
        """Look after several replicas from now on. A single one is looked at only while it is down."""
        if self._only is None:
            for replica in self._all:
                replica.watch(always=True)

    def close(self) -> None:
        for replica in self._all:
            replica.close()

    def choose(self, pin: str, tried: Collection[Replica] = ()) -> Replica | None:
        """The replica for a call of the rollout `pin`, or of none; not one of `tried` if another is up. None where none
        is up."""
        if self._only is not None:
            return self._only if self._only.up else None
        self.watch()
        pinned = self._pins.get(pin)
        if pinned is not None and pinned.up and pinned not in tried:
            self._pins.move_to_end(pin)
            return pinned
        up = [replica for replica in self._all if replica.up]
        untried = [replica for replica in up if replica not in tried]
        if not up:
            return None
        if pinned is not None and pinned.up and not untried:
            return pinned
        candidates = untried or up
        if not pin:
            self._turn += 1
            return min(_rotated(candidates, self._turn), key=_load)
        chosen = _by_rendezvous(pin, candidates)
        if pinned is not None and not pinned.up:
            pinned.moved += 1
        if pinned is None or not pinned.up:
            self._pin(pin, chosen)
        return chosen

    def has_other(self, tried: Collection[Replica]) -> bool:
        """Another one than `tried` is up."""
        return any(replica.up and replica not in tried for replica in self._all)

    def _pin(self, pin: str, replica: Replica) -> None:
        self._pins[pin] = replica
        self._pins.move_to_end(pin)
        if len(self._pins) > PINS:
            self._pins.popitem(last=False)


def make_replicas(options: GatewayOptions) -> Replicas:
    """Raises `ConfigError`."""
    timeouts = Timeouts(
        connect_s=options.upstream_connect_timeout_s,
        first_byte_s=options.upstream_first_byte_timeout_s,
        chunk_s=options.upstream_chunk_timeout_s,
        total_s=options.upstream_timeout_s,
    )
    health = HealthCheck(
        path=options.health_path,
        interval_s=options.health_interval_s,
        fall=options.health_fall,
        rise=options.health_rise,
    )
    return Replicas(options.upstreams, timeouts, health)


def _by_rendezvous(pin: str, candidates: list[Replica]) -> Replica:
    limit = math.ceil(OVERLOAD * (1 + sum(map(_load, candidates))) / len(candidates))
    ranked = sorted(candidates, key=lambda replica: _score(pin, replica.name), reverse=True)
    return next(replica for replica in ranked if _load(replica) < limit)  # not all can be above the mean


def _score(pin: str, name: str) -> bytes:
    return hashlib.blake2b(f"{pin}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _load(replica: Replica) -> int:
    return replica.upstream.in_flight


def _rotated(replicas: list[Replica], turn: int) -> list[Replica]:
    at = turn % len(replicas)
    return replicas[at:] + replicas[:at]
