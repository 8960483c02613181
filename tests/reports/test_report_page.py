from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from fabricate import WORDS, ReadStore, evaluation, fabricate

from outrider.errors import ConfigError
from outrider.reports.exchanges import BROKE, FIXED, STAYED, STILL, Pair, choose, pair_up
from outrider.reports.history import Share, read_history
from outrider.reports.report import write_report
from outrider.reports.sections import change
from outrider.types import Rollout, Task

VOID = {"meta", "br"}
SECTIONS = [
    "Held-out success",
    "Learning curves",
    "Held-out tasks, before and after",
    "Where a step's time goes",
    "Engine against trainer",
    "Optimisation",
    "Left out, failed, tried again",
    "Configuration",
]


class Reader(HTMLParser):
    """Checks that tags nest and collects what a browser would see."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def test_a_finished_run_has_everything(run_dir):
    page = read(write_report(run_dir, fabricate(run_dir), tokenizer=WORDS))
    assert [title for title in SECTIONS if title not in page.text] == []
    for words in ("69%", "91%", "+22.0 points", "+67.5 points", "62.3% – 75.0%", "zero variance group", "step 4"):
        assert words in page.text
    assert "failed before, succeeds after" in page.text
    assert "the reward returned NaN" in page.text
    assert "not finished" not in page.text
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_stands_alone(run_dir):
    html = write_report(run_dir, fabricate(run_dir), tokenizer=None).read_text()
    page = Reader(html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not page.attributes & {"src", "href", "action", "style"}
    assert not re.search(r"https?:|url\(|@import", html)


@pytest.mark.parametrize("tokenizer", [None, WORDS])
def test_hostile_text_stays_text(run_dir, tokenizer):
    html = write_report(run_dir, fabricate(run_dir, hostile=True), tokenizer=tokenizer).read_text()
    page = Reader(html)
    assert "script" not in page.tags
    assert "bold" not in page.tags
    assert not [name for name in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.text or tokenizer  # the tokens of it lie in spans
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", html)
    assert "⟨U+001B⟩" in page.text
    assert "⟨U+202E⟩" in page.text


def test_an_unfinished_run_says_so_and_shows_what_there_is(run_dir):
    page = read(write_report(run_dir, fabricate(run_dir, steps=3, after=False), tokenizer=None))
    assert "This run is not finished: 3 of 8 steps are recorded, and the evaluation after" in page.text
    assert "There is no evaluation after training yet." in page.text
    assert "before training" in page.text
    assert [title for title in SECTIONS if title not in page.text] == []


def test_a_run_without_a_step(run_dir):
    page = read(write_report(run_dir, fabricate(run_dir, steps=0, after=False), tokenizer=None))
    assert "0 of 8 steps are recorded" in page.text
    assert "No step has been trained yet." in page.text
    assert (run_dir / "report.png").exists()


def test_an_evaluation_alone_is_a_finished_run(run_dir):
    page = read(write_report(run_dir, fabricate(run_dir, steps=0, wanted=0), tokenizer=None))
    assert "not finished" not in page.text
    assert "0 of 0 steps" in page.text


def test_an_empty_folder_gives_a_page(run_dir):
    run_dir.mkdir()
    page = read(write_report(run_dir, ReadStore(), tokenizer=None))
    assert "it has not recorded a step or an evaluation yet" in page.text
    assert "config.json is missing." in page.text
    assert "No held-out rollout has a reward yet." in page.text


def test_a_folder_that_is_not_there(run_dir):
    with pytest.raises(ConfigError, match="no such run folder"):
        write_report(run_dir, ReadStore(), tokenizer=None)


def test_steps_that_lack_their_figures(run_dir):
    """A step without rows to learn from records no loss; a line of an older version may lack anything."""
    store = fabricate(run_dir)
    lines = [
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2, "skipped": True, "tokens": 0, "times": {"total": 3.0}, "excluded": {"x": 8}},
        {"kind": "step", "step": 3, "times": None, "excluded": None, "reward_mean": float("inf")},
        {"kind": "eval", "name": "before", "step": None, "greedy": None},
        {"kind": "other"},
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"kind":"st')
    page = read(write_report(run_dir, store, tokenizer=None))
    assert "3 of 8 steps" in page.text
    assert not re.search(r"\b(inf|nan|None)\b", page.text)


def test_the_best_weights_and_the_tokens_left_out_are_told(run_dir):
    store = fabricate(run_dir)
    lines = [
        evaluation("before", 0, 0.1, 0.1, 1.0),
        {"kind": "step", "step": 2, "excluded": {"too_long": 2}, "excluded_tokens": {"too_long": 4321}},
        {**evaluation("step-2", 2, 0.5, 0.5, 2.0), "best": True},
        evaluation("after", 4, 0.4, 0.4, 3.0),
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = read(write_report(run_dir, store, tokenizer=None))
    assert "The best weights so far are those of step 2 (policy version 2)" in page.text
    assert re.search(r"sampled tokens left out\s*too long\s*4,321\s*step 2", page.text)


def test_held_out_tasks_without_a_measurement_are_not_zero_per_cent(run_dir):
    store = fabricate(run_dir)
    empty = evaluation("before", 0, 0.0, 0.0, 1.0, n=1)
    for how in ("greedy", "sampled"):
        empty[how]["n"] = 0
    (run_dir / "metrics.jsonl").write_text(json.dumps(empty) + "\n")
    page = read(write_report(run_dir, store, tokenizer=None))
    assert "Nothing has been measured on held-out tasks." in page.text


def test_a_tokenizer_that_does_not_fit_hides_nothing(run_dir):
    store = fabricate(run_dir)

    def broken(ids):
        raise KeyError(ids)

    with_broken = write_report(run_dir, store, tokenizer=broken).read_text()
    assert "right tool, arguments and answer" in with_broken
    assert "The answer is" in with_broken


def test_without_matplotlib_the_page_says_why_there_is_no_picture(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = read(write_report(run_dir, fabricate(run_dir), tokenizer=None))
    assert "report.png needs matplotlib" in page.text
    assert not (run_dir / "report.png").exists()


def test_odd_names_do_not_break_the_picture(run_dir):
    store = fabricate(run_dir)
    config = json.loads((run_dir / "config.json").read_text())
    config["model"]["path"] = "/models/$x^{模型}\x1b"
    (run_dir / "config.json").write_text(json.dumps(config))
    write_report(run_dir, store, tokenizer=None)
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_the_same_each_time(run_dir):
    store = fabricate(run_dir)
    pages = {re.sub("Written by.*", "", write_report(run_dir, store, tokenizer=WORDS).read_text()) for _ in range(2)}
    assert len(pages) == 1


def rollout(task_id, reward, rollout_id="", step=0):
    return Rollout(
        id=rollout_id or f"r-{task_id}", task=Task(id=task_id, fields={}), group_id="g", reward=reward, step=step
    )


def test_pairs_by_task_with_their_outcome():
    before = [rollout("a", 0.0), rollout("b", 0.4), rollout("c", 1.0), rollout("d", 1.0), rollout("e", None)]
    after = [rollout("d", 1.0), rollout("c", 0.9), rollout("b", 0.2), rollout("a", 1.0), rollout("e", 1.0)]
    outcomes = [(pair.task_id, pair.outcome) for pair in pair_up(before, after, 1.0)]
    assert outcomes == [("a", FIXED), ("b", STILL), ("c", BROKE), ("d", STAYED)]


def test_of_two_evaluations_after_the_newest_counts():
    after = [rollout("a", 0.0, "after-0004-a", step=4), rollout("a", 1.0, "after-0008-a", step=8)]
    assert pair_up([rollout("a", 0.0)], after, 1.0)[0].outcome == FIXED


@pytest.mark.parametrize(
    ("outcomes", "chosen"),
    [
        ([STAYED, FIXED, FIXED, STILL, FIXED], [1, 2, 3]),
        ([FIXED, FIXED, FIXED, FIXED], [0, 1, 2]),
        ([STILL, STILL, BROKE, STAYED], [0, 2, 3]),
        ([STILL, STILL, STILL, STILL], [0, 1, 2]),
        ([STAYED], [0]),
        ([], []),
    ],
)
def test_three_tasks_are_chosen(outcomes, chosen):
    pairs = [Pair(task_id=str(i), before=rollout(str(i), 0.0), after=None, outcome=o) for i, o in enumerate(outcomes)]
    assert [int(pair.task_id) for pair in choose(pairs)] == chosen


def test_the_interval_of_a_change():
    """Newcombe (1998), table II, example (a): 56/70 against 48/80, method 10: 0.0524 to 0.3339."""
    first = Share(value=48 / 80, n=80, tasks=80, low=0.4905, high=0.7003)
    last = Share(value=56 / 70, n=70, tasks=70, low=0.6918, high=0.8771)
    assert change(first, last) == "+20.0 (+5.2 to +33.4)"
    assert change(last, first) == "−20.0 (−33.4 to −5.2)"
    assert change(None, last) == "–"


def test_history_of_a_fabricated_run_has_the_keys_the_report_reads(run_dir):
    fabricate(run_dir)
    assert read_history(run_dir).success_from == 1.0
    assert read_history(run_dir).steps_wanted == 8


def test_importing_the_reports_loads_neither_matplotlib_nor_torch():
    code = (
        "import sys, outrider.reports.report, outrider.reports.live, outrider.reports.doctor, outrider.reports.inspect;"
        "assert not {'matplotlib', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_charts_of_the_critic_and_the_correction_are_there_where_they_are_used(run_dir):
    store = fabricate(run_dir)
    plain = read(write_report(run_dir, store, tokenizer=None)).text
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {"weight_mean": 1.0, "weight_max": 3.0, "kl": 0.01, "effective": 0.9, "masked": 0.1}
    more = {"mismatch": found, "value_loss": 0.5, "value_explained_variance": 0.25}
    lines = [line | more if line["kind"] == "step" else line for line in lines]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    full = read(write_report(run_dir, store, tokenizer=None)).text
    titles = ("mean weight", "largest weight", "effective sample size", "masked", "value loss", "critic explains")
    assert [title for title in titles if title in plain] == []
    assert [title for title in titles if title not in full] == []
