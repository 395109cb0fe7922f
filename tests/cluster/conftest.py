"""A whole cluster of real processes for a test: server, control plane, two agents, ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from unicron.cli import local_cluster
from unicron.cli.client import Client, Refused, Unreachable
from unicron.cli.local_cluster import LocalCluster, Wanted
from unicron.cli.state_dir import StateDir
from unicron.events.codec import from_plain
from unicron.events.records import Record

T = TypeVar("T")
Spec = dict[str, Any]


class RealCluster:
    """Two nodes of two slots, and eyes on the log and on the ranks' traces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace = path / "trace"
        self.trace.mkdir(parents=True)
        self.state = StateDir(path / "state")
        self.state.create()
        self.local = LocalCluster(self.state, Wanted(trace_dir=str(self.trace)))
        self.local.choose_port()

    def start(self) -> Client:
        self.local.ensure_server()
        for name in self.local.names():
            self.local.ensure(name)
        client = self.local.wait_control_plane()
        self.local.wait_agents(client)
        return client

    def start_control_plane(self, crash_after: str = "") -> None:
        """Anew; with `crash_after` it kills itself after (before: `-`) that record."""
        environment = {"UNICRON_CRASH_AFTER_KIND": crash_after} if crash_after else {}
        os.environ.update(environment)
        try:
            self.local.start(local_cluster.CONTROL_PLANE)
        finally:
            for name in environment:
                del os.environ[name]
        if not crash_after:
            self.local.wait_control_plane()

    def kill_control_plane(self) -> None:
        process = self.local.find(local_cluster.CONTROL_PLANE)
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        self.wait_control_plane_dead()

    def wait_control_plane_dead(self, limit_s: float = 60.0) -> None:
        self.wait(lambda: self.local.find(local_cluster.CONTROL_PLANE) is None or None,
                  "the control plane is dead", limit_s)

    def submit(self, spec: Spec) -> int:
        return int(self.client().post("/v1/tasks", spec)["task"])

    def client(self) -> Client:
        return self.local.wait_control_plane()

    def records(self) -> list[Record]:
        return [from_plain(line) for line in self.client().records(0, follow=False)]

    def task(self, task: int) -> dict[str, Any]:
        view = self.client().get("/v1/state")
        return next(item for item in view["tasks"] if item["id"] == task)

    def traced(self, task: int) -> list[dict[str, Any]]:
        """What the ranks of a task wrote about their work, oldest first."""
        lines: list[dict[str, Any]] = []
        for file in sorted(self.trace.glob(f"{task}-*.jsonl")):
            lines += [json.loads(line) for line in file.read_text().splitlines(keepends=True)
                      if line.endswith("\n")]
        return sorted(lines, key=lambda line: line["t"])

    def wait(self, look: Callable[[], T | None], what: str, limit_s: float = 60.0) -> T:
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            try:
                found = look()
            except (Unreachable, Refused):
                found = None
            if found is not None:
                return found
            time.sleep(0.01)
        raise AssertionError(f"not within {limit_s:.0f} s: {what}")

    def wait_traced(self, task: int, limit_s: float = 90.0, **wanted: object) -> dict[str, Any]:
        """The newest trace line with these values."""
        def look() -> dict[str, Any] | None:
            fits = [line for line in self.traced(task)
                    if all(line.get(key) == value for key, value in wanted.items())]
            return fits[-1] if fits else None
        return self.wait(look, f"{wanted} in the trace of task {task}", limit_s)

    def wait_ended(self, task: int, limit_s: float = 150.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            view = self.task(task)
            return view if view["state"] in ("finished", "failed", "cancelled") else None
        return self.wait(look, f"task {task} ends", limit_s)

    def losses(self, task: int) -> list[float]:
        """The loss of every iteration, from the log alone; each told with one value."""
        told: dict[int, float] = {}
        for record in self.records():
            if record.kind == "TaskProgressed" and record.body.task == task:  # type: ignore[attr-defined]
                body: Any = record.body
                for offset, loss in enumerate(body.losses):
                    iteration = body.first_iteration + offset
                    assert told.setdefault(iteration, loss) == loss, f"iteration {iteration}"
        assert sorted(told) == list(range(len(told)))
        return [told[iteration] for iteration in sorted(told)]

    def endings(self, task: int) -> str:
        """Why processes of a task ended, and the last words of each: for a failed assertion."""
        told = [f"{record.seq} {record.kind} {record.body}" for record in self.records()
                if record.kind in ("RankExited", "RankErrored", "IncidentOpened", "StopRank")]
        logs = [f"{file.name}: {file.read_text()[-400:]}"
                for file in sorted((self.state.logs).glob(f"{task}-*/*.log"))]
        return "\n".join([*told[-12:], *logs])

    def stop(self) -> None:
        local_cluster.stop_all(self.state, grace=False)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RealCluster]:
    """A running cluster, stopped by pid afterwards."""
    made = RealCluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Spec]:
    """A small GPT whose iteration lasts long enough to be struck in the middle."""
    def make(name: str, **changes: Any) -> Spec:
        return {
            "apiVersion": "unicron/v1", "name": name,
            "slots": {"min": 1, "max": changes.get("slots", 4)},
            "train": {
                "model": {"num_layers": 3, "hidden": 128, "num_heads": 4, "sequence": 128,
                          "dropout": changes.get("dropout", 0.0)},
                "batch": {"global": 48, "micro": 4},
                "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_iterations": 1},
                "iterations": changes.get("iterations", 40), "seed": 7,
                "output": str(tmp_path / "out" / name),
            },
        }
    return make
