"""Continuous batching: a thread that owns the model and computes one step after another.

A step computes the next token of every running sequence and, beside them, up to `PREFILL_TOKENS` prompt tokens of those
that just joined. Between steps sequences join and leave, weights are swapped and commands are carried out; nothing
waits for a whole sequence. All state here belongs to the thread: others reach it through `call`, `submit`, `cancel`.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from outrider.engines.embedded.attention import Attention
from outrider.engines.embedded.batch import Planner, Work
from outrider.engines.embedded.kv import BLOCK, PrefixPool, Slots, block_keys
from outrider.engines.embedded.model import Model
from outrider.engines.embedded.sampling import Draws, sample
from outrider.engines.embedded.sequences import Failed, Job, RunningSequence, Update, add_token, common_prefix
from outrider.engines.embedded.vocabulary import Vocabulary

PREFILL_TOKENS = 512
LOOKAHEAD = 64
"""Waiting sequences looked at for admission in one step; those that wait for a prefix let others pass."""

Deliveries = list[tuple[Job, Update | Failed]]
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Scheduler:
    """Start with `start`; `deliver` is called from the thread, once a step, with what there is to report."""

    def __init__(
        self,
        model: Model,
        vocabulary: Vocabulary,
        *,
        slots: int,
        max_model_len: int,
        prefix_cache_tokens: int,
        version: int,
        threads: int,
        deliver: Callable[[Deliveries], None],
    ) -> None:
        shape = model.shape
        self._model = model
        self._vocabulary = vocabulary
        self._slots = Slots(
            layers=shape.layers,
            slots=slots,
            heads=shape.kv_heads,
            length=max_model_len,
            dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self._pool = PrefixPool(self._slots, prefix_cache_tokens)
        self._attention = Attention(self._slots)
        self._planner = Planner(model.device)
        self._deliver = deliver
        self._threads = threads
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[RunningSequence] = deque()
        self._active: dict[int, RunningSequence] = {}  # by slot
        self._count = slots
        self._news: Deliveries = []
        self._epoch = 0
        self._paused = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self.version = version
        """The policy version that samples now. Written by the thread alone; reading it is safe from anywhere."""
        self._counters = {"steps": 0, "prefill_tokens": 0, "decode_tokens": 0, "cached_tokens": 0, "cancelled": 0}

    def warm_up(self) -> None:
        """Run a prompt of two tokens and one more, before `start`: the first run is slow, and shows what won't work."""
        with torch.inference_mode():
            for start, tokens in ((0, [0, 0]), (2, [0])):
                work = [Work(slot=0, start=start, tokens=tokens, wants_logits=True)]
                self._model.forward(self._planner(work, []), self._attention)

    # From any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._commands.put(lambda: self._waiting.extend(job.sequences))

    def cancel(self, job: Job) -> None:
        """Free what the job holds, before the next step. Nothing more is delivered for it. Harmless once it ended."""
        self._commands.put(lambda: self._drop(job))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # whatever it is belongs to the one who asked
                future.set_exception(error)

        self._commands.put(run)
        return future

    def close(self) -> None:
        """End the thread after the step it is in; jobs that are left fail."""
        self._commands.put(self._close)

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # For `call`: on the thread.

    def pause(self) -> dict[str, int | bool]:
        self._paused = True
        return self.stats()

    def resume(self) -> dict[str, int | bool]:
        self._paused = False
        return self.stats()

    def swap(self, weights: object, version: int) -> None:
        """Serve other weights from the next step on. Sequences under way go on with the keys and values they have."""
        self._model.swap(weights)
        self.version = version
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        self._pool.clear()
        self._epoch += 1
        for sequence in self._active.values():
            if sequence.prefilling:
                sequence.epoch = None  # its prompt is computed by two sets of weights

    def stats(self) -> dict[str, int | bool]:
        return {
            "running": len(self._active),
            "waiting": len(self._waiting),
            "slots": self._count,
            "paused": self._paused,
            "version": self.version,
            "prefix_blocks": len(self._pool),
            **self._counters,
        }

    # The thread.

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._closed:
                self._obey()
                self._admit()
                if self._active:
                    try:
                        self._step()
                    except Exception:
                        logger.exception("a step failed; the requests in it are ended")
                        self._fail({s.job for s in self._active.values()}, Failed(message="the engine failed"))
                self._report()
            self._fail(
                {s.job for s in [*self._waiting, *self._active.values()]},
                Failed(message="the engine is shutting down", status=503),
            )
            self._report()

    def _obey(self) -> None:
        """Carry out the commands that are there; wait for one where there is nothing else to do."""
        while not self._closed:
            idle = not self._active and (self._paused or not self._waiting)
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            command()

    def _close(self) -> None:
        self._closed = True

    def _report(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._deliver(news)

    def _fail(self, jobs: set[Job], failure: Failed) -> None:
        for job in jobs:
            self._drop(job)
            self._news.append((job, failure))

    def _drop(self, job: Job) -> None:
        kept = [s for s in self._waiting if s.job is not job]
        held = [s for s in self._active.values() if s.job is job]
        if held or len(kept) < len(self._waiting):
            self._counters["cancelled"] += 1
        self._waiting = deque(kept)
        for sequence in held:
            del self._active[sequence.slot]

    def _admit(self) -> None:
        """Give waiting sequences free slots, first come first served but for those whose prefix is being computed."""
        if self._paused or not self._waiting:
            return
        free = [slot for slot in range(self._count) if slot not in self._active][::-1]
        passed: list[RunningSequence] = []
        while free and self._waiting and len(passed) < LOOKAHEAD:
            sequence = self._waiting.popleft()
            ready, donor, soon = self._reusable(sequence)
            if soon - ready >= BLOCK:
                passed.append(sequence)
                continue
            sequence.slot = free.pop()
            sequence.epoch = self._epoch
            if donor is not None:
                self._slots.copy(donor.slot, sequence.slot, ready)
            elif ready:
                self._pool.restore(sequence.prompt_keys[: ready // BLOCK], sequence.slot)
            sequence.computed = sequence.cached = ready
            self._counters["cached_tokens"] += ready
            self._active[sequence.slot] = sequence
        self._waiting.extendleft(reversed(passed))

    def _reusable(self, sequence: RunningSequence) -> tuple[int, RunningSequence | None, int]:
        """``(tokens, donor, soon)``: how much of the prompt is computed already, in whose slot (None: in the pool), and
        how much will be once the prefills under way are done. The last prompt token is always left to compute."""
        most = len(sequence.prompt) - 1
        best = self._pool.match(sequence.prompt_keys[: most // BLOCK]) * BLOCK
        donor = None
        soon = 0
        for other in self._active.values():
            if other.epoch != self._epoch or not (self._pool.capacity or other.job is sequence.job):
                continue
            alike = min(common_prefix(sequence.prompt, other.prompt), most)
            soon = max(soon, alike)
            if min(alike, other.computed) > best:
                best, donor = min(alike, other.computed), other
        return best, donor, soon

    def _step(self) -> None:
        work, sequences = self._work()
        common = [a.alike(b) for a, b in itertools.pairwise(sequences)]
        logits = self._model.forward(self._planner(work, common), self._attention)
        self._counters["steps"] += 1
        for item, sequence in zip(work, sequences, strict=True):
            was_prefilling = sequence.prefilling
            self._counters["prefill_tokens" if was_prefilling else "decode_tokens"] += len(item.tokens)
            sequence.computed = item.end
            if was_prefilling and not sequence.prefilling:
                self._keep_prefix(sequence, sequence.prompt_keys)
        rows = [s for item, s in zip(work, sequences, strict=True) if item.wants_logits]
        if rows:
            draws = sample(logits, [s.sampling for s in rows], [s.random.random() for s in rows])
            self._accept(rows, draws)
        self._compact()

    def _work(self) -> tuple[list[Work], list[RunningSequence]]:
        """What the next step computes: single tokens first, then pieces of prompts, each in the order of slots."""
        budget = PREFILL_TOKENS
        chosen: list[tuple[bool, int, int]] = []
        for slot, sequence in self._active.items():  # in order of admission
            left = len(sequence.ids) - sequence.computed
            count = left if left == 1 else min(left, budget)
            budget -= count if left > 1 else 0
            if count:
                chosen.append((count > 1, slot, count))
        work, sequences = [], []
        for _, slot, count in sorted(chosen):
            sequence = self._active[slot]
            end = sequence.computed + count
            work.append(
                Work(
                    slot=slot,
                    start=sequence.computed,
                    tokens=sequence.ids[sequence.computed : end],
                    wants_logits=end == len(sequence.ids),
                )
            )
            sequences.append(sequence)
        return work, sequences

    def _accept(self, rows: list[RunningSequence], draws: Draws) -> None:
        for sequence, token, logprob, tops in zip(rows, draws.ids, draws.logprobs, draws.tops, strict=True):
            if self._active.get(sequence.slot) is not sequence:
                continue  # a sibling of it failed in this step
            if not math.isfinite(logprob):
                failure = Failed(message="the model computed numbers that are not finite; its weights may be broken")
                self._fail({sequence.job}, failure)
                continue
            sequence.ids.append(token)
            update = sequence.update
            update.token_ids.append(token)
            update.logprobs.append(logprob)
            update.tops.append(tops)
            add_token(update.versions, self.version)
            self._advance_text(sequence, token)
            if update.finish_reason is not None:
                self._finish(sequence)
            if sequence.job.stream or update.finish_reason is not None:
                update.cached_tokens = sequence.cached
                self._news.append((sequence.job, update))
                sequence.update = Update(index=sequence.index)

    def _advance_text(self, sequence: RunningSequence, token: int) -> None:
        """Add the token's text and decide whether it is the last. An end token has no text."""
        update, sampling, vocabulary = sequence.update, sequence.sampling, self._vocabulary
        if token in sampling.stop_token_ids:
            update.finish_reason, update.stop_reason = "stop", token
        elif token in vocabulary.stop_ids and not sampling.ignore_eos:
            update.finish_reason = "stop"
        else:
            if not (sampling.skip_special_tokens and token in vocabulary.special_ids):
                update.text += sequence.text.push(vocabulary.token_bytes(token))
            if sequence.text.matched is not None:
                update.finish_reason, update.stop_reason = "stop", sequence.text.matched
            elif sequence.sampled >= sampling.max_tokens:
                update.finish_reason = "length"
        if update.finish_reason is not None:
            update.text += sequence.text.finish()

    def _finish(self, sequence: RunningSequence) -> None:
        self._keep_prefix(sequence, None)
        del self._active[sequence.slot]

    def _keep_prefix(self, sequence: RunningSequence, keys: list[bytes] | None) -> None:
        """Put the sequence's full blocks into the pool: those with `keys`, or all that is computed (None)."""
        if not self._pool.capacity or sequence.epoch != self._epoch:
            return
        if keys is None:
            keys = block_keys(torch.tensor(sequence.ids[: sequence.computed], dtype=torch.int32).numpy())
        self._pool.store(keys, sequence.slot)

    def _compact(self) -> None:
        """Move the sequence in the last slot into the first hole, where holes are many: spans cover holes too."""
        if not self._active:
            return
        last = max(self._active)
        if last + 1 - len(self._active) <= max(2, len(self._active) // 4):
            return
        hole = next(slot for slot in range(last) if slot not in self._active)
        sequence = self._active[last]
        self._slots.copy(last, hole, sequence.computed)
        self._active = {(hole if s is sequence else slot): s for slot, s in self._active.items()}
        sequence.slot = hole
