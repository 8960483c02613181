"""`report.png`: two panels, good enough to open a README. Needs matplotlib, which comes with the `train` extra."""

from __future__ import annotations

import io
from typing import Any

from outrider.errors import SetupError
from outrider.reports.history import History, Share, dig, share
from outrider.reports.text import clean, finite, percent

_BLUE, _ORANGE, _GREY, _INK, _SOFT, _LINE = "#2563c9", "#c9690f", "#8a94a1", "#1c2128", "#5d6672", "#e1e5ea"


def draw_picture(history: History) -> bytes:
    """The picture as PNG. Raises `SetupError` where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(
            "report.png needs matplotlib, which is not installed: pip install 'outrider[train]'."
        ) from error
    figure = Figure(figsize=(11, 4.2), dpi=160, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.55, 1]})
    _curves(left, history)
    _bars(right, history)
    figure.suptitle(_title(history), x=0.012, ha="left", fontsize=10, color=_SOFT, parse_math=False)
    figure.tight_layout(rect=(0, 0, 1, 0.98), w_pad=2.5)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _title(history: History) -> str:
    steps, wanted = len(history.steps), history.steps_wanted
    words = [str(dig(history.config, "model", "path") or "unknown model").rstrip("/").rpartition("/")[2]]
    words.append(f"{steps} steps" if history.finished else f"unfinished, {steps} of {wanted or '?'} steps")
    words.append(f"seed {history.config.get('seed', '?')}")
    text = clean("  ·  ".join(words))
    # The picture's font has the letters of Europe; anything else would be drawn as a box with a warning.
    return "".join(letter if letter.isascii() or letter == "·" else "?" for letter in text)


def _curves(axes: Any, history: History) -> None:
    """Reward (mean, band of one standard deviation) and success of training rollouts; held-out points."""
    _frame(axes, "Training", "training step", "reward and success")
    nan = float("nan")
    steps = [finite(record.get("step")) or 0.0 for record in history.steps]
    mean = [nan if y is None else y for y in history.column("reward_mean")]
    std = [nan if y is None else y for y in history.column("reward_std")]
    success = [nan if y is None else y for y in history.column("success")]
    if steps:
        low = [m - s for m, s in zip(mean, std, strict=True)]
        high = [m + s for m, s in zip(mean, std, strict=True)]
        axes.fill_between(steps, low, high, color=_BLUE, alpha=0.12, linewidth=0, label="reward ± std")
        axes.plot(steps, mean, color=_BLUE, marker="o", markersize=3.5, linewidth=2, label="reward, mean")
        axes.plot(steps, success, color=_GREY, marker="o", markersize=3.5, linewidth=1.6, label="success, training")
    for how, colour, mark, shift in (("greedy", _BLUE, "D", -0.05), ("sampled", _ORANGE, "s", 0.05)):
        known = [
            (step, one)
            for r in history.evals
            if (one := share(r, how)) is not None and (step := finite(r.get("step"))) is not None
        ]
        if known:
            axes.errorbar(
                [step + shift for step, _ in known],  # aside, so that two at one step do not hide each other
                [one.value for _, one in known],
                yerr=_errors([one for _, one in known]),
                fmt=mark,
                color=colour,
                markersize=6,
                markeredgecolor="white",
                capsize=3,
                linewidth=1.4,
                label=f"held-out success, {how}",
                zorder=5,
            )
    if not axes.has_data():
        axes.text(0.5, 0.5, "nothing recorded yet", ha="center", color=_SOFT, transform=axes.transAxes)
        axes.set_xticks([])
        return
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="best")


def _bars(axes: Any, history: History) -> None:
    """Held-out success, greedy and sampled, before and after, with 95% intervals."""
    _frame(axes, "Held-out success", "", "")
    after = history.after
    last = "after" if after is None or history.finished else "so far"
    places: list[float] = []
    names: list[str] = []
    for group, (how, colour) in enumerate((("greedy", _BLUE), ("sampled", _ORANGE))):
        for side, (name, record, shade) in enumerate((("before", history.before, _GREY), (last, after, colour))):
            place = group * 2.4 + side
            places.append(place)
            names.append(f"{how}\n{name}")
            one = share(record, how)
            if one is None:
                axes.text(place, 0.02, "–", ha="center", color=_SOFT)
                continue
            axes.bar(place, one.value, width=0.82, color=shade, alpha=0.9, zorder=2)
            if one.low is not None and one.high is not None:
                axes.errorbar(place, one.value, yerr=_errors([one]), fmt="none", color=_INK, capsize=4, linewidth=1.2)
            top = one.value if one.high is None else one.high
            axes.text(place, top + 0.025, percent(one.value), ha="center", fontsize=11, color=_INK, weight="bold")
    axes.set_xticks(places, names)
    axes.set_xlim(-0.7, 4.1)
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])


def _errors(shares: list[Share]) -> list[list[float]]:
    return [
        [max(one.value - (one.value if one.low is None else one.low), 0.0) for one in shares],
        [max((one.value if one.high is None else one.high) - one.value, 0.0) for one in shares],
    ]


def _frame(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=_INK, weight="bold")
    axes.set_xlabel(x_label, fontsize=9, color=_SOFT)
    axes.set_ylabel(y_label, fontsize=9, color=_SOFT)
    axes.tick_params(labelsize=9, labelcolor=_INK, length=0)
    axes.grid(axis="y", color=_LINE, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
