"""The HTML page of the report: cards with charts and tables, without external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.paper.charts import Picture, svg

STYLE = """
:root { --ink: #1c2733; --soft: #5b6875; --line: #dfe5ea; --ground: #f4f6f8; --card: #ffffff;
  --ours: #0b7a75; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 20px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 20px; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 78ch; }
p.lead { color: var(--soft); font-size: 16px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 22px 24px; margin: 22px 0; overflow-x: auto; }
.caption { color: var(--soft); font-size: 14px; }
svg { width: 100%; height: auto; display: block; margin-top: 10px; }
table { border-collapse: collapse; font-size: 13px; margin-top: 12px; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 7px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
tr.ours td { font-weight: 600; color: var(--ours); }
footer { color: var(--soft); font-size: 13px; }
"""


def page(title: str, lead: str, body: Sequence[str], foot: str) -> str:
    """A whole page. `body` is HTML; the rest is text."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(lead)}</p>',
            *body,
            f"<footer>{escape(foot)}</footer>",
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def section(title: str, caption: str, *parts: str) -> str:
    """A card with a title. `parts` are HTML."""
    return (
        f'<section><h2>{escape(title)}</h2><p class="caption">{escape(caption)}</p>'
        f"{''.join(parts)}</section>"
    )


def pictured(picture: Picture, folder: Path, *parts: str) -> str:
    """A card with a chart, and below it more HTML."""
    return section(picture.title, picture.caption, svg(picture, folder), *parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], ours: str = "") -> str:
    """A table; cells are text. The row that begins with `ours` is highlighted."""
    lines = ["<table><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr>"]
    for row in rows:
        lines.append('<tr class="ours">' if ours and row[0] == ours else "<tr>")
        lines += [*(f"<td>{escape(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</table>"])
