"""Formats values as text: times, sizes, rates, counts, layouts."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import convert

from ...events.records.orders import Reconfigure
from ...events.spec.model import Axes
from ...events.spec.parallelism import (
    Sharding,
    layout_label,
    missing_parts,
    num_positions,
    part_in_words,
)
from ...events.words import listed as listed
from ...events.words import rfc3339 as rfc3339
from ...events.words import span as span

Plain = dict[str, Any]
"""A JSON object: a record, a response of the control plane, or `-o json`."""
BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS_MAX = SCREEN_COLUMNS = 100
UNBROKEN = "\u00a0"


NOT_COUNTED = "commands without a model not counted"


def fit(columns: int) -> None:
    """Wrap and clip at the columns of a terminal from now on, if it has fewer."""
    global SCREEN_COLUMNS
    SCREEN_COLUMNS = min(columns, COLUMNS_MAX)  # pyright: ignore[reportConstantRedefinition]


def ms(length_s: float | None) -> str:
    """Whole milliseconds below ten seconds, else seconds; `-` for None."""
    if length_s is None:
        return "-"
    return f"{length_s * 1000:.0f} ms" if length_s < 9.9995 else f"{length_s:.1f} s"


def scaled(value: float, unit: str) -> str:
    """The value with a decimal prefix: `11 MB`, `8.06 GFLOP/s`. If the unit
    begins with a space, it follows the prefix: `8 M parameters`."""
    if value == 0:
        return f"0 {unit}".rstrip()
    power = min(max(math.floor(math.log10(abs(value)) / 3), 0), 8)
    return f"{value / 1000**power:.3g} {' kMGTPEZY'[power].strip()}{unit}".rstrip()


def count(value: int) -> str:
    return f"{value:,}"


def ranks(numbers: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 1 3`, `ranks 0-7`."""
    sorted_ = sorted(numbers)
    if not sorted_:
        return "no rank"
    if len(sorted_) == 1:
        return f"rank {sorted_[0]}"
    if len(sorted_) > 2 and sorted_ == list(range(sorted_[0], sorted_[-1] + 1)):
        return f"ranks {sorted_[0]}-{sorted_[-1]}"
    return "ranks " + " ".join(map(str, sorted_))


def curve(values: Sequence[float], width: int, floor: float | None = None,
          top: float | None = None) -> str:
    """The values as at most `width` text blocks, each the mean of an equal range. `floor` and `top`
    are the values of `▁` and `█`; by default the lowest and the highest mean."""
    if not values:
        return ""
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width]
              for i in range(width)]
    means = [math.fsum(share) / len(share) for share in shares]
    low, high = min(means) if floor is None else floor, max(means) if top is None else top
    if high == low:
        return BLOCKS[0] * width
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))]
                   for mean in means)


