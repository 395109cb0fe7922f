"""What the cases of `make attack` share: a cluster with a victim, how it heals, what was found."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any, NamedTuple

import hostile_rank
from real_cluster import RealCluster, running
from unicron.cli.cluster.local_cluster import CONTROL_PLANE
from unicron.workers.host import linux

HEAL_S_MAX = 60.0
"""A rank that is not there again by then counts as healed after this time."""
SETTLE_S = 2.0
POLL_S = 0.005
NOBODY = "nobody"
POLICY = {"restarts_max": 1_000, "restart_pause_s_max": 0.0}
"""The victim is killed again and again: no restart of it is put off."""


class Outcome(NamedTuple):
    """What became of an attack. `held` None: it cannot be tried here. `how`: what was tried, or
    what was broken. `pairs_s`: healing of another task's rank without and with the attack."""

    held: bool | None
    how: str
    pairs_s: Sequence[tuple[float, float]] = ()

    @property
    def ratio(self) -> float | None:
        """The median of the pairs' ratios."""
        return median(self.ratios) if self.pairs_s else None

    @property
    def ratios(self) -> list[float]:
        return [under / calm for calm, under in self.pairs_s]


def judged(broken: Sequence[str], how: str, pairs_s: Sequence[tuple[float, float]] = ()) -> Outcome:
    """The outcome of an attack that has broken this."""
    return Outcome(not broken, "; ".join(broken) or how, pairs_s)


def cannot(why: str) -> Outcome:
    """The outcome of an attack for which this machine lacks something."""
    return Outcome(None, why)


class Victim:
    """A task of one process, which is killed and has to come again."""

    def __init__(self, cluster: RealCluster, name: str = "victim") -> None:
        self._cluster, self.starts = cluster, cluster.path / "out" / f"{name}.starts"
        script = f"echo $$ $(date +%s.%N) >> {self.starts}; exec sleep 100000"
        # no other task is to have its slot while it is away
        self.task = cluster.submit(command(name, ["sh", "-c", script], weight=1_000.0))
        cluster.wait(lambda: (self._last() and self._last()) or None, "the victim runs")

    def _last(self) -> tuple[int, float] | None:
        """The pid and the time of its last start."""
        if not self.starts.exists() or not (lines := self.starts.read_text().splitlines()):
            return None
        pid, at_s = lines[-1].split()
        return int(pid), float(at_s)

    @property
    def num_starts(self) -> int:
        return len(self.starts.read_text().splitlines())

    def heal(self, limit_s: float = HEAL_S_MAX) -> float:
        """Kill it; how long it took until its next process ran, in s; `limit_s`: it did not."""
        last = self._last()
        assert last is not None
        at_s, num, deadline_s = time.time(), self.num_starts, time.monotonic() + limit_s
        with suppress(ProcessLookupError):  # it has ended under the attack
            os.kill(last[0], signal.SIGKILL)
        while self.num_starts == num:
            if time.monotonic() > deadline_s:
                return limit_s
            time.sleep(POLL_S)
        last = self._last()
        assert last is not None
        return last[1] - at_s


def command(name: str, words: Sequence[str], **spec: Any) -> dict[str, Any]:
    """The spec of a task of one process."""
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "slots": {"min": 1, "max": 1},
        "command": list(words),
        **spec,
    }


def hostile(cluster: RealCluster, how: str, *words: str, loop: bool = False) -> dict[str, Any]:
    """The spec of a hostile rank; `loop`: it has a pipe and a progress page."""
    program = [sys.executable, "-P", hostile_rank.__file__, how, *words]
    if not loop:
        return command("hostile", program)
    output = str(cluster.path / "out" / "hostile")
    return command(
        "hostile",
        program,
        heal="in-memory",
        loop={"micro_batches": 1, "iterations": 9, "output": output},
    )


@contextmanager
def cluster_for(
    run_as: str = "", num_agents: int = 1, num_slots: int = 3, folder: Path | None = None
) -> Iterator[RealCluster]:
    """A cluster in a folder of its own; `folder`: in that, which stays."""
    place = folder or Path(tempfile.mkdtemp(prefix="unicron-attack-"))
    try:
        place.chmod(0o755)
        for name in ("trace", "out"):
            (place / name).mkdir(exist_ok=True)
            (place / name).chmod(0o777)
        with running(place, num_agents, POLICY, run_as, num_slots) as cluster:
            yield cluster
    finally:
        if folder is None:
            rmtree(place, ignore_errors=True)


def control_plane_pid(cluster: RealCluster) -> int:
    """The pid of the control plane; 0: none runs."""
    process = cluster.local.find(CONTROL_PLANE)
    return process.pid if process is not None else 0


def healing_pair(
    victim: Victim, begin: Callable[[], object], end: Callable[[], object], warm_s: float
) -> tuple[float, float]:
    """Healing without the attack, and `warm_s` after it has begun."""
    time.sleep(SETTLE_S)
    calm_s = victim.heal()
    time.sleep(SETTLE_S)
    begin()
    try:
        time.sleep(warm_s)
        under_s = victim.heal()
    finally:
        end()
    return calm_s, under_s


def running_words(words: str) -> list[int]:
    """The pids of all processes with these words in their command line."""
    found: list[int] = []
    for process in linux.table():
        try:
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if words in line and process.state != "Z":
            found.append(process.pid)
    return found
