"""The loss curves of two runs, with the faults marked, and the difference between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = {
    "rank killed": "#d62728",
    "two ranks killed": "#8c1d1d",
    "rank stopped": "#9467bd",
    "exception": "#ff7f0e",
    "agent killed": "#2ca02c",
    "control plane killed": "#1f77b4",
}


class Curves(NamedTuple):
    """Losses by iteration, and (kind, iteration) of each fault. In `reordered` the micro-batches
    are summed in reverse order."""

    ours: Sequence[float]
    twin: Sequence[float]
    reordered: Sequence[float]
    faults: Sequence[tuple[str, int]]


def draw(curves: Curves, title: str, files: Sequence[Path]) -> None:
    """Write the figure; each file's suffix gives the format."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(
        {
            "svg.hashsalt": "unicron",
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 5.2), height_ratios=(2.4, 1), layout="constrained"
    )
    _losses(above, curves)
    _difference(below, curves)
    figure.suptitle(title, fontsize=10)
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _losses(axes: Any, curves: Curves) -> None:
    axes.plot(curves.twin, color="#c9c9c9", linewidth=4, label="undisturbed twin")
    axes.plot(curves.ours, color="#111111", linewidth=0.8, label="through the faults")
    bottom, top = axes.get_ylim()
    for row, (kind, colour) in enumerate(COLOURS.items()):
        at = [iteration for struck, iteration in curves.faults if struck == kind]
        height = bottom - (row + 1) * 0.045 * (top - bottom)
        axes.plot(
            at,
            [height] * len(at),
            "|",
            color=colour,
            markersize=7,
            markeredgewidth=1.4,
            label=f"{kind} ({len(at)})",
        )
    axes.set_ylabel("loss")
    axes.legend(ncols=2, frameon=False, fontsize=8)


def _difference(axes: Any, curves: Curves) -> None:
    """Relative differences from the reference run: of this run, and of another summation order."""
    for losses, colour, width, label in (
        (curves.reordered, "#c9c9c9", 2.0, "twin, micro-batches summed backwards"),
        (curves.ours, "#111111", 0.7, "through the faults"),
    ):
        gaps = [(one - two) / two for one, two in zip(losses, curves.twin, strict=True)]
        axes.plot(gaps, color=colour, linewidth=width, label=label)
    axes.set_ylabel("relative difference")
    axes.set_xlabel("iteration")
    axes.legend(ncols=2, frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.95))
