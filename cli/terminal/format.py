"""Formats values as text: times, sizes, rates, counts, layouts."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...events.words import *  # noqa: F403
from ...events.words import UNBROKEN

Plain = dict[str, Any]
"""A JSON object: a record, a response of the control plane, or `-o json`."""
BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS_MAX = SCREEN_COLUMNS = 100
NOT_COUNTED = "commands without a model not counted"


def fit(columns: int) -> None:
    """Wrap and clip at the columns of a terminal from now on, if it has fewer."""
    global SCREEN_COLUMNS
    SCREEN_COLUMNS = min(columns, COLUMNS_MAX)  # pyright: ignore[reportConstantRedefinition]


def curve(
    values: Sequence[float], width: int, floor: float | None = None, top: float | None = None
) -> str:
    """The values as at most `width` text blocks, each the mean of an equal range. `floor` and `top`
    are the values of `▁` and `█`; by default the lowest and the highest mean. No value may be above
    `top`."""
    if not values:
        return ""
    width = min(width, len(values))
    shares = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    means = [math.fsum(share) / len(share) for share in shares]
    low, high = min(means) if floor is None else floor, max(means) if top is None else top
    if high == low:
        return BLOCKS[0] * width
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def marks(places: Iterable[tuple[int, str]], length: int, width: int) -> str:
    """A line below a curve of `length` values: each sign is below the block of its index."""
    width = min(width, length)
    line = [" "] * width
    for index, sign in places:
        line[min(index * width // length, width - 1)] = sign
    return "".join(line).rstrip()


def labelled(label: str, text: str, indent: int = 11) -> list[str]:
    """`label     text`, wrapped; in each line the text begins in column `indent`."""
    lines = textwrap.wrap(
        text,
        SCREEN_COLUMNS,
        initial_indent=f"{label:<{indent - 1}} ",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(UNBROKEN, " ") for line in lines] or [label]


def lost_cell(num: int | None) -> str:
    """The number of lost iterations for a table cell; `-` if unknown."""
    return "-" if num is None else str(num)


def origins(allocations: Iterable[Plain], tasks: Mapping[int, Plain]) -> list[str]:
    """Where the throughput of the tasks with slots comes from: declared, measured, modelled."""
    return sorted(
        {
            task["throughput"]["origin"]
            for one in allocations
            if one["slots"]
            and (task := tasks.get(one["task"])) is not None
            and task["throughput"] is not None
        }
        - {"nominal"}
    )


def nominal(allocations: Iterable[Plain], tasks: Mapping[int, Plain]) -> set[int]:
    """The tasks whose rate ranks plans and is not earned: commands without a model."""
    return {
        one["task"]
        for one in allocations
        if (task := tasks.get(one["task"])) is not None
        and task["throughput"] is not None
        and task["throughput"]["origin"] == "nominal"
    }


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()
) -> list[str]:
    """The lines of a table: two blanks between columns, the columns `right` right-aligned."""
    flush = set(right)
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(
            cell.rjust(widths[i]) if i in flush else cell.ljust(widths[i])
            for i, cell in enumerate(line)
        ).rstrip()
        for line in [head, *rows]
    ]
