"""Text for people: untrusted strings made harmless, numbers made short.

Whatever a model, a harness or a task file wrote may hold terminal escapes or characters that reorder the line.
`clean` replaces them by visible signs instead of dropping them, so that one sees that they were there.
"""

from __future__ import annotations

import math
import re
from typing import Any

# C0 and C1 controls but for tab and newline, soft hyphen, bidirectional marks, zero-width and tag characters, line
# separators, surrogates. The zero-width joiners U+200C/D stay: scripts and emoji need them, and they reorder nothing.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def clean(text: str, limit: int = 0) -> str:
    """`text` without anything that steers a terminal or reorders a line; newlines and tabs stay.

    A positive `limit` cuts to that many characters and says how many were left out.
    """
    left_out = len(text) - limit if limit and len(text) > limit else 0
    if left_out:
        text = text[:limit]
    text = _UNSAFE.sub(_visible, text.replace("\r\n", "\n"))
    return f"{text} … ({left_out:,} more characters)" if left_out else text


def one_line(text: str, limit: int = 120) -> str:
    """`text` on one line, whitespace collapsed, cut to `limit` characters."""
    flat = " ".join(clean(text[: limit * 4]).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _visible(match: re.Match[str]) -> str:
    return f"⟨U+{ord(match.group()):04X}⟩"


def finite(value: Any) -> float | None:
    """`value` as a float if it is a finite number, else None. Booleans are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def number(value: Any, digits: int = 3) -> str:
    """A number with `digits` significant digits and thousands separators; a dash for none."""
    real = finite(value)
    if real is None:
        return "–" if value is None else one_line(str(value), 12)
    if real == int(real) and abs(real) < 1e12:
        return f"{int(real):,}"
    if abs(real) >= 10 ** (digits - 1):
        return f"{real:,.0f}"
    if abs(real) < 1e-3:
        return scientific(real)
    return f"{real:.{digits}g}"


def scientific(value: float) -> str:
    """``3.5e-4``."""
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def fixed(value: Any, places: int = 2) -> str:
    """A number with so many decimals, for columns that must line up; a dash for none."""
    real = finite(value)
    return "–" if real is None else f"{real:.{places}f}"


def percent(value: Any) -> str:
    """A share as per cent: ``69%``, ``83.5%``."""
    return aligned_percent(value).replace(".0%", "%")


def aligned_percent(value: Any) -> str:
    """A share as per cent, always with one decimal, for columns that must line up."""
    real = finite(value)
    return "–" if real is None else f"{100 * real:.1f}%"


def duration(seconds: Any) -> str:
    """``45 s``, ``3 min 20 s``, ``1 h 02 min``."""
    real = finite(seconds)
    if real is None:
        return "–"
    if real < 10:
        return f"{max(real, 0.0):.1f} s"
    whole = round(real)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def gigabytes(count: Any) -> str:
    """Bytes as GB (10^9)."""
    real = finite(count)
    return "–" if real is None else f"{real / 1e9:.1f} GB"


def tally(counts: dict[str, int]) -> str:
    """``zero variance 2, too long 1``: the largest first, names cleaned."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{one_line(name, 60).replace('_', ' ')} {count:,}" for name, count in ordered)
