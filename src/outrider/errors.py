"""The whole error model.

`OutriderError` is the root. Each subclass answers one question: who has to act? The CLI maps them to exit codes and
prints the message alone; a message names the thing that is wrong and what to do about it.

    ConfigError    2   the user: a key, a value, a file of theirs
    SetupError     3   the machine: a missing extra, a port in use, no space left, a service that does not come up
    RunError       4   the run cannot go on: too many failures, numbers that are not finite; resumable where it says so
    Interrupted  130   the user asked to stop; resumable
"""

from __future__ import annotations


class OutriderError(Exception):
    """Root of every error that Outrider raises on purpose."""

    exit_code = 1


class ConfigError(OutriderError):
    """A field, file or name that the user gave is wrong. Raised before anything is started."""

    exit_code = 2


class SetupError(OutriderError):
    """The machine or a service does not provide what is needed."""

    exit_code = 3


class RunError(OutriderError):
    """A run cannot go on. Its folder is left so that the same command resumes it."""

    exit_code = 4


class Interrupted(OutriderError):
    """Ctrl-C or SIGTERM: the run stopped cleanly and can be resumed."""

    exit_code = 130


class StoreError(OutriderError):
    """The store could not commit or read."""

    exit_code = 3


class StoreBusy(StoreError):
    """The store's queue is full; nothing was accepted. Try again later."""


class RequestError(OutriderError):
    """An agent's request is not what its protocol allows; the message is for the agent. Becomes a 4xx answer.

    `param` is the field that is wrong, such as ``messages.2.content``, for protocols that have a place for it.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class EngineError(OutriderError):
    """The engine refused, failed or could not be reached."""

    exit_code = 3


class RewardError(OutriderError):
    """A reward plug-in raised or returned something that is no finite number. An infrastructure failure, never 0."""

    exit_code = 4


class TrajectoryError(OutriderError):
    """Calls do not fit together; the message names the call."""


class BatchError(OutriderError):
    """Rows that must not be trained on: lengths that differ, a missing id, a number that is not finite."""
