"""Draws the demo's recorded output, as README has it, as a moving picture: run by `make docs`.

Every line appears at the moment at which it was printed, SPEED times faster; the last picture
stays. Plain SVG, no font and no script from elsewhere.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

SPEED_TIMES = 6.0
LINE_PX, COLUMN_PX, MARGIN_PX = 17, 7.83, 16
COLUMNS = 100
BEGIN, END = "<!-- demo output -->\n```\n", "```\n<!-- end of demo output -->"
COLOURS = {"FAULT": "#ff7b72", "BROKEN": "#ff7b72", "RETURN": "#7ee787",
           "SUBMIT": "#79c0ff", "FINISH": "#7ee787", "CANCEL": "#d2a8ff",
           "plan": "#79c0ff", "replay": "#7ee787", "total": "#ffffff"}
STYLE = ("text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
         "fill:#c9d1d9;white-space:pre}"
         "@media(prefers-reduced-motion:no-preference){"
         "text{opacity:0;animation:a .1s linear forwards}}"
         "@keyframes a{to{opacity:1}}")


def render(readme: str) -> str:
    """The picture of what stands between README's marks."""
    lines = readme.partition(BEGIN)[2].partition(END)[0].splitlines()
    lines = ["$ make demo", *lines]
    height = 2 * MARGIN_PX + LINE_PX * len(lines)
    width = round(2 * MARGIN_PX + COLUMN_PX * max(COLUMNS, *map(len, lines)))
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" '
             f'viewBox="0 0 {width} {height}" '
             f'width="{width}" height="{height}" role="img" aria-label="A run of make demo">',
             f"<style>{STYLE}</style>",
             f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>']
    at_s = 0.0
    for number, line in enumerate(lines):
        told = re.match(r" *(\d+\.\d) s +(\w*)", line)
        at_s = float(told[1]) if told else at_s
        colour = COLOURS.get(told[2], "") if told else ""
        fill = f";fill:{colour}" if colour else ""
        y = MARGIN_PX + LINE_PX * (number + 0.75)
        parts.append(f'<text x="{MARGIN_PX}" y="{y:g}" '
                     f'style="animation-delay:{at_s / SPEED_TIMES:.2f}s{fill}">'
                     f"{html.escape(line)}</text>")
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    text = (root.parent / "README.md").read_text(encoding="utf-8")
    (root / "demo.svg").write_text(render(text), encoding="utf-8")
