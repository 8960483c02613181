"""What can go wrong between the gateway and an upstream, and how long it waits for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Code = Literal[
    "upstream_unreachable",
    "upstream_connect_timeout",
    "upstream_first_byte_timeout",
    "upstream_chunk_timeout",
    "upstream_timeout",
    "upstream_cut",
    "upstream_invalid",
    "upstream_too_large",
    "upstream_unavailable",
    "gateway_exhausted",
    "aborted",
]

_STATUS: dict[Code, int] = {
    "upstream_unreachable": 502,
    "upstream_connect_timeout": 504,
    "upstream_first_byte_timeout": 504,
    "upstream_chunk_timeout": 504,
    "upstream_timeout": 504,
    "upstream_cut": 502,
    "upstream_invalid": 502,
    "upstream_too_large": 502,
    "upstream_unavailable": 503,
    "gateway_exhausted": 503,
    "aborted": 499,
}


class UpstreamError(Exception):
    """The upstream gave no whole answer. `status` is what an agent should get, if it got none yet.

    ``upstream_cut`` is an answer that broke off, ``upstream_invalid`` one that makes no sense, ``upstream_too_large``
    one that we would not hold, ``upstream_unavailable`` that every replica is known to be down, ``gateway_exhausted``
    that we have no socket left, ``aborted`` that we gave up ourselves.
    """

    def __init__(self, code: Code, message: str, *, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.code: Code = code
        self.status = _STATUS[code]
        self.retry_after_s = retry_after_s
        """When to come back, seconds; 0 where nothing is known."""


def too_large(limit: float) -> UpstreamError:
    return UpstreamError("upstream_too_large", f"its answer is larger than {limit:.0f} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Longest waits, seconds."""

    connect_s: float = 10.0
    first_byte_s: float = 600.0
    """From the request to status and headers, which a plain answer has when the model has said everything."""
    chunk_s: float = 300.0
    """Between two pieces of an answer that has begun."""
    total_s: float = 600.0
    """From the first sending to the end of the answer, with all that is tried in between."""
