"""`report.html` and `report.png` of a run, finished or not."""

from __future__ import annotations

import time
from pathlib import Path

from outrider.errors import SetupError
from outrider.protocols import Store
from outrider.reports import sections
from outrider.reports.exchanges import exchanges
from outrider.reports.history import History, read_history, write_atomically
from outrider.reports.markup import esc, paragraph
from outrider.reports.picture import draw_picture
from outrider.reports.tokens import Tokenizer


def write_report(run_dir: Path, store: Store, *, tokenizer: Tokenizer | None = None) -> Path:
    """Write both files into `run_dir` and return the path of the page.

    The page is one file without scripts or assets. `tokenizer` turns ids into one string each; with it replies are
    shown token by token. Without matplotlib the picture is left out, and the page says so. Raises `ConfigError` if
    there is no such folder, `SetupError` if it cannot be written to.
    """
    history = read_history(run_dir)
    note = ""
    try:
        write_atomically(run_dir / "report.png", draw_picture(history))
    except SetupError as error:
        note = str(error)
    return write_atomically(run_dir / "report.html", page(history, store, tokenizer, note).encode("utf-8"))


def page(history: History, store: Store, tokenizer: Tokenizer | None, note: str = "") -> str:
    """The whole page as HTML. `note` is one more sentence for its end."""
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    name = esc(history.path.resolve().name, 80)
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    body = [
        sections.title(history),
        sections.headline(history),
        sections.curves(history),
        exchanges(store, history.success_from, tokenizer),
        sections.step_times(history),
        sections.mismatch(history),
        sections.optimisation(history),
        sections.left_out(history, store.rollouts()),
        sections.settings(history),
        f"<footer>{paragraph(esc(note)) if note else ''}Written by Outrider on {written}.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing a model wrote can run or load, even if escaping had a hole.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{name} – Outrider report</title><style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )
