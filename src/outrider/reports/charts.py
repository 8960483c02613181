"""Charts as inline SVG: no script, no assets; colours are the page's CSS variables, so light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from outrider.reports.text import number, scientific

_MANY_POINTS = 40  # beyond that the dots of a line would touch; they stay as invisible targets for hovering


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or points with error bars. `low` and `high` give a band around a line, bars at points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 1
    """1 to 6, see the style sheet."""
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    points: bool = False
    shift: float = 0.0
    """Moves points sideways, in SVG units, so that two at the same step do not hide each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The drawing area in SVG units, and the data range that fills it."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: int = 46
    right: int = 10
    top: int = 8
    bottom: int = 22
    words: Callable[[float], str] | None = None
    """Formats y values; None gives plain numbers, on the axis with as many decimals as its ticks need."""

    def say(self, value: float) -> str:
        return escape((self.words or number)(value))

    def at_x(self, value: float) -> float:
        return self.left + (value - self.x[0]) / (self.x[1] - self.x[0]) * (self.width - self.left - self.right)

    def at_y(self, value: float) -> float:
        share = (value - self.y[0]) / (self.y[1] - self.y[0])
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


def plot(
    series: Sequence[Series],
    *,
    label: str,
    width: int = 520,
    height: int = 230,
    y_range: tuple[float, float] | None = None,
    words: Callable[[float], str] | None = None,
) -> str:
    """A chart over training steps. Gaps (None) break a line. `words` formats y values; `label` is for screen readers.

    An empty chart is a sentence that says so.
    """
    values = [value for one in series for value in (*one.ys, *one.low, *one.high) if value is not None]
    xs = [x for one in series for x, y in zip(one.xs, one.ys, strict=True) if y is not None]
    if not values or not xs:
        return '<p class="none">No figures yet.</p>'
    frame = Frame(width=width, height=height, x=_x_range(xs), y=y_range or _y_range(values), words=words)
    body = [_axes(frame, xs)]
    body += [_band(frame, one) for one in series if one.low and not one.points]
    body += [_points(frame, one) if one.points else _line(frame, one) for one in series]
    return _svg(frame, label, body)


