"""What the bench reads from the trace that every system writes.

Except for `Watch`, everything here is a pure function of the trace's lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from demo.stage import Trace

Line = dict[str, Any]
LOOK_S = 0.002
"""The polling interval, for all systems. A fault may strike this much late."""


class Watch:
    """Reads the new lines of a folder of JSON lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        self.told: list[Line] = []
        self._trace = Trace(folder)

    def look(self) -> list[Line]:
        """New lines of the trace."""
        new: list[Line] = []
        for line in self._trace.look():
            (new if "t" in line else self.told).append(line)
        self.lines += new
        return new

    def until(self, limit_s: float) -> Iterator[list[Line]]:
        """Yields new lines repeatedly until `limit_s` has passed."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            yield self.look()
            time.sleep(LOOK_S)

    def while_new(self, still_s: float) -> Iterator[list[Line]]:
        """Yields new lines repeatedly until none came for `still_s`."""
        last_s = time.monotonic()
        while time.monotonic() < last_s + still_s:
            new = self.look()
            if new:
                last_s = time.monotonic()
            yield new
            time.sleep(LOOK_S)

    def losses(self) -> dict[int, float]:
        """The loss of each iteration, as last reported by a peer."""
        return {line["iteration"]: line["loss"] for line in self.told}


def generations(lines: Iterable[Line], until_s: float) -> dict[int, int]:
    """The newest generation in which each process trained by then."""
    found: dict[int, int] = {}
    for line in lines:
        if line["t"] <= until_s:
            found[line["pid"]] = max(found.get(line["pid"], 0), line["generation"])
    return found


def is_new(line: Line, before: Mapping[int, int]) -> bool:
    """True if the line's generation is after `before`, which has a generation by pid.

    Some systems number generations per process. A new process counts from the maximum of all.
    """
    known = before.get(line["pid"], max(before.values(), default=0))
    return bool(line["generation"] > known)


def first_step(lines: Iterable[Line], before: Mapping[int, int], from_s: float) -> Line | None:
    """The first step that completed in a new generation, after `from_s`."""
    fits = (
        line
        for line in lines
        if line["event"] == "done" and is_new(line, before) and line["t"] > from_s
    )
    return min(fits, key=lambda line: float(line["t"]), default=None)


def micro_batches(lines: Iterable[Line]) -> Iterator[tuple[Line, float]]:
    """Each line that starts a micro-batch, with its duration: until the process's next line."""
    by_process: dict[int, list[Line]] = {}
    for line in lines:
        if line["event"] in ("micro_batch", "reduce"):
            by_process.setdefault(line["pid"], []).append(line)
    for mine in by_process.values():
        mine.sort(key=lambda line: float(line["t"]))
        for line, after in pairwise(mine):
            if line["event"] == "micro_batch":
                yield line, after["t"] - line["t"]


def recompute_s(
    lines: Iterable[Line], step: Line, before: Mapping[int, int], from_s: float
) -> float:
    """Time of the micro-batches that the new generation ran before that step.

    The maximum over the processes: a step waits for the slowest member.
    """
    spent: dict[int, float] = {}
    for line, took_s in micro_batches(lines):
        if is_new(line, before) and from_s < line["t"] and line["t"] + took_s <= step["t"]:
            spent[line["pid"]] = spent.get(line["pid"], 0.0) + took_s
    return max(spent.values(), default=0.0)


def iterations_lost(lines: Iterable[Line], step: Line, before: Mapping[int, int]) -> int:
    """Number of iterations that were completed before the fault and are done again."""
    last = max(
        (
            line["iteration"]
            for line in lines
            if line["event"] == "done" and not is_new(line, before) and line["t"] < step["t"]
        ),
        default=-1,
    )
    return max(0, last + 1 - step["iteration"])


def iteration_s(lines: Iterable[Line], pid: int, until_s: float) -> list[float]:
    """The durations of a process's iterations, from step to step, until then."""
    done = sorted(
        line["t"]
        for line in lines
        if line["event"] == "done" and line["pid"] == pid and line["t"] <= until_s
    )
    return [later - earlier for earlier, later in pairwise(done)]


def pids(lines: Iterable[Line], until_s: float) -> dict[int, int]:
    """The newest process of each rank by then."""
    return {
        line["rank"]: line["pid"]
        for line in sorted(lines, key=lambda line: float(line["t"]))
        if line["t"] <= until_s
    }


def differs(losses: dict[int, float], twin: Sequence[float], first: int, num: int) -> float | None:
    """The largest relative difference of `num` losses from `first` on; None if one is missing."""
    wanted = range(first, first + num)
    if any(index not in losses or index >= len(twin) for index in wanted):
        return None
    return max(abs(losses[index] - twin[index]) / abs(twin[index]) for index in wanted)
