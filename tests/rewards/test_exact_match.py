"""The reward that compares the last printed line with the task's answer."""

import pytest

from outrider.errors import RewardError
from outrider.outcome import scored
from outrider.rewards.exact_match import exact_match
from outrider.types import Attempt, Episode, Task


def episode(stdout, **fields):
    attempt = Attempt(id="r.a1", rollout_id="r", number=1, stdout_tail=stdout)
    return Episode(task=Task(id="t", fields=fields), attempt=attempt, calls=())


@pytest.mark.parametrize(
    ("stdout", "answer", "value"),
    [
        ("42\n", "42", 1.0),
        ("thinking\n 42 \n\n", 42, 1.0),
        ("42\nbye\n", "42", 0.0),
        ("The answer is 42\n", "42", 0.0),
        ("", "42", 0.0),
        ("", "", 1.0),
        ("wörld\r\n", "wörld", 1.0),
    ],
)
def test_the_last_line_counts(stdout, answer, value):
    score = exact_match(episode(stdout, answer=answer))
    assert score.value == value
    assert repr(str(answer)) in score.reason


@pytest.mark.parametrize("fields", [{}, {"answer": None}])
def test_R09_no_answer_to_compare_with_is_no_zero(fields):
    """R03 too: a null answer is nobody's fault but the data's, and matches no output, not even ``None``."""
    with pytest.raises(RewardError, match=r"exact_match raised .*'t' has no .*answer"):
        scored(exact_match, "exact_match", episode("None\n", **fields))
