"""The demo's cluster, log, trace and checks.

Every number that the demo prints is read here: from records, from the ranks' trace, or from a clock
around the demo's own actions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import rank_trace
from transitions import Transition, transitions
from unicron.cli.cluster import local_cluster, processes
from unicron.cli.cluster.answers import Interrupted
from unicron.cli.cluster.client import Client, Unable, Unreachable
from unicron.cli.cluster.local_cluster import CONTROL_PLANE, ClusterOptions, LocalCluster
from unicron.cli.cluster.processes import Process
from unicron.cli.cluster.state_dir import StateDir, shown
from unicron.cli.terminal import console
from unicron.cli.terminal.format import Plain, ms, span
from unicron.control_plane.history.history import History
from unicron.events.errors import UnicronError, UsageError
from unicron.events.file_lock import FileLock
from unicron.events.log.embedded_server import start_time
from unicron.events.records.codec import from_plain
from unicron.events.spec.policy import Policy
from unicron.events.timing import BEAT_S

# --- The ranks' trace: every phase of every micro-batch. ---


class Trace:
    """The trace files of the ranks, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Plain] = []
        self._read: dict[Path, int] = {}

    def look(self) -> list[Plain]:
        """The new events, in the order of each file."""
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
                event["rank"] not in newest or event["attempt"] >= newest[event["rank"]]["attempt"]
            ):
                newest[event["rank"]] = event
        return {rank: newest[rank]["pid"] for rank in sorted(newest)}

    def iteration(self, task: int) -> int:
        """The highest iteration that any rank has begun."""
        self.look()
        return max(
            (event["iteration"] for event in self.events if event["task"] == task), default=-1
        )

    def of(self, task: int, iteration: int, event: str) -> list[Plain]:
        """All events of one kind in one iteration, in order of time."""
        self.look()
        return sorted(
            (
                one
                for one in self.events
                if one["task"] == task and one["iteration"] == iteration and one["event"] == event
            ),
            key=lambda one: float(one["t"]),
        )


def is_running(pid: int) -> bool:
    """True if the process runs (a zombie does not)."""
    return start_time(pid) != ""


def kill_node(state: StateDir, node: str) -> None:
    """Kill the agent of a node and all its processes without a warning: a lost node."""
    if (agent := processes.find(state, local_cluster.agent_name(node))) is not None:
        processes.signal_to(agent, signal.SIGKILL)
    local_cluster.kill_marked(state, f"{node}/")


T = TypeVar("T")
LOOK_S = 0.05
PROGRESS_S = 3.0
NUM_AGENTS, NUM_SLOTS = 3, 2
NICE_NUM = 10
SILENCE_S_MAX, EVIDENCE_S_MAX = 1.5, 3.0
"""The silence is shorter than by default; the wait for a root cause is longer than the silence."""


class BrokenError(UnicronError):
    """A check of the demo failed."""