def stacked(
    xs: Sequence[float], parts: Sequence[Series], *, label: str, width: int = 1080, height: int = 230, unit: str = "s"
) -> str:
    """Bars of `parts` upon each other, one bar an x."""
    tops = [sum(part.ys[i] or 0.0 for part in parts) for i in range(len(xs))]
    if not any(tops):
        return '<p class="none">No figures yet.</p>'
    x_low, x_high = min(xs), max(xs)
    frame = Frame(
        width=width,
        height=height,
        x=(x_low - 0.7, x_high + 0.7),
        y=(0.0, max(tops) * 1.05),
        words=lambda value: f"{number(value)} {unit}",
    )
    body = [_axes(frame, xs)]
    bar = min(44.0, 0.62 * (frame.at_x(x_low + 1) - frame.at_x(x_low)))
    for i, x in enumerate(xs):
        floor = 0.0
        for part in parts:
            value = max(part.ys[i] or 0.0, 0.0)
            upper, lower = frame.at_y(floor + value), frame.at_y(floor)
            if value:
                body.append(
                    f'<rect class="f{part.colour}" x="{frame.at_x(x) - bar / 2:.1f}" y="{upper:.1f}" width="{bar:.1f}" '
                    f'height="{lower - upper:.1f}"><title>step {number(x)}, {escape(part.name)}: '
                    f"{number(value)} {unit} ({100 * value / tops[i]:.0f}%)</title></rect>"
                )
            floor += value
    return _svg(frame, label, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A share with its interval, each from 0 to 1; None where it is unknown."""

    name: str
    value: float
    low: float | None
    high: float | None
    colour: int


def track(measures: Sequence[Measured], *, label: str, width: int = 480) -> str:
    """Shares on a scale from 0 to 100%, one row each: a dot, and a bar for its interval."""
    row = 26
    height = row * len(measures) + 24
    frame = Frame(width=width, height=height, x=(0.0, 1.0), y=(0.0, 1.0), left=64, right=20, bottom=20)
    body = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = frame.at_x(share)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 20}"/>')
        body.append(f'<text x="{x:.1f}" y="{height - 5}" text-anchor="middle">{share:.0%}</text>')
    for i, one in enumerate(measures):
        y = 4 + row * (i + 0.5)
        body.append(
            f'<text class="ink" x="{frame.left - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(one.name)}</text>'
        )
        if one.low is not None and one.high is not None:
            body.append(
                f'<line class="range s{one.colour}" x1="{frame.at_x(one.low):.1f}" x2="{frame.at_x(one.high):.1f}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        body.append(f'<circle class="f{one.colour}" cx="{frame.at_x(one.value):.1f}" cy="{y:.1f}" r="6"/>')
    return _svg(frame, label, body)


def legend(series: Iterable[tuple[str, int]]) -> str:
    """Names with their colours, for above a chart."""
    keys = "".join(f'<span><i class="b{colour}"></i>{escape(name)}</span>' for name, colour in series)
    return f'<p class="legend">{keys}</p>'


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round values between `low` and `high`, about `wanted` of them."""
    rough = (high - low) / max(wanted, 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next((m * magnitude for m in (1, 2, 5) if m * magnitude >= rough), 10 * magnitude)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _x_range(xs: Sequence[float]) -> tuple[float, float]:
    low, high = min(xs), max(xs)
    pad = 0.02 * (high - low) if high > low else 1.0
    return low - pad, high + pad


def _y_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-12 + 1e-6 * abs(high):
        pad = 0.5 * abs(high) or 0.5
        return low - pad, high + pad
    pad = 0.07 * (high - low)
    # A quantity that is never negative starts at 0 when it comes near it anyway.
    return (0.0 if 0 <= low < 0.3 * high else low - pad), high + pad


def _axes(frame: Frame, xs: Sequence[float]) -> str:
    parts = []
    values = ticks(*frame.y)
    for value, words in zip(values, _tick_words(values, frame), strict=True):
        y = frame.at_y(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{frame.left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{words}</text>'
        )
    for step in _step_ticks(xs, room=frame.width // 60):
        parts.append(f'<text x="{frame.at_x(step):.1f}" y="{frame.height - 6}" text-anchor="middle">{step}</text>')
    return "".join(parts)


def _tick_words(values: Sequence[float], frame: Frame) -> list[str]:
    if frame.words is not None or len(values) < 2:
        return [frame.say(value) for value in values]
    gap = values[1] - values[0]
    if max(map(abs, values)) < 1e-3:
        return [scientific(value) if abs(value) > gap / 2 else "0" for value in values]
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


def _step_ticks(xs: Sequence[float], room: int) -> list[int]:
    """Whole steps from the first on, at a round stride that gives at most about `room` of them."""
    first, last = math.ceil(min(xs)), math.floor(max(xs))
    stride = next(m * 10**e for e in range(12) for m in (1, 2, 5) if (last - first) / (m * 10**e) <= max(room, 2))
    return list(range(first, last + 1, stride))


def _line(frame: Frame, one: Series) -> str:
    parts, run = [], []
    for x, y in [*zip(one.xs, one.ys, strict=True), (0.0, None)]:
        if y is not None:
            run.append(f"{frame.at_x(x):.1f},{frame.at_y(y):.1f}")
            continue
        if len(run) > 1:
            parts.append(f'<polyline class="line s{one.colour}" points="{" ".join(run)}"/>')
        run = []
    kind, radius = ("hover", 6) if len(one.xs) > _MANY_POINTS else (f"f{one.colour}", 2.6)
    for x, y in zip(one.xs, one.ys, strict=True):
        if y is not None:
            parts.append(
                f'<circle class="{kind}" cx="{frame.at_x(x):.1f}" cy="{frame.at_y(y):.1f}" r="{radius}">'
                f"<title>{escape(one.name)}, step {number(x)}: {frame.say(y)}</title></circle>"
            )
    return "".join(parts)


def _band(frame: Frame, one: Series) -> str:
    rows = [
        (x, low, high)
        for x, low, high in zip(one.xs, one.low, one.high, strict=True)
        if low is not None and high is not None
    ]
    if len(rows) < 2:
        return ""
    upper = [f"{frame.at_x(x):.1f},{frame.at_y(high):.1f}" for x, _, high in rows]
    lower = [f"{frame.at_x(x):.1f},{frame.at_y(low):.1f}" for x, low, _ in reversed(rows)]
    return f'<polygon class="band f{one.colour}" points="{" ".join(upper + lower)}"/>'


def _points(frame: Frame, one: Series) -> str:
    parts = []
    lows, highs = one.low or [None] * len(one.xs), one.high or [None] * len(one.xs)
    for x, y, low, high in zip(one.xs, one.ys, lows, highs, strict=True):
        if y is None:
            continue
        at, span = frame.at_x(x) + one.shift, ""
        if low is not None and high is not None:
            span = f" ({frame.say(low)} to {frame.say(high)})"
            parts.append(
                f'<line class="bar s{one.colour}" x1="{at:.1f}" x2="{at:.1f}" '
                f'y1="{frame.at_y(low):.1f}" y2="{frame.at_y(high):.1f}"/>'
            )
        parts.append(
            f'<circle class="mark f{one.colour}" cx="{at:.1f}" cy="{frame.at_y(y):.1f}" r="5">'
            f"<title>{escape(one.name)}, step {number(x)}: {frame.say(y)}{span}</title></circle>"
        )
    return "".join(parts)


def _svg(frame: Frame, label: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'
    )
