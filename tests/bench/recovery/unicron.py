"""Unicron in normal use: a private log server, control plane, agents, ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rank_trace
from bench.recovery import watch as eyes
from bench.recovery.default_job import loop_spec
from bench.recovery.job import NUM_MICRO_BATCHES, NUM_RANKS, Parallel, spec
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.answers import Interrupted
from unicron.cli.cluster.client import Client, Refused, Unable, Unreachable
from unicron.cli.cluster.local_cluster import ClusterOptions, LocalCluster
from unicron.cli.cluster.processes import Process
from unicron.cli.cluster.state_dir import StateDir

NUM_AGENTS = 2
TRACE_DIR = "trace"


class Unicron:
    """Two nodes of two slots, one task on `num_ranks` of them, and the log."""

    name = "unicron"

    def __init__(
        self,
        folder: Path,
        *,
        num_ranks: int = NUM_RANKS,
        size: str = "1M",
        traced: bool = True,
        copy_every: int | None = None,
        by_exec: tuple[str, ...] = (),
        watches: bool = True,
        policy: Mapping[str, object] | None = None,
        parallel: Parallel | None = None,
        is_loop: bool = False,
    ) -> None:
        """`by_exec`: nodes whose agents start ranks by exec instead of from a zygote. `is_loop`:
        the task is the loop of default_job.py, whatever its `size`."""
        folder.mkdir(parents=True)
        self.folder, self.num_ranks = folder, num_ranks
        self.watch = eyes.Watch(folder / TRACE_DIR)
        rank_trace.install(self.watch.folder)
        self.spec = (
            loop_spec(folder, num_ranks=num_ranks, copy_every=copy_every, parallel=parallel)
            if is_loop
            else spec(
                "bench",
                folder / "out",
                num_ranks=num_ranks,
                size=size,
                copy_every=copy_every,
                parallel=parallel,
            )
        )
        self._by_exec = by_exec
        self.state = StateDir(folder / "state")
        self.state.create()
        file = folder / "policy.yaml"
        file.write_text(json.dumps({"quarantine_faults": 1000} | dict(policy or {})))
        self._local = LocalCluster(
            self.state,
            ClusterOptions(
                num_agents=NUM_AGENTS,
                num_slots=NUM_RANKS // NUM_AGENTS,
                trace_dir=str(self.watch.folder) if traced else "",
                watch=watches,
                policy=str(file),
            ),
        )
        self._client: Client | None = None
        self.records: list[dict[str, Any]] = []
        self.task = 0

    def start(self) -> None:
        self._local.choose_port()
        server = self._local.ensure_server()
        assert server is not None
        self.server_pid = server.pid
        for name in self._local.names():
            self.start_agent(name)
        self._client = self._local.wait_control_plane()
        self._local.wait_agents(self._client)
        self.task = int(self._client.post("/v1/tasks", self.spec)["task"])

    def start_agent(self, name: str) -> None:
        """Start an agent or the control plane, if it does not run."""
        by_exec = any(name == local_cluster.agent_name(node) for node in self._by_exec)
        if by_exec:
            os.environ["UNICRON_ZYGOTE"] = "0"
        try:
            self._local.ensure(name)
        finally:
            os.environ.pop("UNICRON_ZYGOTE", None)

    def stop(self) -> None:
        local_cluster.stop_all(self.state, grace=False)

    def tend(self) -> str:
        return ""

    def comes_back(self, case: str) -> bool:
        return True

    # --- the log --------------------------------------------------------------------------------
    def look(self) -> list[dict[str, Any]]:
        """All records until now."""
        assert self._client is not None
        last = self.records[-1]["seq"] if self.records else 0
        try:
            self.records += self._client.records(last, follow=False)
        except (Interrupted, Refused, Unable, Unreachable):
            pass
        return self.records

    def all(self, kind: str, **wanted: object) -> list[dict[str, Any]]:
        """Records of a kind with these body fields, among those that `look` has read."""
        return [
            record
            for record in self.records
            if record["kind"] == kind
            and all(record["body"].get(key) == value for key, value in wanted.items())
        ]

    def losses(self) -> dict[int, float]:
        self.look()
        return {
            record["body"]["first_iteration"] + offset: loss
            for record in self.all("TaskProgressed", task=self.task)
            for offset, loss in enumerate(record["body"]["losses"])
        }

    def whole_batch(self, step: eyes.Line) -> bool | None:
        """True if the replicas kept or ran every micro-batch exactly once."""
        self.look()
        told = self.all("Reconfigured", task=self.task, generation=step["generation"])
        (order,) = self.all("Reconfigure", task=self.task, generation=step["generation"])
        axes = order["body"]["axes"] or {"tp": 1, "pp": 1}
        parts = sorted(
            item for record in told for item in (*record["body"]["kept"], *record["body"]["todo"])
        )
        # All members of a replica report the same micro-batches.
        return parts == [
            item for item in range(NUM_MICRO_BATCHES) for _ in range(axes["tp"] * axes["pp"])
        ]

    # --- its processes --------------------------------------------------------------------------
    def process(self, name: str) -> Process:
        found = self._local.find(name)
        assert found is not None, f"{name} does not run"
        return found

    def keepers(self) -> list[int]:
        """The pids of server, control plane and agents: all processes except the ranks."""
        return [self.server_pid, *(self.process(name).pid for name in self._local.names())]

    def view(self) -> dict[str, Any]:
        return next(task for task in self._state()["tasks"] if task["id"] == self.task)

    def are_healthy(self) -> bool:
        """True if every node is there and in contact."""
        return [node["contact"] for node in self._state()["nodes"]] == ["heard"] * NUM_AGENTS

    def _state(self) -> dict[str, Any]:
        assert self._client is not None
        return dict(self._client.get("/v1/state"))

    def ranks(self) -> dict[int, int]:
        """The pid of each rank."""
        return {rank["rank"]: rank["pid"] for rank in self.view()["ranks"]}
