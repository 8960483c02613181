"""The terminal view of a run: a live picture on a terminal, plain lines anywhere else (what CI logs show)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.reports.progress import Phase, Progress, eval_words, learning_words, skipped_groups, step_words
from outrider.reports.text import aligned_percent, duration, finite, fixed, number, one_line, percent, tally
from outrider.types import Json, Rollout

_REFRESH_PER_S = 2  # a picture costs a few ms of CPU, and the machine has rollouts to do
_PLAIN_EVERY_S = 30.0  # a long phase says that it is alive


class LiveView:
    """An `Observer` for people. Use as a context manager; thread-safe.

    On a terminal it draws a picture that stays when the run ends. The cursor is left visible, so that even a killed
    process leaves the terminal usable. Elsewhere it writes one flushed line for each phase, step, evaluation and
    message, without control codes. A stream that breaks (``| head``) silences the view and never ends a run.
    """

    def __init__(
        self,
        *,
        steps: int,
        success: float = 1.0,
        title: str = "",
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`steps` of the whole run; `success`: the reward from which a rollout counts as one; `live`: None to ask
        the console's stream whether it is a terminal."""
        self._console = console or Console()
        self._is_live = _on_terminal(self._console) if live is None else live
        self._title = one_line(title)
        self._progress = Progress(steps=steps, success=success, clock=clock)
        self._lock = threading.RLock()  # the picture is drawn by a thread of its own
        self._live: Live | None = None
        self._last_picture: RenderableType = Text()
        self._silent = False
        self._last_line = clock()

    def __enter__(self) -> LiveView:
        if self._is_live:
            self._live = Live(
                get_renderable=self._picture,
                console=self._console,
                refresh_per_second=_REFRESH_PER_S,
                redirect_stderr=sys.stderr.isatty(),  # what goes to a file stays in that file
            )
            self._live.start()
            self._console.show_cursor(True)
        elif self._title:
            self._line(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last picture and stop drawing. Safe to call twice, and from a signal handler's second Ctrl-C."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def phase(self, name: str, total: int) -> None:
        with self._lock:
            self._progress.begin(name, total)
            self._line(f"{one_line(name)}: {total} to do" if total > 0 else one_line(name))

    def advance(self, rollout: Rollout | None = None) -> None:
        with self._lock:
            self._progress.advance(rollout)
            phase = self._progress.phase
            if phase is not None and self._progress.clock() - self._last_line >= _PLAIN_EVERY_S:
                self._line(f"{phase.name}: {_phase_words(phase, self._progress.clock())}")

    def record(self, record: Json, *, earlier: bool = False) -> None:
        when = "done earlier: " if earlier else ""
        with self._lock:
            self._progress.add(record, earlier=earlier)
            if record.get("kind") == "step":
                self._line(when + step_words(record, self._progress.steps_wanted))
            elif record.get("kind") == "eval":
                self._line(f"{when}{one_line(str(record.get('name')), 24)}: {eval_words(record)}")

    def message(self, text: str) -> None:
        with self._lock:
            self._progress.say(text)
            self._line(one_line(text, 2000))

    def _line(self, text: str) -> None:
        """One plain line, where there is no picture."""
        if self._is_live or self._silent:
            return
        self._last_line = self._progress.clock()
        try:
            self._console.file.write(f"[{_clock_face(self._progress.elapsed_s())}] {text}\n")
            self._console.file.flush()
        except (OSError, ValueError):  # a broken pipe or a closed stream: nobody watches any more
            self._silent = True

    def _picture(self) -> RenderableType:
        # Waiting for ever could deadlock a signal handler that calls `close` while its own thread holds the lock.
        if not self._lock.acquire(timeout=0.2):
            return self._last_picture
        try:
            self._last_picture = draw(self._progress, self._title)
            return self._last_picture
        finally:
            self._lock.release()


def draw(progress: Progress, title: str) -> RenderableType:
    """The whole picture of the moment."""
    parts: list[RenderableType] = [_header(progress, title), _bars(progress)]
    if progress.steps:
        parts += [Text(), _steps(progress), Text("   ".join(learning_words(progress.steps[-1])), "dim")]
    if progress.evals:
        parts += [Text(), _evals(progress)]
    parts += [Text(), _counters(progress)]
    if progress.messages:
        parts += [Text(), _messages(progress)]
    return Group(*parts)


def _header(progress: Progress, title: str) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(Text(title or "Outrider", style="bold"), Text(f"elapsed {duration(progress.elapsed_s())}", "dim"))
    return grid


def _bars(progress: Progress) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=20)
    grid.add_column(width=24)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    left = progress.left_s()
    if progress.steps_wanted:
        grid.add_row(
            Text("steps", "bold"),
            _bar(progress.steps_wanted, progress.steps_done, progress.clock()),
            Text(f"{progress.steps_done}/{progress.steps_wanted}"),
            Text("time left unknown yet" if left is None else f"about {duration(left)} left", "dim"),
        )
    phase = progress.phase
    if phase is not None:
        now = progress.clock()
        count = f"{phase.done}/{phase.total}" if phase.total else str(phase.done)
        words = Text(_phase_words(phase, now, counted=False), "dim")
        grid.add_row(Text(phase.name), _bar(phase.total, phase.done, now), Text(count), words)
    return grid


