"""1 when the last line the harness printed is the task's answer, else 0."""

from __future__ import annotations

from outrider.types import Episode, Score


def exact_match(episode: Episode) -> Score:
    """Compare the last non-empty line of standard output with the task's field ``answer``, both as stripped text.

    Raises `ValueError` where the task has none, or null: then nothing can be said.
    """
    answer = episode.task.fields.get("answer")
    if answer is None:
        raise ValueError(f"task {episode.task.id!r} has no field `answer`")
    wanted = str(answer).strip()
    lines = [line.strip() for line in episode.attempt.stdout_tail.splitlines() if line.strip()]
    got = lines[-1] if lines else ""
    return Score(value=float(got == wanted), reason=f"printed {got!r}, wanted {wanted!r}")
