"""`make demo-hosts`: two tasks train on three hosts; a fourth has the control plane and the server.

Hosts die and cables are cut, one case after the other. In the end the losses of each case, and the
parameters, are compared with the tasks' undisturbed runs. The hosts are network namespaces, so it
needs root. Rows are in build/bench/hosts.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import network_namespaces
from bench.recovery.rows import Row, row, write
from cluster_story import RATES
from hosts.cluster import BRAIN, MANAGE, TRAIN, HostsCluster
from hosts.network import laid
from twins import LOSS_REL_MAX, Spec, Twins, small
from unicron.workers.training.reference import read

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("h1", "h2", "h3")
NUM_SLOTS = 2
POLICY = {"silence_s_max": 3.0, "evidence_s_max": 4.0, "hang_s_min": 3.0, "replace_after_s": 4.0}
"""`replace_after_s` is short, so that the control plane's own cut lasts longer."""
TOUCHING = ("IncidentOpened", "Quiesce", "Reconfigure", "StartRank", "StopRank", "TaskPlaced")
STEPS_NUM = 40
"""Iterations under a cut that must change nothing: longer than every limit of the policy."""


class Result(NamedTuple):
    """What one case has cost."""

    case: str
    fault_to_step_s: float
    touched: int
    iterations: range
    """Of the wide task, from before the fault until after it."""


