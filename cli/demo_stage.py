"""The demo's stage: a cluster of its own, what its log and its trace tell, promises that are kept.

Every figure that the demo prints is read here: from records, from the ranks' trace, or from a
clock around something that it did itself.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from ..events.embedded import start_time
from ..events.errors import UnicronError, UsageError
from . import local_cluster, processes, say
from .client import Client, Interrupted, Unable, Unreachable
from .figures import ms, span
from .history import History
from .local_cluster import CONTROL_PLANE, LocalCluster, Wanted, shown
from .processes import Process
from .state_dir import StateDir

Plain = dict[str, Any]
T = TypeVar("T")
LOOK_S = 0.05
PROGRESS_S = 3.0
NUM_AGENTS, NUM_SLOTS = 2, 2


class BrokenError(UnicronError):
    """Something did not happen that the demo promises."""


class Stage:
    """One demo. Use `open`, then `close` whatever happens."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder)
        self.began_s = time.monotonic()
        self.broken: list[str] = []
        self.told = History()
        self.records: list[Plain] = []
        self.trace = Trace(folder / "trace")
        self.cluster = LocalCluster(self.state, Wanted(
            num_agents=NUM_AGENTS, num_slots=NUM_SLOTS, cluster="demo",
            trace_dir=str(self.trace.folder)))
        self._lock: IO[str] | None = None
        self._client: Client | None = None
        self._said_s = 0.0
        self._said_iteration = -1

    # --- the cluster ----------------------------------------------------------------------------
    def open(self) -> None:
        """A fresh folder. Raises UsageError when a demo runs on it, or it is not a demo's."""
        path = self.state.path
        if path.exists():
            if any(path.iterdir()) and not (path / "up.lock").exists():
                raise UsageError(f"{shown(path)} exists and is not a demo's", "move it away")
            self.state.create()
            lock = self.state.lock()
            if left := local_cluster.stop_all(self.state):
                self.say("tidy", f"stopped what an earlier demo left: {', '.join(left)}")
            shutil.rmtree(path)
            lock.close()
        self.state.create()
        self._lock = self.state.lock()

    def start(self) -> list[Process]:
        """Server, control plane, agents; all but the server are returned."""
        cluster = self.cluster
        cluster.choose_port()
        server = cluster.ensure_server()
        assert server is not None
        cluster.save()
        started = [cluster.start(name) for name in cluster.names()]
        self._client = cluster.wait_control_plane()
        cluster.wait_agents(self._client)
        self.say("cluster", f"server (pid {server.pid}), control plane (pid {started[0].pid}) at "
                            f"{self._client.url}")
        agents = ", ".join(f"{process.name.removeprefix('agent-')} (pid {process.pid})"
                           for process in started[1:])
        self.say("", f"agents {agents} with {NUM_SLOTS} slots each")
        return started

    def close(self, *, keep: bool = False) -> None:
        """Stop all that was started, unless it is to be kept; free the folder."""
        if not keep:
            local_cluster.stop_all(self.state)
        if self._lock is not None:
            self._lock.close()

    def restart_control_plane(self) -> Process:
        """Start it again, and wait until it leads."""
        process = self.cluster.start(CONTROL_PLANE)
        self._client = self.cluster.wait_control_plane()
        return process

    def process(self, name: str) -> Process:
        """A process of the cluster that must be there."""
        found = processes.find(self.state, name)
        if found is None:
            raise BrokenError(f"{name} is gone")
        return found

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    # --- words ----------------------------------------------------------------------------------
    def say(self, label: str, text: str) -> None:
        """A line behind the demo's own clock."""
        elapsed = f"{time.monotonic() - self.began_s:.1f} s"
        say.out(f"{elapsed:>7}  {label:<8} {text}".rstrip())
        self._said_s = time.monotonic()

    def note(self, since_s: float | None, text: str) -> None:
        """A line below one: what happened how long after it."""
        say.out(f"{'':9}{'' if since_s is None else ms(max(since_s, 0.0)):>8} {text}".rstrip())
        self._said_s = time.monotonic()

    def promise(self, holds: bool, what: str) -> bool:
        """Keep account of what was promised; a broken one is said at once."""
        if not holds:
            self.broken.append(what)
            self.say("BROKEN", what)
        return holds

    # --- the log --------------------------------------------------------------------------------
    def look(self) -> list[Plain]:
        """Read what is new in the log; those records."""
        try:
            new = list(self.client.records(self.told.seq, follow=False))
        except (Interrupted, Unable, Unreachable):
            return []
        for record in new:
            self.told.add(record)
        self.records += new
        return new

    def wait(self, attempt: Callable[[], T | None], limit_s: float, what: str) -> T:
        """Look until it answers, saying how the training goes. Raises BrokenError."""
        deadline_s = time.monotonic() + limit_s
        self.look()
        while (answer := attempt()) is None:
            ended = next((task for task in self.told.tasks.values() if task.outcome), None)
            if ended is not None:
                raise BrokenError(f"{ended.name} {ended.outcome} ({ended.why}) before {what}")
            if time.monotonic() > deadline_s:
                raise BrokenError(f"{what}: not within {span(limit_s)}; see "
                                  f"{shown(self.state.logs)}")
            time.sleep(LOOK_S)
            self.look()
            self._progress()
        return answer

    def find(self, kind: str, *, after: int = 0, **wanted: object) -> Plain | None:
        """The first record of that kind behind `after` whose body says so."""
        return next(iter(self.all(kind, after=after, **wanted)), None)

    def all(self, kind: str, *, after: int = 0, **wanted: object) -> list[Plain]:
        """All records of that kind behind `after` whose bodies say so."""
        return [record for record in self.records
                if record["kind"] == kind and record["seq"] > after
                and all(record["body"].get(key) == value for key, value in wanted.items())]

    def _progress(self) -> None:
        """Now and then, how the training goes."""
        if time.monotonic() - self._said_s < PROGRESS_S:
            return
        for task in self.told.tasks.values():
            if task.losses and max(task.losses) != self._said_iteration:
                at = self._said_iteration = max(task.losses)
                self.say("train", f"{task.name} {at + 1}/{task.num_iterations}, "
                                  f"loss {task.losses[at]:.3f}, {span(task.step_s[at])} each")


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