def marks(places: Iterable[tuple[int, str]], length: int, width: int) -> str:
    """A line below a curve of `length` values: each sign is below the block of its index."""
    width = min(width, length)
    line = [" "] * width
    for index, sign in places:
        line[min(index * width // length, width - 1)] = sign
    return "".join(line).rstrip()


def labelled(label: str, text: str, indent: int = 11) -> list[str]:
    """`label     text`, wrapped; in each line the text begins in column `indent`."""
    lines = textwrap.wrap(text, SCREEN_COLUMNS, initial_indent=f"{label:<{indent - 1}} ",
                          subsequent_indent=" " * indent, break_on_hyphens=False,
                          break_long_words=False)
    return [line.replace(UNBROKEN, " ") for line in lines] or [label]


def command(words: str) -> str:
    """A command line that `labelled` does not break."""
    return words.replace(" ", UNBROKEN)


def acts(do: str, option: str) -> str:
    """What to do, with `option` at each command between backquotes; `labelled` breaks none."""
    return re.sub("`([^`]*)`", lambda found: command(
        found[1].replace(";", f"{option};") + option), do)


def said(why: str, do: str, option: str = "") -> str:
    """What is wrong, and what to do."""
    return f"{why}: {acts(do, option)}" if do else why


def way_to_act(healing: str, option: str) -> str:
    """The command that resumes healing in a frozen or observing cluster."""
    if healing.startswith("frozen"):
        return f"unicron unfreeze{option}"
    return f"unicron down{option}; unicron up --act{option}"


def number_of(num: int, word: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{num} {word}{'s' * (num != 1)}"


def lost_in_words(num: int | None, *, is_over: bool = False) -> str:
    """`3 iterations lost`. None means unknown; if the task `is_over`, it stays unknown."""
    if num is None:
        return f"iterations lost: unknown{'' if is_over else ' until the task prints one'}"
    return f"{number_of(num, 'iteration')} lost"


def lost_cell(num: int | None) -> str:
    """The number of lost iterations for a table cell; `-` if unknown."""
    return "-" if num is None else str(num)


def plan_waf(plan: Plain, of: Collection[int] | None = None) -> float:
    """The WAF of all tasks under a plan (PlanChosen), including tasks that the plan leaves
    unchanged. `of`: count only these tasks, because others may have ended since."""
    kept = plan.get("kept", ())
    if of is not None and any(one["task"] not in of for one in plan["allocations"]):
        return math.fsum(one["waf"] for one in [*plan["allocations"], *kept]
                         if one["task"] in of)
    return float(plan["waf"]) + math.fsum(one["waf"] for one in kept
                                          if of is None or one["task"] in of)


def origins(allocations: Iterable[Plain], tasks: Mapping[int, Plain]) -> list[str]:
    """Where the throughput of the tasks with slots comes from: declared, measured, modelled."""
    return sorted({task["throughput"]["origin"] for one in allocations
                   if one["slots"] and (task := tasks.get(one["task"])) is not None
                   and task["throughput"] is not None} - {"nominal"})


def nominal(allocations: Iterable[Plain], tasks: Mapping[int, Plain]) -> set[int]:
    """The tasks whose rate ranks plans and is not earned: commands without a model."""
    return {one["task"] for one in allocations if (task := tasks.get(one["task"])) is not None
            and task["throughput"] is not None and task["throughput"]["origin"] == "nominal"}


def clipped(text: str, width: int) -> str:
    """The text, at most `width` wide; a longer text is cut and ends with `...`."""
    return text if len(text) <= width else text[: width - 3] + "..."


def table(head: Sequence[str], rows: Sequence[Sequence[str]],
          right: Iterable[int] = ()) -> list[str]:
    """The lines of a table: two blanks between columns, the columns `right` right-aligned."""
    flush = set(right)
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    return ["  ".join(cell.rjust(widths[i]) if i in flush else cell.ljust(widths[i])
                      for i, cell in enumerate(line)).rstrip()
            for line in [head, *rows]]


# --- The layout of a generation, from its Reconfigure. ---

PARTS_NUM_MAX = 3
"""Lost parts of the state that are listed."""


def layout_briefly(order: Plain) -> str:
    """The layout, and the number of members without a position: `TP2xDP1 +1`."""
    axes = convert(order["axes"], Axes) if order.get("axes") else Axes(dp=len(order["members"]))
    num = len(order["members"]) - num_positions(axes)
    return layout_label(axes) + (f" +{num}" if num else "")


def lost_state(order: Reconfigure, optimizer: Sharding, alive: Collection[tuple[int, int]]) -> str:
    """The parts of the state that no survivor holds. `alive`: (rank, attempt) of each survivor."""
    members = order.members
    axes = order.axes or Axes(dp=len(members))
    there = [place for place, member in enumerate(members[:num_positions(axes)])
             if (member.rank, member.attempt) in alive]
    parts: list[str] = []
    for places in missing_parts(axes, optimizer, there):
        part = part_in_words(axes, places[0], sharded=optimizer != "whole")
        if not part:
            return ""  # each member had the whole state: there are no parts to name
        holders = ranks(sorted({members[place].rank for place in places}))
        parts.append(f"{part} (only {holders} had it)")
    more = f" and {len(parts) - PARTS_NUM_MAX} parts more" if len(parts) > PARTS_NUM_MAX else ""
    return "; ".join(parts[:PARTS_NUM_MAX]) + more
