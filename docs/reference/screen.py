"""Draws the demo's recorded output, from docs/guides/demo.md, as an animation: run by `make docs`.

Every line appears at the moment at which it was printed, SPEED_TIMES faster; the last picture
stays. Plain SVG, no font and no script from elsewhere. `screen.py FILE` first puts the output of
`make demo > FILE` into the page, with the commit and the day.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

SPEED_TIMES = 6.0
LINE_PX, COLUMN_PX, MARGIN_PX = 17, 7.83, 16
COLUMNS = 100
BEGIN, END = "<!-- demo output -->\n```\n", "```\n<!-- end of demo output -->"
COLOURS = {
    "FAULT": "#ff7b72",
    "BROKEN": "#ff7b72",
    "RETURN": "#7ee787",
    "SUBMIT": "#79c0ff",
    "FINISH": "#7ee787",
    "CANCEL": "#d2a8ff",
    "plan": "#79c0ff",
    "replay": "#7ee787",
    "total": "#ffffff",
}
STYLE = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "fill:#c9d1d9;white-space:pre}"
    "@media(prefers-reduced-motion:no-preference){"
    "text{opacity:0;animation:a .1s linear forwards}}"
    "@keyframes a{to{opacity:1}}"
)


def render(page: str) -> str:
    """The picture of the output between the page's marks."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    lines = ["$ make demo", *lines]
    height = 2 * MARGIN_PX + LINE_PX * len(lines)
    width = round(2 * MARGIN_PX + COLUMN_PX * max(COLUMNS, *map(len, lines)))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" '
        f'viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="A run of make demo">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
    ]
    at_s = 0.0
    for number, line in enumerate(lines):
        label = re.match(r" *(\d+\.\d) s +(\w*)", line)
        at_s = float(label[1]) if label else at_s
        colour = COLOURS.get(label[2], "") if label else ""
        fill = f";fill:{colour}" if colour else ""
        y = MARGIN_PX + LINE_PX * (number + 0.75)
        parts.append(
            f'<text x="{MARGIN_PX}" y="{y:g}" '
            f'style="animation-delay:{at_s / SPEED_TIMES:.2f}s{fill}">'
            f"{html.escape(line)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def record(page: str, output: str, commit: str, day: str) -> str:
    """The page with another run's output between its marks, and when and of what that was."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    before = re.sub(
        r"What one run printed.*",
        f"What one run printed ({day}, commit {commit}); your times will differ.",
        before,
    )
    return f"{before}{BEGIN}{output}{END}{after}"


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    guide = root / "guides/demo.md"
    text = guide.read_text(encoding="utf-8")
    if sys.argv[1:]:
        ran = Path(sys.argv[1])
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        text = record(
            text,
            ran.read_text(encoding="utf-8"),
            head,
            f"{datetime.fromtimestamp(ran.stat().st_mtime, UTC):%Y-%m-%d}",
        )
        guide.write_text(text, encoding="utf-8")
    (root / "demo.svg").write_text(render(text), encoding="utf-8")
