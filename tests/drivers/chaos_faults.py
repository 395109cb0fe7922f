"""Random faults of a training cluster: the script from a seed, and the injection of each fault."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from real_cluster import RealCluster
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.answers import Interrupted
from unicron.cli.cluster.client import Refused, Unable, Unreachable
from unicron.workers.host import linux

WEIGHTS = {
    "rank killed": 5,
    "two ranks killed": 3,
    "rank stopped": 3,
    "exception": 4,
    "agent killed": 3,
    "control plane killed": 3,
}
EVENTS = (
    "micro_batch",
    "forward",
    "forward_mid",
    "backward",
    "backward_mid",
    "reduce",
    "stats",
    "bucket",
    "scale",
    "unscale",
    "norm",
    "clip",
    "step",
    "step_mid",
    "stepped",
    "schedule",
    "done",
)
CALM_ITERATIONS = 10
"""No faults in the first and last iterations."""
DELAY_S_MAX = 0.3
AWAY_S = (0.2, 3.0)
"""How long agents and control planes stay down."""
AGAIN_S = 2.0
"""Seconds before another restart of a process that ended right after its start."""
STRIKE_S_MAX = 120.0
TAIL_BYTES = 1000
Rank = dict[str, Any]


class Fault(NamedTuple):
    """One fault of the script. `dice` in [0, 1) selects the victim among the candidates."""

    kind: str
    iteration: int
    delay_s: float
    dice: float
    event: str
    away_s: float


def draw(seed: int, rounds: int, iterations: int) -> list[Fault]:
    """The script; the same for the same seed. The state that a fault meets depends on timing."""
    rolls = random.Random(seed)
    at = sorted(rolls.choices(range(CALM_ITERATIONS, iterations - CALM_ITERATIONS), k=rounds))
    kinds = rolls.choices(list(WEIGHTS), list(WEIGHTS.values()), k=rounds)
    return [
        Fault(
            kind,
            iteration,
            rolls.uniform(0, DELAY_S_MAX),
            rolls.random(),
            rolls.choice(EVENTS),
            rolls.uniform(*AWAY_S),
        )
        for kind, iteration in zip(kinds, at, strict=True)
    ]


class Striker:
    """Injects faults into a task. At least one member with the state always survives."""

    def __init__(self, cluster: RealCluster, task: int) -> None:
        self.cluster, self.task = cluster, task
        self.folder = cluster.path / "trace"
        self.view: dict[str, Any] = {}
        self._client = cluster.client()
        self._away_until_s: dict[str, float] = {}

    def look(self) -> dict[str, Any]:
        """The task's view from the control plane; the last known view while that is down."""
        try:
            told = self._client.get("/v1/state")["tasks"]
            self.view = next(task for task in told if task["id"] == self.task)
        except (Interrupted, Refused, Unable, Unreachable):
            pass
        return self.view

    def iteration(self) -> int:
        """The newest iteration that a rank has begun."""
        return max((_last(file) for file in self.folder.glob(f"{self.task}-*.jsonl")), default=-1)

    def bring_back(self) -> None:
        """Restart processes that have been down for long enough, as a service manager would."""
        now_s = time.monotonic()
        for name in self.cluster.local.names():
            if self.cluster.local.find(name) is None and now_s > self._away_until_s.get(name, 0):
                self.cluster.local.start(name)
                self._away_until_s[name] = now_s + AGAIN_S

    def _away(self, name: str, fault: Fault) -> None:
        self._away_until_s[name] = time.monotonic() + fault.away_s

    def strike(self, fault: Fault) -> str:
        """Inject the fault as soon as there is a victim; return a description."""
        makers: dict[str, Callable[[Fault], str]] = {
            "rank killed": self._kill,
            "two ranks killed": self._kill,
            "rank stopped": self._stop,
            "exception": self._raise,
            "agent killed": self._kill_agent,
            "control plane killed": self._kill_control_plane,
        }
        last_s = time.monotonic() + STRIKE_S_MAX
        while time.monotonic() < last_s:
            self.bring_back()
            self.look()
            if done := makers[fault.kind](fault):
                return done
            time.sleep(0.05)
        raise AssertionError(f"no victim within {STRIKE_S_MAX:.0f} s: {fault}\n{self.view}")

    def _members(self) -> list[Rank]:
        """The members that have the state and run."""
        return [
            rank
            for rank in self.view["ranks"]
            if rank["state"] == "member" and rank["has_state"] and _runs(rank["pid"])
        ]

    def _victims(self, fault: Fault, num: int) -> list[Rank]:
        members = self._members()
        if len(members) <= num:
            return []
        first = int(fault.dice * len(members))
        return [members[(first + more) % len(members)] for more in range(num)]

    def _kill(self, fault: Fault) -> str:
        victims = self._victims(fault, 2 if fault.kind == "two ranks killed" else 1)
        for rank in victims:
            os.kill(rank["pid"], signal.SIGKILL)
        return " and ".join(f"rank {rank['rank']} on {rank['node']}" for rank in victims)

    def _stop(self, fault: Fault) -> str:
        for rank in self._victims(fault, 1):
            os.kill(rank["pid"], signal.SIGSTOP)
            return f"rank {rank['rank']} on {rank['node']}"
        return ""

    def _raise(self, fault: Fault) -> str:
        """Make the rank raise at an event of a coming iteration. The rank may die before that."""
        for rank in self._victims(fault, 1):
            file = self.folder / "hold" / f"{self.task}-{rank['rank']}"
            file.parent.mkdir(exist_ok=True)
            asked = -1
            while _runs(rank["pid"]):
                if (newest := self.iteration()) > asked:
                    asked = newest + 1
                    new = file.with_suffix(".new")
                    new.write_text(
                        json.dumps({"event": fault.event, "iteration": asked, "then": "raise"})
                    )
                    new.rename(file)
                time.sleep(0.005)
                self.bring_back()
                if not file.exists():
                    return f"rank {rank['rank']} on {rank['node']} in {fault.event}"
            file.unlink(missing_ok=True)
        return ""

    def _kill_agent(self, fault: Fault) -> str:
        """Kill the agent of one node. At least one other node must have a member."""
        members = self._members()
        nodes = sorted({rank["node"] for rank in members})
        name = local_cluster.agent_name(nodes[int(fault.dice * len(nodes))]) if nodes else ""
        if len(nodes) < 2 or self.cluster.local.find(name) is None:
            return ""
        self._away(name, fault)
        self.cluster.kill_node(name.removeprefix("agent-"))
        return f"{name}, back after {fault.away_s:.1f} s"

    def _kill_control_plane(self, fault: Fault) -> str:
        process = self.cluster.local.find(local_cluster.CONTROL_PLANE)
        if process is None:
            return ""
        self._away(local_cluster.CONTROL_PLANE, fault)
        os.kill(process.pid, signal.SIGKILL)
        return f"for {fault.away_s:.1f} s"


def _runs(pid: int) -> bool:
    """True if the process exists and is not stopped."""
    process = linux.read(pid)
    return process is not None and process.state not in "ZXTt"


def _last(file: Path) -> int:
    """The iteration of the last complete line of a trace."""
    with file.open("rb") as trace:
        trace.seek(max(0, file.stat().st_size - TAIL_BYTES))
        lines = trace.read().split(b"\n")
    return int(json.loads(lines[-2])["iteration"]) if len(lines) > 2 else -1