class Demo:
    """The cases, in the order of `run`. Each leaves all hosts joined and all tasks whole."""

    def __init__(self, cluster: HostsCluster, specs: dict[str, Spec]) -> None:
        self.cluster, self.network = cluster, cluster.network
        self.tasks = {name: cluster.submit(spec) for name, spec in specs.items()}
        self._sizes = {self.tasks[name]: int(spec["slots"]["max"])
                       for name, spec in specs.items()}
        self._wide = self.tasks["wide"]
        self._faulted: list[int] = []
        """The tasks that the present case may touch."""
        self._cases: dict[str, tuple[str, Callable[[], Iterator[float]]]] = {
            "host_killed": ("a host is switched off", self._host_killed),
            "agent_cut": ("an agent loses the control plane, ranks reach each other",
                          lambda: self._unheard((self._host(),), lambda: self.network.cut(
                              self._host(), MANAGE))),
            "host_cut": ("all cables of a host are pulled", self._host_cut),
            "ranks_cut": ("only the cable between ranks is pulled", lambda: self._ranks_cut(
                lambda host: self.network.cut(host, TRAIN))),
            "control_plane_cut": ("the control plane loses all hosts", lambda: self._unheard(
                HOSTS, lambda: self.network.cut(BRAIN))),
            "one_way_reports": ("what an agent sends is lost", lambda: self._unheard(
                (self._host(),), lambda: self.network.cut_one_way(self._host(), BRAIN, MANAGE))),
            "one_way_orders": ("what is sent to an agent is lost", lambda: self._unheard(
                (self._host(),), lambda: self.network.cut_one_way(BRAIN, self._host(), MANAGE))),
            "one_way_ranks": ("what one host's ranks send to another's is lost",
                              lambda: self._ranks_cut(lambda host: self.network.cut_one_way(
                                  host, self._peer(host), TRAIN)))}

    def run(self) -> list[Result]:
        return [self._result(case, *of) for case, of in self._cases.items()]

    def _result(self, case: str, title: str, act: Callable[[], Iterator[float]]) -> Result:
        cluster = self.cluster
        for task, num in self._sizes.items():
            cluster.wait_whole(task, num)
            cluster.wait_paced(task, num)
        after, begin = cluster.seq(), cluster.task(self._wide)["iteration"]
        running = act()
        at_s = next(running)
        step_s = next(running)
        healthy = set(self.tasks.values()) - set(self._faulted)
        touched = healthy & {getattr(record.body, "task", 0) for record in cluster.records(after)
                             if record.kind in TOUCHING}
        for _ in running:  # all is mended
            pass
        cluster.wait_steps(self._wide)
        result = Result(case, step_s - at_s, len(touched),
                        range(begin, cluster.task(self._wide)["iteration"]))
        print(f"{case:18} {title}: next step after {result.fault_to_step_s:.2f} s", flush=True)
        return result

    # --- the cases: each yields the time of the fault, then that of the next step ----------------
    def _host_killed(self) -> Iterator[float]:
        host, after, generation = self._host(), self.cluster.seq(), self._generation()
        self._faulted = self._on(host)
        yield self.network.kill(host)
        self.cluster.wait_healed(after)
        yield self._step_s(generation)
        back = self.cluster.seq()
        self.network.mend(host)
        self.cluster.start_agent(host)
        self.cluster.wait_told(back, "NodeJoined", node=host)

    def _host_cut(self) -> Iterator[float]:
        cluster, host, generation = self.cluster, self._host(), self._generation()
        after, ranks = cluster.seq(), cluster.on(self._wide, host)
        self._faulted = self._on(host)
        yield self.network.cut(host)
        opened: Any = cluster.wait_told(after, "IncidentOpened").body
        kinds = {cluster.records()[seq - 1].kind for seq in opened.evidence}
        assert "NodeUnreachable" in kinds
        assert len(kinds) > 1, f"one source only: {kinds}"
        cluster.wait_healed(after)
        yield self._step_s(generation)
        mended = cluster.seq()
        self.network.mend(host)
        cluster.wait_told(mended, "NodeReachable", node=host)
        for rank in ranks:
            cluster.wait_told(mended, "RankExited", task=self._wide, rank=rank)

    def _ranks_cut(self, cut: Callable[[str], object]) -> Iterator[float]:
        """The nodes are healthy all the time, and the link is mended while the task heals."""
        cluster, host, generation = self.cluster, self._host(), self._generation()
        peer, after = self._peer(host), cluster.seq()
        self._faulted = [self._wide]
        at_s = time.time()
        cut(host)
        yield at_s
        opened: Any = cluster.wait_told(after, "IncidentOpened", task=self._wide).body
        self.network.mend(host, TRAIN)
        self.network.mend_one_way(host, peer, TRAIN, missing_ok=True)
        cluster.wait_told(after, "IncidentClosed")
        yield self._step_s(generation)
        for kind in ("NodeUnreachable", "NodeQuarantined"):
            assert not cluster.told(after, kind), cluster.tail(after)
        print(f"{'':18} {opened.severity} {opened.why}")

    def _unheard(self, hosts: tuple[str, ...], cut: Callable[[], object]) -> Iterator[float]:
        """The control plane does not hear these hosts, and no task is touched."""
        cluster, after, pids = self.cluster, self.cluster.seq(), self._pids()
        self._faulted = []
        host = self._host()
        at_s = time.time()
        cut()
        yield at_s
        for name in hosts:
            cluster.wait_told(after, "NodeUnreachable", node=name)
        far = cluster.traced(self._wide)[-1]["iteration"] + STEPS_NUM
        cluster.wait_traced(self._wide, event="step", iteration=far)
        cluster.wait(lambda: time.time() > at_s + 3 * POLICY["replace_after_s"] or None, "a while")
        yield min(one["t"] for one in cluster.traced(self._wide)
                  if one["event"] == "step" and one["t"] > at_s)
        self.network.mend(BRAIN)
        self.network.mend(host)
        for one, other in ((host, BRAIN), (BRAIN, host)):
            self.network.mend_one_way(one, other, MANAGE, missing_ok=True)
        for name in hosts:
            cluster.wait_told(after, "NodeReachable", node=name)
        cluster.wait(lambda: cluster.task(self._wide)["iteration"] >= far or None,
                     "the reports come later")
        assert self._pids() == pids
        for kind in TOUCHING:
            assert not cluster.told(after, kind), cluster.tail(after)

    # --- what they look at ------------------------------------------------------------------------
    def _host(self) -> str:
        """A host of the wide task alone: that of its first member there."""
        ranks = sorted(self.cluster.task(self._wide)["ranks"], key=lambda rank: int(rank["rank"]))
        return next(str(rank["node"]) for rank in ranks
                    if not self.cluster.on(self.tasks["aside"], rank["node"]))

    def _peer(self, host: str) -> str:
        return next(str(rank["node"]) for rank in self.cluster.task(self._wide)["ranks"]
                    if rank["node"] != host)

    def _on(self, host: str) -> list[int]:
        return [task for task in self.tasks.values() if self.cluster.on(task, host)]

    def _generation(self) -> int:
        return int(self.cluster.task(self._wide)["generation"])

    def _pids(self) -> list[dict[int, int]]:
        return [self.cluster.pids(task) for task in self.tasks.values()]

    def _step_s(self, generation: int) -> float:
        """The time of the wide task's first step in a later generation."""
        def look() -> float | None:
            return min((line["t"] for line in self.cluster.traced(self._wide)
                        if line["event"] == "step" and line["generation"] > generation),
                       default=None)
        return self.cluster.wait(look, "the next step")


