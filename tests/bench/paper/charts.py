"""Charts, drawn by matplotlib: the same data gives the same SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unicron.events.errors import UsageError
from unicron.events.words import install

INK, MUTED, GRID = "#1c2733", "#8593a1", "#e3e8ed"
OURS_COLOUR = "#0b7a75"
COLOURS = ("#d1495b", "#edae49", "#30638e", "#8d6a9f", "#5c7f3a", "#a65e2e", "#6b7a8f", "#c06c84")
DPI_NUM = 150


class Picture(NamedTuple):
    """A chart. `draw` receives an empty matplotlib figure; sizes are in inches."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any], None]
    width: float = 9.6
    height: float = 4.2


def svg(picture: Picture, folder: Path) -> str:
    """The chart as an SVG element, written to `folder` as SVG and PNG. Raises UsageError."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        context: Any = vars(mpl)["rc_context"]  # its type is only partly known
    except ImportError:
        raise UsageError(
            "charts are drawn by matplotlib, which is not installed",
            f"{install('draw')}, or leave out --report",
        ) from None
    with context(
        {  # no date in the SVG; its ids follow from its name
            "svg.hashsalt": picture.name,
            "svg.fonttype": "none",
            "font.size": 9,
            "font.family": "DejaVu Sans",
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": MUTED,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": GRID,
            "axes.axisbelow": True,
            "legend.frameon": False,
        }
    ):
        figure: Any = Figure(figsize=(picture.width, picture.height), layout="constrained")
        picture.draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        (folder / f"{picture.name}.svg").write_text(text.getvalue(), encoding="utf-8")
        figure.savefig(folder / f"{picture.name}.png", dpi=DPI_NUM)
    body = text.getvalue()
    body = body[body.index("<svg") :]
    # Ids must differ between the charts of a page.
    body = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{picture.name}-", body)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', body, count=1)