class Stage:
    """One run of the demo. Call `open`, and `close` in any case."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder)
        self.began_s = time.monotonic()
        self.broken: list[str] = []
        self.history = History()
        self.records: list[Plain] = []
        self.trace = Trace(folder / "trace")
        self.faults: list[dict[int, int]] = []
        """Per kill: the iteration of each task."""
        self.killed_s: dict[int, float] = {}
        """Per incident: the time of the kill, seconds since 1970."""
        self.away_s = 0.0
        """From the control plane's kill to the next epoch."""
        self.live: set[int] = set()
        """Tasks that must not end yet."""
        self._policy = folder / "policy.yaml"
        self.cluster = LocalCluster(
            self.state,
            ClusterOptions(
                num_agents=NUM_AGENTS,
                num_slots=NUM_SLOTS,
                cluster="demo",
                trace_dir=str(self.trace.folder),
                policy=str(self._policy),
            ),
        )
        self._lock: FileLock | None = None
        self._client: Client | None = None
        self._said_s = 0.0

    # --- The cluster. ---
    def open(self) -> None:
        """Create a fresh folder. Raises UsageError if a demo uses it now, or it is not a demo's."""
        path = self.state.path
        if path.exists():
            if any(path.iterdir()) and not (path / "up.lock").exists():
                raise UsageError(f"{shown(path)} exists and is not a demo's", "move it away")
            self.state.create()
            lock = self.state.lock()
            if left := local_cluster.stop_all(self.state):
                self.say("tidy", f"stopped what an earlier demo left: {', '.join(left)}")
            shutil.rmtree(path)
            lock.release()
        self.state.create()
        rank_trace.install(self.trace.folder)
        self._lock = self.state.lock()

    def start(self) -> None:
        """Start the server, the control plane and the agents."""
        cluster = self.cluster
        self._policy.write_text(
            f"silence_s_max: {SILENCE_S_MAX}\nevidence_s_max: {EVIDENCE_S_MAX}\n"
        )
        cluster.choose_port()
        server = cluster.ensure_server()
        assert server is not None
        cluster.save()
        started = [cluster.start(name) for name in cluster.names()]
        self._client = cluster.wait_control_plane()
        cluster.wait_agents(self._client)
        self.say(
            "cluster",
            f"server (pid {server.pid}), control plane (pid {started[0].pid}) at "
            f"{self._client.url}",
        )
        agents = ", ".join(
            f"{process.name.removeprefix('agent-')} (pid {process.pid})" for process in started[1:]
        )
        self.note(None, f"agents {agents}, {NUM_SLOTS} slots each")
        self.note(
            None,
            f"a rank that is ready gets nice {NICE_NUM}: those that prepare come "
            "first on two cores",
        )
        self.note(
            None,
            f"{self._policy.name}: silent for {SILENCE_S_MAX:g} s, not "
            f"{Policy().silence_s_max:g}, is suspect; a heartbeat every {BEAT_S:g} s",
        )

    def close(self, *, keep: bool = False) -> None:
        """Stop all processes unless `keep`; unlock the folder."""
        if not keep:
            local_cluster.stop_all(self.state)
        if self._lock is not None:
            self._lock.release()

    def restart_control_plane(self) -> Process:
        """Restart the control plane, and wait until it leads."""
        process = self.cluster.start(CONTROL_PLANE)
        self._client = self.cluster.wait_control_plane()
        return process

    def process(self, name: str) -> Process:
        """A process of the cluster. Raises BrokenError if it is gone."""
        found = processes.find(self.state, name)
        if found is None:
            raise BrokenError(f"{name} is gone")
        return found

    def count_kill(self) -> None:
        """Record a kill, and the iteration of each task at that time."""
        self.faults.append({task: self.trace.iteration(task) for task in self.live})

    @property
    def num_kills(self) -> int:
        return len(self.faults)

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self.began_s

    # --- Output. ---
    def say(self, label: str, text: str) -> None:
        """Print a line with the demo's elapsed time."""
        elapsed = f"{self.elapsed_s:.1f} s"
        console.out(f"{elapsed:>7}  {label:<8} {text}".rstrip())
        self._said_s = time.monotonic()

    def note(self, since_s: float | None, text: str) -> None:
        """Print a detail line: the time since the fault, and the text."""
        console.out(f"{'':9}{'' if since_s is None else ms(max(since_s, 0.0)):>8} {text}".rstrip())
        self._said_s = time.monotonic()

    def promise(self, holds: bool, what: str) -> None:
        """Record a check of the demo; print it at once if it failed."""
        if not holds:
            self.broken.append(what)
            self.say("BROKEN", what)

    # --- The log. ---
    def look(self) -> list[Plain]:
        """Read and return the new records of the log."""
        try:
            new = list(self.client.records(self.history.seq, follow=False))
        except (Interrupted, Unable, Unreachable):
            return []
        for record in new:
            self.history.add(from_plain(record))
        self.records += new
        for record in new:
            if record["kind"] == "RankReady":
                self._give_way(record["body"])
        return new

    def wait(self, attempt: Callable[[], T | None], limit_s: float, what: str) -> T:
        """Poll until `attempt` returns a true value; print the progress. Raises BrokenError."""
        deadline_s = time.monotonic() + limit_s
        self.look()
        while not (answer := attempt()):
            ended = next(
                (
                    task
                    for key in sorted(self.live)
                    if (task := self.history.tasks.get(key)) and task.task.outcome
                ),
                None,
            )
            if ended is not None:
                raise BrokenError(
                    f"{ended.name} {ended.task.outcome} ({ended.task.why}) before {what}"
                )
            if time.monotonic() > deadline_s:
                raise BrokenError(
                    f"{what}: not within {span(limit_s)}; see {shown(self.state.logs)}"
                )
            time.sleep(LOOK_S)
            self.look()
            self._progress()
        return answer

    def find(self, kind: str, *, after: int = 0, **wanted: object) -> Plain | None:
        """The first record of that kind after `after` whose body has these values."""
        return next(iter(self.all(kind, after=after, **wanted)), None)

    def last(self, kind: str, **wanted: object) -> Plain | None:
        """The last record of that kind whose body has these values."""
        return next(reversed(self.all(kind, after=0, **wanted)), None)

    def all(self, kind: str, *, after: int = 0, **wanted: object) -> list[Plain]:
        """All records of that kind after `after` whose bodies have these values."""
        return [
            record
            for record in self.records
            if record["kind"] == kind
            and record["seq"] > after
            and all(record["body"].get(key) == value for key, value in wanted.items())
        ]

    # --- Placement. ---
    def members(self, task: int) -> dict[int, str]:
        """The node of each rank of the newest generation."""
        order = self.last("Reconfigure", task=task)
        return (
            {} if order is None else {one["rank"]: one["node"] for one in order["body"]["members"]}
        )

    def seats(self, task: int) -> dict[int, str]:
        """The node of each rank of the newest placement."""
        placed = self.last("TaskPlaced", task=task)
        return (
            {}
            if placed is None
            else {one["rank"]: one["slot"]["node"] for one in placed["body"]["seats"]}
        )

    def is_full(self, task: int, num: int) -> bool:
        """True if the task trains with `num` ranks, exactly those of its newest placement."""
        members, order = self.members(task), self.last("Reconfigure", task=task)
        return (
            order is not None
            and members == self.seats(task)
            and len(members) == num
            and self.find("TaskProgressed", task=task, generation=order["body"]["generation"])
            is not None
        )

    def _give_way(self, ready: Plain) -> None:
        """Lower the priority of a ready rank, so that ranks that still prepare come first."""
        started = self.find(
            "RankStarted", task=ready["task"], rank=ready["rank"], attempt=ready["attempt"]
        )
        pid = int(started["body"]["pid"]) if started is not None else 0
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE_NUM)
        with contextlib.suppress(OSError):  # with autogroups, the priority of the group counts
            if os.getsid(pid) == pid:
                Path(f"/proc/{pid}/autogroup").write_text(str(NICE_NUM))

    def transitions(self) -> list[Transition]:
        """Those of the records until now."""
        return transitions(map(from_plain, self.records))

    def name(self, task: int) -> str:
        return self.history.tasks[task].name

    def losses(self, task: int) -> dict[int, float]:
        """The reported losses by iteration."""
        return self.history.tasks[task].losses

    def _progress(self) -> None:
        if time.monotonic() - self._said_s < PROGRESS_S:
            return
        parts = [
            f"{task.name} {max(task.losses) + 1}/{task.task.spec.train.iterations}, loss "
            f"{task.losses[max(task.losses)]:.3f}, DP{len(self.members(task.task.id))}"
            for task in self.history.tasks.values()
            if task.losses and not task.task.outcome
        ]
        if parts:
            self.say("train", "    ".join(parts))
