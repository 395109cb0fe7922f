"""The demo's eyes inside the ranks: the trace of every phase of every micro-batch, as it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..events.embedded import start_time

Plain = dict[str, Any]


class Trace:
    """What the ranks write down of every phase, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Plain] = []
        self._read: dict[Path, int] = {}

    def look(self) -> list[Plain]:
        """What is new, in order of each file."""
        new: list[Plain] = []
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            new += [json.loads(line) for line in data[:whole].splitlines()]
        self.events += new
        return new

    def pids(self, task: int) -> dict[int, int]:
        """The newest process of each rank."""
        self.look()
        newest: dict[int, Plain] = {}
        for event in self.events:
            if event["task"] == task and (
                    event["rank"] not in newest
                    or event["attempt"] >= newest[event["rank"]]["attempt"]):
                newest[event["rank"]] = event
        return {rank: newest[rank]["pid"] for rank in sorted(newest)}

    def iteration(self, task: int) -> int:
        """The highest iteration that any rank has begun."""
        self.look()
        return max((event["iteration"] for event in self.events if event["task"] == task),
                   default=-1)

    def of(self, task: int, iteration: int, event: str) -> list[Plain]:
        """All notes of one kind in one iteration, in order of time."""
        self.look()
        return sorted((one for one in self.events if one["task"] == task
                       and one["iteration"] == iteration and one["event"] == event),
                      key=lambda one: float(one["t"]))


def is_running(pid: int) -> bool:
    """Whether a process of that pid runs (a zombie does not)."""
    return start_time(pid) != ""

