"""Processes that wait in the kernel and cannot be ended: state D, for long, without a turn."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ... import linux
from .finding import Finding, Look
from .limits import BLOCKED_EVERY_S, BLOCKED_S, BLOCKED_S_MAX

_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_KERNEL_CODE = 2
"""kthreadd: its children are the kernel's own, and some are in D for life."""


class _Waits(NamedTuple):
    start_ticks: int
    num_switches: int
    since_s: float


class Blocked:
    """Looks at the first thread of each process. `mark`: an environment entry of ours begins so."""

    name = "processes"
    every_s, s_max = BLOCKED_EVERY_S, BLOCKED_S_MAX

    def __init__(self, mark: bytes, clock: Callable[[], float] = time.monotonic,
                 table: Callable[[], list[linux.Proc]] = linux.table,
                 proc: Path = Path("/proc")) -> None:
        self._mark = mark
        self._clock = clock
        self._table = table
        self._proc = proc
        self._waits: dict[int, _Waits] = {}

    def read(self) -> Look:
        """The longest of them that waits for BLOCKED_S is named; others are counted."""
        now_s = self._clock()
        waits: dict[int, _Waits] = {}
        for proc in self._table():
            if proc.state != "D" or proc.ppid == _KERNEL_CODE:
                continue
            switches = self._switches(proc.pid)
            before = self._waits.get(proc.pid)
            same = before is not None and before[:2] == (proc.start_ticks, switches)
            waits[proc.pid] = (before if before is not None and same
                               else _Waits(proc.start_ticks, switches, now_s))
        self._waits = waits
        stuck = sorted((one.since_s, pid) for pid, one in waits.items()
                       if now_s - one.since_s >= BLOCKED_S)
        if not stuck:
            return Look([Finding(self.name, "healthy")])
        ours = [one for one in stuck if self._is_ours(one[1])]
        since_s, pid = (ours or stuck)[0]
        where = self._text(pid, "wchan") or "?"
        more = f", and {len(stuck) - 1} others" if len(stuck) > 1 else ""
        why = (f"{self._text(pid, 'comm') or '?'} (pid {pid}{', ours' if ours else ''}) cannot be "
               f"ended: in {where} for {now_s - since_s:.0f} s{more}")
        # BLOCKED_S is many looks already.
        return Look([Finding(self.name, "degraded", why, rule="process-blocked", is_fact=True)])

    def _switches(self, pid: int) -> int:
        """How often it had its turn: one that reads a slow disk has many, and is not stuck."""
        found: list[str] = _SWITCHES.findall(self._text(pid, "status"))
        return sum(int(number) for number in found)

    def _is_ours(self, pid: int) -> bool:
        return any(entry.startswith(self._mark) for entry in linux.environ(pid))

    def _text(self, pid: int, name: str) -> str:
        try:
            return (self._proc / str(pid) / name).read_text("utf-8", "replace").strip()
        except OSError:
            return ""
