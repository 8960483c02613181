"""The parts of report.html that come from the run's figures. Each takes a `History` and gives HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from outrider import config as configuration
from outrider.reports import charts
from outrider.reports.charts import Measured, Series
from outrider.reports.history import History, Share, counters, dig, share
from outrider.reports.markup import card, esc, folded, paragraph, section, table
from outrider.reports.text import aligned_percent, duration, finite, gigabytes, number, percent
from outrider.sections import fields
from outrider.types import Rollout, RolloutState

HOWS = (("greedy", "greedy", 1), ("sampled", "sampled, T = 1", 2))
STEP_PARTS = (
    ("rollouts", "rollouts", 1),
    ("samples", "samples", 5),
    ("forward_backward", "forward and backward", 2),
    ("publish", "publish", 4),
    ("rest", "the rest", 6),
)


class Small(NamedTuple):
    """One small chart: a key of the step records, dots lead into nested objects; its title, and what it means."""

    key: str
    title: str
    meaning: str


MISMATCH = (
    Small("logprob_diff_mean", "mean |difference|, nats", "Mean absolute difference over trained tokens."),
    Small("logprob_diff_max", "largest |difference|, nats", "Largest absolute difference of a step."),
)
CORRECTION = (
    Small("mismatch.weight_mean", "mean weight", "Mean of w = old / behaviour probability, before anything is cut."),
    Small("mismatch.weight_max", "largest weight", "Largest w of a step."),
    Small("mismatch.kl", "KL(behaviour || old)", "k3 estimate, nats a token."),
    Small("mismatch.effective", "effective sample size", "Over the number of tokens: 1 where all w are equal."),
    Small("mismatch.masked", "masked", "Share of trained tokens that a mask took out."),
)
OPTIMISATION = (
    Small("loss", "loss", "The policy loss that was minimised."),
    Small("grad_norm", "gradient norm", "Before clipping."),
    Small("entropy", "entropy, nats", "Mean over trained tokens; a collapse towards 0 ends exploration."),
    Small("kl_behaviour", "KL to behaviour", "KL(behaviour || current), k3 estimate, nats a token."),
    Small("kl_reference", "KL to the start", "KL to the starting model, nats a token."),
    Small("ratio_mean", "mean ratio", "Mean of new over old probability; near 1 on policy."),
    Small("clip_fraction", "clipped", "Share of trained tokens whose ratio was clipped."),
    Small("value_loss", "value loss", "Of the critic, before value_coef."),
    Small("value_explained_variance", "critic explains", "1 - var(returns - values) / var(returns); 1 is perfect."),
    Small("lr", "learning rate", "After warm-up."),
    Small("tokens", "trained tokens", "Tokens with a loss, a step."),
    Small("tokens_per_s", "sampled tokens/s", "Per second of rollout time."),
    Small("groups_trained", "groups trained", "Groups with an advantage that is not 0."),
)


def title(history: History) -> str:
    model = esc(str(dig(history.config, "model", "path") or history.summary.get("model") or "unknown model"), 120)
    steps, wanted = len(history.steps), history.steps_wanted
    counted = f"{steps} of {wanted} steps" if wanted is not None else f"{steps} steps"
    walls = [finite(record.get("wall_s")) for record in (*history.steps, *history.evals)]
    wall = finite(history.summary.get("wall_s")) or max((w for w in walls if w is not None), default=None)
    peaks = [finite(record.get("peak_rss_bytes")) for record in (*history.steps, *history.evals)]
    peak = finite(history.summary.get("peak_rss_bytes")) or max((p for p in peaks if p is not None), default=None)
    facts = [f"model <code>{model}</code>", counted, f"seed {number(history.config.get('seed'))}"]
    if wall:
        facts.append(f"{duration(wall)} of wall time")
    if peak:
        facts.append(f"{gigabytes(peak)} of memory at the peak")
    lines = [f"<h1>{esc(history.path.resolve().name, 120)}</h1>", paragraph(" · ".join(facts), "soft")]
    if not history.finished:
        lines.append(paragraph(_unfinished(history), "note"))
    lines += [paragraph(esc(problem), "note") for problem in history.problems]
    return "<header>" + "".join(lines) + "</header>"


def _unfinished(history: History) -> str:
    if not history.steps and not history.evals:
        return "This run is not finished: it has not recorded a step or an evaluation yet."
    missing = []
    if history.steps_wanted is not None and len(history.steps) < history.steps_wanted:
        missing.append(f"{len(history.steps)} of {history.steps_wanted} steps are recorded")
    if history.evaluation("before") is None:
        missing.append("the evaluation before is missing")
    missing.append("the evaluation after the last step is missing")
    return f"This run is not finished: {', and '.join(missing)}."


def headline(history: History) -> str:
    """Two cards, greedy and sampled, and the table with the changes."""
    after = history.after
    cards, rows = [], []
    for how, words, colour in HOWS:
        first, last = share(history.before, how), share(after, how)
        if first is None and last is None:
            continue
        cards.append(_headline_card(words, colour, first, last))
        rows.append([words, *_cells(first), *_cells(last), change(first, last)])
    if not cards:
        return section("Held-out success", paragraph("Nothing has been measured on held-out tasks.", "none"))
    name = "after" if after is None or history.finished else f"so far ({after.get('name', 'after')})"
    head = ["", "before", "95% interval", "on", esc(name), "95% interval", "on", "change, 95% interval"]
    note = "" if after is not None else paragraph("There is no evaluation after training yet.", "soft")
    best = [record for record in history.evals if record.get("best")]
    if best:
        place = f"step {number(best[-1].get('step'))} (policy version {number(best[-1].get('policy_version'))})"
        note += paragraph(f"The best weights so far are those of {place}; they lie in the folder best.", "soft")
    figures = table(head, rows, numeric=range(1, 8))
    return section("Held-out success", f'<div class="grid2">{"".join(cards)}</div>', note, "<br>", figures)


def _headline_card(words: str, colour: int, first: Share | None, last: Share | None) -> str:
    gain = ""
    if first is not None and last is not None:
        points = f"{100 * (last.value - first.value):+.1f} points".replace("-", "−")
        gain = f'<span class="gain {"good" if last.value >= first.value else "bad"}">{points}</span>'
    ends = ' <span class="arrow">→</span> '.join(percent(one.value if one else None) for one in (first, last))
    measures = [
        Measured(name=name, value=one.value, low=one.low, high=one.high, colour=shade)
        for name, one, shade in (("before", first, 3), ("after", last, colour))
        if one is not None
    ]
    chart = charts.track(measures, label=f"Held-out success, {words}, before and after")
    return card(f"<h3>{words}</h3>", f'<div class="big">{ends}{gain}</div>', chart)


def _cells(one: Share | None) -> list[str]:
    if one is None:
        return ["–", "–", "–"]
    return [aligned_percent(one.value), f"{aligned_percent(one.low)} – {aligned_percent(one.high)}", one.base]


def change(first: Share | None, last: Share | None) -> str:
    """The difference in points. Its interval joins the two intervals (Newcombe 1998, method 10, as if unpaired)."""
    if first is None or last is None:
        return "–"
    points = last.value - first.value
    text = f"{100 * points:+.1f}"
    if None not in (first.low, first.high, last.low, last.high):
        down = math.hypot(last.value - (last.low or 0.0), (first.high or 0.0) - first.value)
        up = math.hypot((last.high or 0.0) - last.value, first.value - (first.low or 0.0))
        text += f" ({100 * (points - down):+.1f} to {100 * (points + up):+.1f})"
    return text.replace("-", "−")


def curves(history: History) -> str:
    xs = _xs(history)
    mean, std = history.column("reward_mean"), history.column("reward_std")
    low = [None if m is None or s is None else m - s for m, s in zip(mean, std, strict=True)]
    high = [None if m is None or s is None else m + s for m, s in zip(mean, std, strict=True)]
    reward = Series(name="reward", xs=xs, ys=mean, low=low, high=high, colour=1)
    success = [Series(name="training rollouts", xs=xs, ys=history.column("success"), colour=3)]
    for how, words, colour in HOWS:
        points = [(finite(r.get("step")), share(r, how)) for r in history.evals]
        known = [(step, one) for step, one in points if step is not None and one is not None]
        if known:
            success.append(
                Series(
                    name=f"held-out, {words}",
                    xs=[step for step, _ in known],
                    ys=[one.value for _, one in known],
                    low=[one.low for _, one in known],
                    high=[one.high for _, one in known],
                    colour=colour,
                    points=True,
                    shift=-4.0 if how == "greedy" else 4.0,
                )
            )
    left = card(
        "<h3>Reward of training rollouts, by step</h3>",
        charts.legend([("mean ± standard deviation", 1)]),
        charts.plot([reward], label="Reward by step"),
    )
    right = card(
        "<h3>Success, by step</h3>",
        charts.legend([(one.name, one.colour) for one in success]),
        charts.plot(success, label="Success by step", y_range=(-0.04, 1.04), words=percent),
    )
    return section("Learning curves", f'<div class="grid2">{left}{right}</div>')


def step_times(history: History) -> str:
    xs = _xs(history)
    parts = [Series(name=words, xs=xs, ys=history.column("times", key), colour=c) for key, words, c in STEP_PARTS]
    sums = [sum(y for y in part.ys if y is not None) for part in parts]
    whole = sum(sums)
    names = [
        (f"{p.name} {percent(s / whole)}" if whole else p.name, p.colour) for p, s in zip(parts, sums, strict=True)
    ]
    totals = [total for total in history.column("times", "total") if total is not None]
    mean = f"{duration(sum(totals) / len(totals))} a step on average." if totals else ""
    chart = charts.stacked(xs, parts, label="Seconds of each step by part")
    return section("Where a step's time goes", card(charts.legend(names), chart), paragraph(mean, "soft"))


def mismatch(history: History) -> str:
    words = (
        "Absolute difference between the log-probs the engine sampled with and the trainer's recomputation of the "
        "same tokens, before the step's update. It should stay small and flat: a jump means that engine and trainer no "
        "longer hold the same weights."
    )
    parts = [paragraph(words, "soft"), _multiples(history, MISMATCH, "grid2", 520)]
    known = _known(history, CORRECTION)
    if known:
        parts += [paragraph("What the correction found between the two:", "soft")]
        parts += [_multiples(history, known, "grid4", 260)]
    return section("Engine against trainer", *parts)


def optimisation(history: History) -> str:
    known = _known(history, OPTIMISATION)
    if not known:
        return section("Optimisation", paragraph("No step has been trained yet.", "none"))
    return section("Optimisation", _multiples(history, known, "grid4", 260))


def _known(history: History, smalls: Sequence[Small]) -> list[Small]:
    """Those that some step has a number for."""
    return [small for small in smalls if any(y is not None for y in history.column(*small.key.split(".")))]


def _multiples(history: History, smalls: Sequence[Small], grid: str, width: int) -> str:
    xs = _xs(history)
    cards = []
    for small in smalls:
        ys = history.column(*small.key.split("."))
        last = next((y for y in reversed(ys) if y is not None), None)
        head = f'<h3 title="{esc(small.meaning)}">{esc(small.title)}<span class="last">{number(last)}</span></h3>'
        chart = charts.plot([Series(name=small.title, xs=xs, ys=ys)], label=small.title, width=width, height=140)
        cards.append(card(head, chart))
    return f'<div class="{grid}">{"".join(cards)}</div>'


def left_out(history: History, rollouts: Sequence[Rollout]) -> str:
    """Everything that was excluded, failed or was tried again, with its reason."""
    rows = []
    kinds = (
        ("excluded", "left out of training"),
        ("excluded_tokens", "sampled tokens left out"),
        ("failures", "failed attempt"),
    )
    for key, what in kinds:
        records = [*history.steps, *history.evals]
        for reason, count in history.counts(key).most_common():
            where = [_where(record) for record in records if reason in counters(record, key)]
            rows.append([what, esc(reason.replace("_", " "), 200), number(count), esc(_shortened(where))])
    unscored: Counter[tuple[str, str, str]] = Counter()
    for rollout in rollouts:
        if rollout.state in (RolloutState.FAILED, RolloutState.CANCELLED):
            reason = f"{rollout.failure.value.replace('_', ' ')}: {rollout.reason}".removesuffix(": ")
            unscored[f"rollout {rollout.state.value} without reward", reason, rollout.split] += 1
    rows += [[what, esc(why, 200), number(n), esc(where)] for (what, why, where), n in unscored.most_common(40)]
    if len(unscored) > 40:
        rows.append(["further kinds of rollouts without reward", "", number(sum(unscored.values())), "in all"])
    retried = [rollout for rollout in rollouts if rollout.attempt > 1]
    if retried:
        more = sum(rollout.attempt - 1 for rollout in retried)
        rows.append(["tried again", "attempts after the first", number(more), f"in {len(retried):,} rollout(s)"])
    open_ = Counter(rollout.state.value for rollout in rollouts if not rollout.state.ended)
    rows += [["not ended", f"rollout {state}", number(count), ""] for state, count in open_.items()]
    words = (
        f"{len(rollouts):,} rollouts are in the store, {sum(r.reward is not None for r in rollouts):,} with a reward."
    )
    if not rows:
        return section("Left out, failed, tried again", paragraph(f"Nothing. {words}", "soft"))
    figures = table(["what", "reason", "count", "where"], rows, numeric=[2])
    return section("Left out, failed, tried again", figures, "<br>", paragraph(words, "soft"))


def _where(record: dict[str, Any]) -> str:
    return f"step {number(record.get('step'))}" if record.get("kind") == "step" else f"evaluation {record.get('name')}"


def _shortened(places: Sequence[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def settings(history: History) -> str:
    """Every key of the configuration; those that differ from the default stand out."""
    if not history.config:
        return section("Configuration", paragraph("config.json could not be read.", "none"))
    known = {name: (meaning, default) for name, meaning, default in _documented(configuration.RunConfig, "")}
    rows = []
    for name, value in _flat(history.config, ""):
        meaning, default = known.get(name, ("", msgspec.NODEFAULT))
        shown = f"<code>{esc(value, 500)}</code>"
        is_default = default is not msgspec.NODEFAULT and msgspec.to_builtins(default) == value
        rows.append([f"<code>{esc(name)}</code>", shown if is_default else f"<b>{shown}</b>", esc(meaning)])
    words = paragraph("Bold values differ from the default.", "soft")
    return section("Configuration", folded(f"{len(rows)} keys", words, table(["key", "value", "meaning"], rows)))


def _flat(tree: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def _documented(kind: type[msgspec.Struct], where: str) -> Iterator[tuple[str, str, Any]]:
    for name, type_, meta, default in fields(kind):
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
            yield from _documented(type_, f"{where}{name}.")
        else:
            yield f"{where}{name}", meta.description or "", default


def _xs(history: History) -> list[float]:
    return [finite(record.get("step")) or 0.0 for record in history.steps]
