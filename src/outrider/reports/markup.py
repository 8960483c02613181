"""Small pieces of HTML. Everything that is not ours goes through `esc`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from outrider.reports.text import clean


def esc(text: object, limit: int = 0) -> str:
    """`text` as HTML: escaped, and without control or reordering characters. A `limit` cuts, and says so."""
    return escape(clean(str(text), limit))


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{text}</p>' if kind else f"<p>{text}</p>"


def card(*parts: str) -> str:
    return f'<div class="card">{"".join(parts)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Cells are HTML. Columns in `numeric` are set to the right."""

    def cell(tag: str, column: int, content: str) -> str:
        return f'<{tag} class="n">{content}</{tag}>' if column in numeric else f"<{tag}>{content}</{tag}>"

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, i, content) for i, content in enumerate(cells))}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="scroll"><table><thead>{row("th", head)}</thead><tbody>{body}</tbody></table></div>'


def folded(summary: str, *parts: str) -> str:
    return f"<details><summary>{summary}</summary>{''.join(parts)}</details>"


def pill(text: str, kind: str) -> str:
    """`kind`: good, bad or plain."""
    return f'<span class="pill {kind}">{text}</span>'
