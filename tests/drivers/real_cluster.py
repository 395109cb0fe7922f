"""A complete cluster of real processes: log server, control plane, agents, ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import crashing_log
import rank_trace
from demo.stage import Trace, kill_node
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.answers import Interrupted
from unicron.cli.cluster.client import Client, Refused, Unable, Unreachable
from unicron.cli.cluster.local_cluster import ClusterOptions, LocalCluster
from unicron.cli.cluster.processes import Process
from unicron.cli.cluster.state_dir import StateDir
from unicron.events.records.codec import from_plain
from unicron.events.records.envelope import Record
from unicron.workers.agent.processes.launcher import marker_prefix
from unicron.workers.host import rank_cgroups
from unicron.workers.host.rank_cgroups import Limits, RankCgroups

T = TypeVar("T")
Spec = dict[str, Any]
ENDED = ("finished", "failed", "cancelled")
HELD_S = 1e6
"""Hang limit. Tests hold ranks, and a loaded machine delays them: neither may look like a hang,
unless a test says otherwise."""
LIMIT_S = 120.0
"""Limit of every wait, without a sign of life of a rank; enough on a loaded machine."""
TOTAL_S_MAX = 5 * LIMIT_S
"""Limit of a wait for ranks that do something else for ever."""
REST_S, RESTING_NUM = 0.05, 6
"""How long a rank of a resting task sleeps in each iteration, and how many of its ranks do."""
POLL_S = 0.05
"""Each poll asks the control plane. Shorter intervals would take CPU time from the cluster."""


class RealCluster:
    """A cluster; reads the log and the ranks' traces."""

    PROGRAM = (sys.executable, "-P", "-m", "unicron.cli.main")

    def __init__(
        self,
        path: Path,
        num_agents: int = 2,
        policy: Mapping[str, object] | None = None,
        run_as: str = "",
        num_slots: int = 2,
        num_control_planes: int = 1,
        redis_url: str = "",
    ) -> None:
        self.path = path
        trace = path / "trace"
        rank_trace.install(trace)
        self._trace = Trace(trace)
        self.state = StateDir(path / "state")
        self.state.create()
        file = path / "policy.yaml"
        limits = {"hang_s_min": HELD_S, "quarantine_faults": 1000} | dict(policy or {})
        file.write_text("".join(f"{name}: {value}\n" for name, value in limits.items()))
        self.local = LocalCluster(
            self.state,
            ClusterOptions(
                num_agents=num_agents,
                trace_dir=str(trace),
                policy=str(file),
                run_as=run_as,
                num_slots=num_slots,
                num_control_planes=num_control_planes,
                redis_url=redis_url,
                insecure=bool(redis_url),
            ),
        )
        self.local.choose_port()
        self._log: list[Record] = []
        self._client: Client | None = None

    def start(self) -> Client:
        self.local.ensure_server()
        for name in self.local.names():
            self.local.ensure(name)
        client = self.local.wait_control_plane()
        self.local.wait_agents(client)
        num = len(self.local.control_planes)
        self.wait(
            lambda: len(self.control_plane_urls()) == num or None, f"{num} control planes listen"
        )
        return client

    def control_plane_urls(self) -> list[str]:
        """Where the control planes listen, those that have said it."""
        files = sorted(self.state.path.glob("control_plane*.json"))
        return [str(json.loads(file.read_text())["url"]) for file in files]

    def start_control_plane(self, crash_after: str = "") -> None:
        """Start a new one, which kills itself after (with `-`: before) a `crash_after` record."""
        self._client = None
        if not crash_after:
            self.local.start(local_cluster.CONTROL_PLANE)
            self.local.wait_control_plane()
            return
        with (
            mock.patch.dict(os.environ, {"UNICRON_CRASH_AFTER_KIND": crash_after}),
            mock.patch.object(
                local_cluster, "program", lambda *words: [*crashing_log.PROGRAM, *words]
            ),
        ):
            self.local.start(local_cluster.CONTROL_PLANE)

    def kill_control_plane(self) -> None:
        process = self.local.find(local_cluster.CONTROL_PLANE)
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        self.wait_control_plane_dead()

    def wait_control_plane_dead(self) -> None:
        self.wait(
            lambda: self.local.find(local_cluster.CONTROL_PLANE) is None or None,
            "the control plane is dead",
        )

    def submit(self, spec: Spec) -> int:
        return int(self.client().post("/v1/tasks", spec)["task"])

    def cancel(self, *tasks: int) -> None:
        """Cancel these tasks, and wait until they have ended."""
        for task in tasks:
            self.client().post(f"/v1/tasks/{task}/cancel", {"reason": "the test is done"})
        for task in tasks:
            assert self.wait_ended(task)["state"] == "cancelled", self.endings(task)

    def restore(self) -> None:
        """Restore the initial state: all agents run, no node is drained, no task is left."""
        view = self.client().get("/v1/state")
        self.cancel(*(task["id"] for task in view["tasks"] if task["state"] not in ENDED))
        for node in view["nodes"]:
            if self.local.find(local_cluster.agent_name(node["id"])) is None:
                self.start_agent(node["id"])
            if node["drained"]:
                self.client().post(f"/v1/nodes/{node['id']}/undrain", {"reason": "a test"})
        self.local.wait_agents(self.client())
        self._trace.events.clear()  # each search of a trace reads all of its lines

    def client(self) -> Client:
        """A client of the leading control plane; waits until there is one."""
        self._client = self.local.wait_control_plane()
        return self._client

    def _ask(self, ask: Callable[[Client], T]) -> T:
        """Call the control plane that answered last, or its successor."""
        if self._client is not None:
            try:
                return ask(self._client)
            except (Interrupted, Refused, Unable, Unreachable):
                pass
        return ask(self.client())

    def records(self, after: int = 0) -> list[Record]:
        """The log after `after`; only new records are fetched."""
        last = self._log[-1].seq if self._log else 0
        new = [
            from_plain(line)
            for line in self._ask(lambda client: list(client.records(last, follow=False)))
        ]
        assert [record.seq for record in new] == list(range(last + 1, last + len(new) + 1))
        self._log += new
        return self._log[after:]

    def seq(self) -> int:
        """The current end of the log."""
        return self.records()[-1].seq

    def told(self, after: int, kind: str, **wanted: object) -> list[Record]:
        """Records of a kind after `after` whose bodies have these values."""
        return [
            record
            for record in self.records(after)
            if record.kind == kind
            and all(getattr(record.body, key) == value for key, value in wanted.items())
        ]

    def wait_told(self, after: int, kind: str, **wanted: object) -> Record:
        """The first such record, as soon as there is one."""
        return self.wait(
            lambda: next(iter(self.told(after, kind, **wanted)), None),
            lambda: f"{kind} {wanted} behind {after}\n{self.tail(after)}",
        )

    def wait_healed(self, after: int) -> Any:
        """The body of the only IncidentClosed after `after`. It must be healed without any loss."""
        self.wait_told(after, "IncidentClosed")
        (closed,) = self.told(after, "IncidentClosed")
        body: Any = closed.body
        assert (body.outcome, body.iterations_lost, body.ckpt_read) == ("healed", 0, False), (
            self.tail(after)
        )
        return body

    def tail(self, after: int) -> str:
        """The log after `after`, as last read, in short lines, for a failed assertion."""
        return "\n".join(
            f"{record.seq} {record.kind} {str(record.body)[:200]}"
            for record in self._log[after:]
            if record.kind != "TaskProgressed" and "Checkpoint" not in record.kind
        )

    # --- what is broken on purpose --------------------------------------------------------------
    def agent(self, node: str) -> Process:
        process = self.local.find(local_cluster.agent_name(node))
        assert process is not None, f"the agent of {node} does not run"
        return process

    def kill_node(self, node: str) -> None:
        """Kill the agent with all processes of its node, as if the node was lost."""
        kill_node(self.state, node)

    def kill_agent(self, node: str) -> None:
        """Kill the agent alone."""
        os.kill(self.agent(node).pid, signal.SIGKILL)

    def start_agent(self, node: str) -> None:
        """Start the agent of a node after it was killed."""
        name = local_cluster.agent_name(node)
        self.wait(lambda: self.local.find(name) is None or None, f"the agent of {node} has ended")
        self.local.start(name)

    def hold(self, task: int, rank: int, **asked: Any) -> Path:
        """Request an action of a rank's trace (rank_trace.py). Deleting the returned file ends the
        request.

        After it has written an event, a rank reads this file: JSON of event, iteration,
        micro_batch, bucket and nth, as far as they matter. If it matches, the rank writes `held`,
        until the file is gone or names something else. `then` selects another action:

        - "raise": remove the file and raise InjectedFault;
        - "fail": remove the file and raise a RuntimeError, like a collective that is cut off;
        - "gil": remove the file and sleep for ever in C code that holds the interpreter's lock;
        - "loop", "sleep": remove the file and loop, or sleep, for ever;
        - "alone": remove the file and enter a barrier of all members that only this rank enters;
        - "size": the same, an all-reduce of another size than any other;
        - "skip": remove the file and skip the next collective of all members;
        - "cut": remove the file and shut every TCP connection of the process;
        - "slow" with `slow_s`: sleep for that time at each such event while the file exists.
        """
        hold = self.path / "trace" / "hold" / f"{task}-{rank}"
        hold.parent.mkdir(exist_ok=True)
        new = hold.with_suffix(".new")
        new.write_text(json.dumps(asked))
        new.rename(hold)
        return hold

    def rest(self, *tasks: int, rest_s: float = REST_S) -> None:
        """Let the ranks of these tasks sleep in each iteration, until a test holds them for
        something else. Tasks that train while a test waits then leave the cores to others, and
        have fewer iterations for their reference runs to repeat."""
        for task in tasks:
            for rank in range(RESTING_NUM):
                self.hold(task, rank, event="done", then="slow", slow_s=rest_s)

    def wait_held(self, task: int, rank: int, after_s: float) -> dict[str, Any]:
        """The trace line that says that the rank is held, with a time after `after_s`."""
        return self.wait(
            lambda: next(
                (
                    line
                    for line in self.traced(task)
                    if line["event"] == "held" and line["rank"] == rank and line["t"] >= after_s
                ),
                None,
            ),
            f"rank {rank} is held",
        )

    def wait_paced(self, task: int, num: int) -> None:
        """Wait until the normal step time of `num` ranks in this generation is reported."""
        generation = self.task(task)["generation"]
        for rank in range(num):
            self.wait_told(0, "StepTimeChanged", task=task, rank=rank, generation=generation)

    def pids(self, task: int) -> dict[int, int]:
        """The pid of each rank."""
        return {rank["rank"]: rank["pid"] for rank in self.task(task)["ranks"]}

    def kept(self, task: int, before: Mapping[int, int]) -> set[int]:
        """The ranks whose processes are the same as in `before`."""
        now = self.pids(task)
        return {rank for rank, pid in before.items() if now.get(rank) == pid}

    def on(self, task: int, node: str) -> list[int]:
        """The ranks of a task on a node."""
        return [rank["rank"] for rank in self.task(task)["ranks"] if rank["node"] == node]

    def wait_whole(self, task: int, num: int) -> dict[str, Any]:
        """Wait until the task steps with exactly `num` members and no standby."""

        def look() -> dict[str, Any] | None:
            view = self.task(task)
            assert view["state"] not in ("failed", "finished"), (view, self.endings(task))
            members = [rank for rank in view["ranks"] if rank["state"] == "member"]
            whole = (
                view["state"] in ("running", "degraded")
                and len(members) == len(view["ranks"]) == num
            )
            if not whole or view["phase"] != "training" or view["slots"]["target"] != num:
                return None
            told = self.told(0, "TaskProgressed", task=task, generation=view["generation"])
            return view if told else None

        return self.wait(look, f"task {task} steps with {num} members")

    def wait_steps(self, task: int, num: int = 3) -> None:
        """Wait until the task has reported `num` more iterations."""
        begun = self.task(task)["iteration"]
        self.wait(
            lambda: self.task(task)["iteration"] >= begun + num or None,
            f"task {task} makes {num} steps from {begun}",
        )

    def task(self, task: int) -> dict[str, Any]:
        view = self._ask(lambda client: client.get("/v1/state"))
        return next(item for item in view["tasks"] if item["id"] == task)

    def traced(self, task: int) -> list[dict[str, Any]]:
        """The trace lines of a task's ranks, oldest first."""
        self._trace.look()
        return sorted(
            (line for line in self._trace.events if line["task"] == task),
            key=lambda line: float(line["t"]),
        )

    def wait(self, look: Callable[[], T | None], what: str | Callable[[], str]) -> T:
        """Poll `look` until it returns a result; AssertionError with `what` after LIMIT_S without
        a sign of life of a rank, and after TOTAL_S_MAX."""
        begun_s = alive_s = now_s = time.monotonic()
        signs: tuple[int, int] | None = None
        while now_s - alive_s < LIMIT_S and now_s - begun_s < TOTAL_S_MAX:
            try:
                if (found := look()) is not None:
                    return found
                if now_s - alive_s > LIMIT_S / 4 and (new := self._signs_of_life()) != signs:
                    signs, alive_s = new, now_s
            except (Interrupted, Refused, Unable, Unreachable):
                pass
            time.sleep(POLL_S)
            now_s = time.monotonic()
        awaited = what if isinstance(what, str) else what()
        raise AssertionError(f"not within {now_s - begun_s:.0f} s: {awaited}")

    def _signs_of_life(self) -> tuple[int, int]:
        """The bytes of all logs and traces of ranks, and how often one was told to work."""
        files = [*self.state.logs.glob("*-*/*.log"), *(self.path / "trace").glob("*.jsonl")]
        with suppress(FileNotFoundError):  # an old log was removed
            return sum(file.stat().st_size for file in files), len(self.told(0, "RankWorked"))
        return 0, 0

    def wait_traced(self, task: int, **wanted: object) -> dict[str, Any]:
        """The newest trace line with these values; only new lines are searched again."""
        num_seen = 0

        def look() -> dict[str, Any] | None:
            nonlocal num_seen
            self._trace.look()
            new, num_seen = self._trace.events[num_seen:], len(self._trace.events)
            fits = [
                line
                for line in new
                if line["task"] == task
                and all(line.get(key) == value for key, value in wanted.items())
            ]
            return max(fits, key=lambda line: float(line["t"]), default=None)

        return self.wait(look, f"{wanted} in the trace of task {task}")

    def wait_ended(self, task: int) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            view = self.task(task)
            return view if view["state"] in ENDED else None

        return self.wait(look, f"task {task} ends")

    def losses(self, task: int, again_rel: float = 0.0) -> list[float]:
        """The loss of every iteration, from the log. All reports of an iteration must agree.

        Iterations repeated from a checkpoint may differ by `again_rel`; the last value counts.
        """
        told: dict[int, float] = {}
        for record in self.records():
            if record.kind == "TaskProgressed" and record.body.task == task:  # type: ignore[attr-defined]
                body: Any = record.body
                for offset, loss in enumerate(body.losses):
                    iteration = body.first_iteration + offset
                    before = told.setdefault(iteration, loss)
                    assert abs(before - loss) <= again_rel * loss, f"iteration {iteration}"
                    told[iteration] = loss
        assert sorted(told) == list(range(len(told)))
        return [told[iteration] for iteration in sorted(told)]

    def program(self, *arguments: str) -> list[str]:
        """The command line of the CLI on this cluster."""
        return [*self.PROGRAM, *arguments, "--state", str(self.state.path)]

    def unicron(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the CLI on this cluster."""
        return subprocess.run(
            self.program(*arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    def verify(self, since: int = 0) -> None:
        """Export the log and replay it in a new process: every decision must be the same. `since`:
        the record at which this version took over; decisions before it may be another version's."""
        file = self.path / "log.unicron"
        for words in (
            ["export", str(file), "--state", str(self.state.path)],
            ["replay", str(file), "--verify", "-o", "json"],
        ):
            done = subprocess.run(
                [sys.executable, "-P", "-m", "unicron.cli.main", *words],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert done.returncode == 0 or since, (words, done.stdout, done.stderr)
        verdict = json.loads(done.stdout)
        assert verdict["ok"], done.stderr
        assert verdict["num_records"] > since
        assert all(one["seq"] < since for one in verdict["different"]), verdict["different"]
        file.unlink()

    def endings(self, task: int) -> str:
        """Why processes of a task ended, and the end of each log: for a failed assertion."""
        told = [
            f"{record.seq} {record.kind} {record.body}"
            for record in self.records()
            if record.kind in ("RankExited", "RankErrored", "IncidentOpened", "StopRank")
        ]
        logs = [
            f"{file.name}: {file.read_text()[-400:]}"
            for file in sorted((self.state.logs).glob(f"{task}-*/*.log"))
        ]
        return "\n".join([*told[-12:], *logs])

    def stop(self) -> None:
        local_cluster.stop_all(self.state, grace=False)
        if (base := rank_cgroups.find()) is not None:  # a killed agent leaves those of its ranks
            for lock in (self.state.path / "agents").glob("*.lock"):
                mark = marker_prefix(self.state.path.absolute(), lock.stem)
                last_s = time.monotonic() + LIMIT_S
                while not RankCgroups(base, mark, Limits()).clear(()):
                    assert time.monotonic() < last_s, f"a rank of {lock.stem} survives SIGKILL"
                    time.sleep(POLL_S)


def can_run_as(user: str) -> bool:
    """Whether this process may start the tests' Python as that user."""
    try:
        return not subprocess.run(
            [sys.executable, "-c", ""],
            check=False,
            user=user,
            cwd="/",
            timeout=60,
            stderr=subprocess.DEVNULL,
        ).returncode
    except PermissionError:
        return False


@contextmanager
def running(
    path: Path,
    num_agents: int = 2,
    policy: Mapping[str, object] | None = None,
    run_as: str = "",
    num_slots: int = 2,
    num_control_planes: int = 1,
    redis_url: str = "",
) -> Iterator[RealCluster]:
    """A started cluster; its processes are stopped by pid at the end."""
    made = RealCluster(path, num_agents, policy, run_as, num_slots, num_control_planes, redis_url)
    try:
        made.start()
        yield made
    finally:
        made.stop()