def _bar(total: int, done: int, now: float) -> ProgressBar:
    """Pulses where the total is not known."""
    return ProgressBar(
        total=total or None, completed=done, width=24, pulse=not total, animation_time=now, complete_style="blue"
    )


def _phase_words(phase: Phase, now: float, *, counted: bool = True) -> str:
    words = [f"{phase.done}/{phase.total}" if phase.total else str(phase.done)] if counted else []
    left = phase.left_s(now)
    if left:
        words.append(f"{duration(left)} left")
    if phase.rewards:
        words.append(f"reward {fixed(sum(phase.rewards) / len(phase.rewards))}")
        words.append(f"success {percent(phase.successes / len(phase.rewards))}")
    unrewarded = phase.ended_rollouts - len(phase.rewards)
    if unrewarded:
        words.append(f"without reward {unrewarded}")
    return "  ".join(words)


def _steps(progress: Progress) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("step", "reward", "success", "tok/s", "loss", "step s", "groups"):
        table.add_column(title, justify="right", no_wrap=True)
    for record in progress.steps:
        times = record.get("times")
        table.add_row(
            number(record.get("step")),
            f"{fixed(record.get('reward_mean'))} ± {fixed(record.get('reward_std'))}",
            aligned_percent(record.get("success")),
            number(record.get("tokens_per_s")),
            fixed(record.get("loss"), 4),
            fixed(times.get("total") if isinstance(times, dict) else None, 1),
            skipped_groups(record),
            style="dim" if int(finite(record.get("step")) or 0) <= progress.steps_before else "",
        )
    return table


def _evals(progress: Progress) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, record in progress.evals.items():
        grid.add_row(Text(name, "bold"), Text(eval_words(record)))
    return grid


def _counters(progress: Progress) -> Text:
    """Always there, so that a run without failures says so."""
    failures, excluded = progress.all_failures(), progress.excluded
    line = Text()
    line.append("failures: ", "dim").append(tally(failures) or "none", "red" if failures else "")
    line.append("   retries: ", "dim").append(str(progress.retries), "yellow" if progress.retries else "")
    line.append("   excluded: ", "dim").append(tally(excluded) or "none", "yellow" if excluded else "")
    return line


def _messages(progress: Progress) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for at, text in progress.messages:
        grid.add_row(time.strftime("%H:%M:%S", time.localtime(at)), Text(text))
    return grid


def _on_terminal(console: Console) -> bool:
    """Ask the stream itself: variables such as FORCE_COLOR make rich believe that a CI log is a terminal."""
    try:
        return console.file.isatty() and not console.is_dumb_terminal
    except (AttributeError, ValueError):
        return False


def _clock_face(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
