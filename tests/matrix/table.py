"""The fault matrix as text or Markdown: a row per point, a column per fault or variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matrix.cells import FAULTS, LOOP_FAULTS, LOOPS, POINTS, VARIANTS, Cell, cells, loop_cells
from matrix.hang_cells import LAYOUTS, PLACES, HangCell, hang_cells
from matrix.hang_trial import HangVerdict
from matrix.trial import Verdict
from unicron.events.spec.parallelism import num_positions

BLANK = "."
GAP = "  "
MARKS = {"equal": "=", "not equal": "**not equal**"}


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Two tables by point: all faults on its home variant (`Point.home`), and SIGKILL on all
    variants. One of custom loops. Then the reasons."""
    marks: dict[str, str] = {}
    words = {
        (one.cell.point.name, one.cell.fault, one.cell.variant.name): _word(one, marks)
        for one in verdicts
    }
    trains = {place[0] for place in words if place[2] in {variant.name for variant in VARIANTS}}
    points = [point for point in POINTS if point.name in trains]
    faults = [["", *FAULTS]]
    variants = [[f"{FAULTS[0]} of", *(variant.name for variant in VARIANTS)]]
    for point in points:
        home = point.home
        faults.append(
            [point.name, *(words.get((point.name, fault, home), BLANK) for fault in FAULTS)]
        )
        variants.append(
            [
                point.name,
                *(words.get((point.name, FAULTS[0], variant.name), BLANK) for variant in VARIANTS),
            ]
        )
    loops = [["", "", *LOOP_FAULTS]]
    for variant in LOOPS:
        for name in variant.points:
            found = [words.get((name, fault, variant.name), BLANK) for fault in LOOP_FAULTS]
            if found != [BLANK] * len(LOOP_FAULTS):
                loops.append([variant.name, name, *found])
    reasons = [f"{mark}  {why}" for why, mark in marks.items()]
    tables = [rows for rows in (faults, variants, loops) if len(rows) > 1]
    return [*(line for rows in tables for line in (*_columns(rows), "")), *reasons]


def _word(verdict: Verdict, marks: dict[str, str]) -> str:
    """The outcome, and the mark of its reason."""
    if not verdict.why:
        return verdict.outcome
    mark = marks.setdefault(verdict.why, f"[{len(marks) + 1}]")
    return f"{verdict.outcome} {mark}"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        GAP.join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def markdown(outcomes: Mapping[str, str]) -> str:
    """The whole matrix by the outcome of each cell (its name -> the outcome): all faults on the
    home variant of each point, then SIGKILL on all variants, by the number of their ranks."""
    there = {(cell.point.name, cell.fault, cell.variant.name): cell for cell in cells()}
    points = [point for point in POINTS if not point.absent]

    def drawn(head: Sequence[str], columns: Sequence[tuple[str, str]]) -> str:
        rows = [head, ["---"] * len(head)]
        for point in points:
            cell_of = [
                there.get((point.name, fault, variant or point.home)) for fault, variant in columns
            ]
            rows.append([point.name, *(_mark(cell, outcomes) for cell in cell_of)])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    parts = [
        "Every fault, on the base or on the first variant that has the point:",
        drawn(["point", *FAULTS], [(fault, "") for fault in FAULTS]),
    ]
    titles = {
        "of data-parallel ranks": lambda variant: variant.is_plain,
        "of layouts of up to four ranks": lambda variant: (
            not variant.is_plain and num_positions(variant.axes) <= 4
        ),
        "of layouts of eight ranks": lambda variant: num_positions(variant.axes) > 4,
    }
    for title, has in titles.items():
        names = [variant.name for variant in VARIANTS if has(variant)]
        parts += [
            f"{FAULTS[0]} of one rank, {title}:",
            drawn(["point", *names], [(FAULTS[0], name) for name in names]),
        ]
    return "\n\n".join(parts)


def markdown_of_loops(outcomes: Mapping[str, str]) -> str:
    """The custom loops by the outcome of each cell: a row for each loop and point."""
    there = {(cell.variant.name, cell.point.name, cell.fault): cell for cell in loop_cells()}
    rows = [["loop", "point", *LOOP_FAULTS], ["---"] * (2 + len(LOOP_FAULTS))]
    rows += [
        [
            variant.name.removeprefix("loop: "),
            name,
            *(_mark(there[variant.name, name, fault], outcomes) for fault in LOOP_FAULTS),
        ]
        for variant in LOOPS
        for name in variant.points
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def hang_table(verdicts: Sequence[HangVerdict]) -> list[str]:
    """A row for each cell, with the reasons of those that were not run or are not equal."""
    rows = [["place", "fault", "engine and layout", "outcome", "acted upon after, s"]]
    for one in verdicts:
        cell = one.cell
        acted = f"{one.acted_s:.1f}" if one.acted_s else ""
        rows.append([cell.point.name, cell.fault, cell.variant.name, one.outcome, acted])
    reasons = [f"{one.cell.name}: {one.why}" for one in verdicts if one.why]
    return [*_columns(rows), "", *reasons]


def markdown_of_hangs(outcomes: Mapping[str, str]) -> str:
    """The hang rows of `train:`, places by layouts, with the fault of each; then those of the loop
    and of Megatron-LM."""
    there = {(cell.engine, cell.point.name, cell.layout.name): cell for cell in hang_cells()}
    parts: list[str] = []
    for engine in dict.fromkeys(cell.engine for cell in hang_cells()):
        rows = [["place", *(layout.name for layout in LAYOUTS)], ["---"] * (len(LAYOUTS) + 1)]
        for place in PLACES:
            found = [there.get((engine, place.name, layout.name)) for layout in LAYOUTS]
            if any(cell is not None and not cell.absent for cell in found):
                rows.append([place.name, *(_hang_mark(cell, outcomes) for cell in found)])
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts += [f"{ENGINES[engine]}:", lines]
    return "\n\n".join(parts)


ENGINES = {"train": "`train:`", "loop": "A loop", "Megatron-LM": "Megatron-LM's launcher"}


def _hang_mark(cell: HangCell | None, outcomes: Mapping[str, str]) -> str:
    if cell is None or cell.absent:
        return ""
    outcome = outcomes.get(cell.name, "")
    return f"{MARKS.get(outcome, outcome or '?')} {cell.fault.removeprefix('hang: ')}"


def _mark(cell: Cell | None, outcomes: Mapping[str, str]) -> str:
    """The mark of a cell; empty if the variant has no such point."""
    return "" if cell is None or cell.absent else MARKS.get(outcomes.get(cell.name, ""), "?")