def compare(cluster: HostsCluster, demo: Demo, specs: dict[str, Spec], twins: Twins,
            results: list[Result]) -> list[bool]:
    """Compare the tasks' next checkpoints with undisturbed runs; whether each case's losses are
    equal. Raises AssertionError if the parameters differ."""
    equal = [True] * len(results)
    started = {}
    for name, task in demo.tasks.items():
        cluster.wait_told(cluster.seq(), "CheckpointPublished", task=task)
        started[name] = twins.start(specs[name])
        saved = int(started[name][0].name.removeprefix("iter-"))
        cluster.wait(lambda task=task, saved=saved: (
            cluster.task(task)["iteration"] >= saved or None), f"iteration {saved}")
        cluster.cancel(task)
    for name, task in demo.tasks.items():
        ours, out = started[name]
        losses = cluster.losses(task)
        twins.hold(ours, out, losses)
        wanted = list(read(out / "final")["numbers.losses"])
        if name == "wide":
            equal = [all(abs(losses[at] - wanted[at]) < LOSS_REL_MAX * wanted[at]
                         for at in result.iterations) for result in results]
    cluster.verify()
    return equal


@contextmanager
def started(folder: Path) -> Iterator[HostsCluster]:
    """The hosts and the cluster, removed at the end."""
    with (laid(f"unicron-d{os.getpid()}", (BRAIN, *HOSTS), (MANAGE, TRAIN)) as network,
          network_namespaces.within(network.namespace(BRAIN))):
        cluster = HostsCluster(folder, network, POLICY, num_slots=NUM_SLOTS)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def main() -> int:
    """Run all cases; print a line for each and the table, and write the rows."""
    if why := network_namespaces.why_not():
        print(f"error: {why}\nhint: run it as root on Linux, with the package iproute2",
              file=sys.stderr)
        return 2
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="demo-hosts-") as temporary:
        folder = Path(temporary)
        twins = Twins(folder)
        try:
            with started(folder) as cluster:
                print(f"hosts    {', '.join(HOSTS)} with {NUM_SLOTS} slots each; {BRAIN} has the "
                      "control plane and the server", flush=True)
                batch = {"global": 32, "micro": 2}  # few iterations, so few differences of rounding
                specs = {name: small(name, folder / "out", slots=slots, weight=weight, rates=RATES,
                                     checkpoint_every=20, batch=batch)
                         for name, slots, weight in (("wide", (1, 3), 1.0), ("aside", (1, 1), 9.0))}
                demo = Demo(cluster, specs)
                results = demo.run()
                equal = compare(cluster, demo, specs, twins, results)
        finally:
            twins.stop()
    rows: list[Row] = []
    for result, same in zip(results, equal, strict=True):
        for metric, value, unit in (("fault_to_step_s", result.fault_to_step_s, "s"),
                                    ("healthy_tasks_touched", result.touched, "tasks"),
                                    ("loss_equal", int(same), "yes")):
            rows.append(row(result.case, "unicron", metric, [value], unit))
    print(f"\n{'case':18} {'fault_to_step_s':>16} {'healthy_tasks_touched':>22} "
          f"{'loss_equal':>11}")
    for result, same in zip(results, equal, strict=True):
        print(f"{result.case:18} {result.fault_to_step_s:16.2f} {result.touched:22} {same:11}")
    print("\nThe parameters of both tasks EQUAL those of their undisturbed runs, and every "
          "decision was made again: VERIFIED.")
    file, took_s = ROOT / "build" / "bench" / "hosts.json", round(time.monotonic() - begin_s)
    write(rows, file, {"cores": os.cpu_count(), "load_1min": os.getloadavg()[0], "took_s": took_s})
    print(f"{len(rows)} rows in {file}; took {took_s} s")
    return int(any(result.touched for result in results) or not all(equal))


if __name__ == "__main__":
    sys.exit(main())
