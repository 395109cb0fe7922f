"""The fault matrix as text: a row per point, a column per fault or variant."""

from __future__ import annotations

from collections.abc import Sequence

from matrix.cells import FAULTS, POINTS, VARIANTS
from matrix.trial import Verdict

BLANK = "."
GAP = "  "


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Two tables by point: all faults on its home variant (`Point.home`), and SIGKILL on all
    variants. Then the reasons."""
    marks: dict[str, str] = {}
    words = {(one.cell.point.name, one.cell.fault, one.cell.variant.name): _word(one, marks)
             for one in verdicts}
    points = [point for point in POINTS if any(place[0] == point.name for place in words)]
    faults = [["", *FAULTS]]
    variants = [[f"{FAULTS[0]} of", *(variant.name for variant in VARIANTS)]]
    for point in points:
        home = point.home
        faults.append([point.name, *(words.get((point.name, fault, home), BLANK)
                                     for fault in FAULTS)])
        variants.append([point.name, *(words.get((point.name, FAULTS[0], variant.name), BLANK)
                                       for variant in VARIANTS)])
    reasons = [f"{mark}  {why}" for why, mark in marks.items()]
    return [*_columns(faults), "", *_columns(variants), "", *reasons]


def _word(verdict: Verdict, marks: dict[str, str]) -> str:
    """The outcome, and the mark of its reason."""
    if not verdict.why:
        return verdict.outcome
    mark = marks.setdefault(verdict.why, f"[{len(marks) + 1}]")
    return f"{verdict.outcome} {mark}"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [GAP.join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
            for row in rows]
