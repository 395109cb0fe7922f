"""`make demo-hosts`: two tasks train on three hosts; a fourth has the control plane and the server.

Hosts die and cables are cut, one case after the other. In the end each task's losses, and its
parameters and optimizer state after each case, are compared with undisturbed runs. The hosts are
network namespaces, so it needs root. Rows are in build/bench/hosts.json, logs in build/demo-hosts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import network_namespaces
from bench.recovery.rows import Row, row, write
from cluster_story import RATES
from hosts.cluster import BRAIN, MANAGE, TRAIN, HostsCluster
from hosts.network import laid
from reference import (
    NUM_ORDERS,
    compare,
    read,
    state_folder,
    tolerance,
)
from twins import SAME_REL_MAX, Spec, Twins, small
from unicron.events.network_address import split_endpoint

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("h1", "h2", "h3")
NUM_SLOTS = 2
POLICY = {"silence_s_max": 3.0, "evidence_s_max": 4.0, "hang_s_min": 3.0, "replace_after_s": 4.0}
"""`replace_after_s` is short, so that the control plane's own cut lasts longer."""
TOUCHING = ("IncidentOpened", "Quiesce", "Reconfigure", "StartRank", "StopRank", "TaskPlaced")
STEPS_NUM = 10
"""The least iterations under a cut that must change nothing."""
SLOW_S = 0.3
"""Every rank sleeps for so long in each iteration, so that the cases take few iterations: each one
is trained three more times for the comparison."""
NUM_SLOWED = 16
"""More numbers of ranks than a task gets."""
FOLDER = ROOT / "build" / "demo-hosts"
CASES = {
    "host_killed": "a host is switched off",
    "agent_cut": "an agent loses the control plane, ranks reach each other",
    "host_cut": "all cables of a host are pulled",
    "ranks_cut": "only the cable between ranks is pulled",
    "control_plane_cut": "the control plane loses all hosts",
    "one_way_reports": "what an agent sends is lost",
    "one_way_orders": "what is sent to an agent is lost",
    "one_way_ranks": "what one host's ranks send to another's is lost",
}
UNITS = {"fault_to_step_s": "s", "healthy_tasks_touched": "tasks", "loss_equal": "yes"}
SYSTEM = "unicron"


class Result(NamedTuple):
    """What one case has cost."""

    case: str
    fault_to_step_s: float
    touched: int
    reached: dict[str, int]
    """The iteration of each task when all is mended."""


class Demo:
    """The cases, in the order of `run`. Each leaves all hosts joined and all tasks whole."""

    def __init__(self, cluster: HostsCluster, specs: dict[str, Spec]) -> None:
        self.cluster, self.network = cluster, cluster.network
        self.tasks = {name: cluster.submit(spec) for name, spec in specs.items()}
        self._sizes = {self.tasks[name]: int(spec["slots"]["max"]) for name, spec in specs.items()}
        for task in self.tasks.values():
            for rank in range(NUM_SLOWED):
                cluster.hold(task, rank, event="done", then="slow", slow_s=SLOW_S)
        self._wide = self.tasks["wide"]
        self._faulted: list[int] = []
        """The tasks that the present case may touch."""
        self._acts: dict[str, Callable[[], Iterator[float]]] = {
            "host_killed": self._host_killed,
            "agent_cut": lambda: self._unheard(
                (self._host(),), lambda: self.network.cut(self._host(), MANAGE)
            ),
            "host_cut": self._host_cut,
            "ranks_cut": lambda: self._ranks_cut(lambda host: self.network.cut(host, TRAIN)),
            "control_plane_cut": lambda: self._unheard(HOSTS, lambda: self.network.cut(BRAIN)),
            "one_way_reports": lambda: self._unheard(
                (self._host(),), lambda: self.network.cut_one_way(self._host(), BRAIN, MANAGE)
            ),
            "one_way_orders": lambda: self._unheard(
                (self._host(),), lambda: self.network.cut_one_way(BRAIN, self._host(), MANAGE)
            ),
            "one_way_ranks": lambda: self._ranks_cut(
                lambda host: self.network.cut_one_way(host, self._peer(host), TRAIN)
            ),
        }

    def run(self, case: str) -> Result:
        """Run a case."""
        cluster = self.cluster
        for task, num in self._sizes.items():
            cluster.wait_whole(task, num)
            cluster.wait_paced(task, num)
        after = cluster.seq()
        running = self._acts[case]()
        at_s = next(running)
        step_s = next(running)
        healthy = set(self.tasks.values()) - set(self._faulted)
        touched = healthy & {
            getattr(record.body, "task", 0)
            for record in cluster.records(after)
            if record.kind in TOUCHING
        }
        for _ in running:  # all is mended
            pass
        cluster.wait_steps(self._wide)
        return Result(
            case,
            step_s - at_s,
            len(touched),
            {name: int(cluster.task(task)["iteration"]) for name, task in self.tasks.items()},
        )

    def evidence(self, after: int) -> list[str]:
        """Why each incident after `after` was opened, and whom failed collectives name."""
        lines = [
            f"{record.body.severity}: {record.body.why}"
            for record in self.cluster.told(after, "IncidentOpened")
        ]
        for record in self.cluster.told(after, "CollectiveFailed"):
            if peer := record.body.peer:
                lines.append(
                    f"rank {record.body.rank}'s collective failed with {split_endpoint(peer)[0]}"
                )
        return list(dict.fromkeys(lines))

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
        assert len(kinds | {"NodeUnreachable"}) == len(kinds) > 1, f"one source only: {kinds}"
        cluster.wait_healed(after)
        yield self._step_s(generation)
        mended = cluster.seq()
        self.network.mend(host)
        cluster.wait_told(mended, "NodeReachable", node=host)
        for rank in ranks:
            cluster.wait_told(mended, "RankExited", task=self._wide, rank=rank)
        stale = {
            record.seq
            for record in cluster.records(mended)
            if record.source.startswith(f"{host}/")
            and getattr(record.body, "generation", 0) == generation
        }
        caused = {record.kind for record in cluster.records(mended) if record.cause in stale}
        assert not caused - {"StopRank"}, f"stale ranks caused {caused}"

    def _ranks_cut(self, cut: Callable[[str], object]) -> Iterator[float]:
        """The nodes are healthy all the time, and the link is mended while the task heals."""
        cluster, host, generation = self.cluster, self._host(), self._generation()
        peer, after = self._peer(host), cluster.seq()
        self._faulted = [self._wide]
        at_s = time.time()
        cut(host)
        yield at_s
        cluster.wait_told(after, "IncidentOpened", task=self._wide)
        self.network.mend(host, TRAIN)
        self.network.mend_one_way(host, peer, TRAIN, missing_ok=True)
        cluster.wait_told(after, "IncidentRecovering")
        yield self._step_s(generation)
        for kind in ("NodeUnreachable", "NodeQuarantined"):
            assert not cluster.told(after, kind), cluster.tail(after)

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
        quiet_s = at_s + 3 * POLICY["replace_after_s"]  # longer than every limit of the policy
        cluster.wait(lambda: time.time() > quiet_s or None, "a while")
        yield min(
            one["t"]
            for one in cluster.traced(self._wide)
            if one["event"] == "step" and one["t"] > at_s
        )
        self.network.mend(BRAIN)
        self.network.mend(host)
        for one, other in ((host, BRAIN), (BRAIN, host)):
            self.network.mend_one_way(one, other, MANAGE, missing_ok=True)
        for name in hosts:
            cluster.wait_told(after, "NodeReachable", node=name)
        cluster.wait(
            lambda: cluster.task(self._wide)["iteration"] >= far or None, "the reports come later"
        )
        for kind in TOUCHING:
            assert not cluster.told(after, kind), f"a task was touched\n{cluster.tail(after)}"
        assert self._pids() == pids, f"ranks were replaced: {pids}, now {self._pids()}"

    # --- what they look at ------------------------------------------------------------------------
    def _host(self) -> str:
        """A host of the wide task alone: that of its first member there."""
        ranks = sorted(self.cluster.task(self._wide)["ranks"], key=lambda rank: int(rank["rank"]))
        return next(
            str(rank["node"])
            for rank in ranks
            if not self.cluster.on(self.tasks["aside"], rank["node"])
        )

    def _peer(self, host: str) -> str:
        return next(
            str(rank["node"])
            for rank in self.cluster.task(self._wide)["ranks"]
            if rank["node"] != host
        )

    def _on(self, host: str) -> list[int]:
        return [task for task in self.tasks.values() if self.cluster.on(task, host)]

    def _generation(self) -> int:
        return int(self.cluster.task(self._wide)["generation"])

    def _pids(self) -> list[dict[int, int]]:
        return [self.cluster.pids(task) for task in self.tasks.values()]

    def _step_s(self, generation: int) -> float:
        """The time of the wide task's first step in a later generation."""

        def look() -> float | None:
            return min(
                (
                    line["t"]
                    for line in self.cluster.traced(self._wide)
                    if line["event"] == "step" and line["generation"] > generation
                ),
                default=None,
            )

        return self.cluster.wait(look, "the next step")


class Comparison:
    """Compares each task, after each case, with undisturbed runs that sum in different orders."""

    def __init__(self, demo: Demo, specs: dict[str, Spec], results: list[Result]) -> None:
        self._demo, self._specs, self._results = demo, specs, results
        self._steps: dict[str, list[int]] = {}
        """By task: the iteration of the first checkpoint after each case."""
        self._saved: dict[str, dict[int, Path]] = {}

    def run(self, twins: Twins) -> list[bool]:
        """End the tasks; for each case, whether losses, parameters and optimizer are equal."""
        cluster = self._demo.cluster
        for name, task in self._demo.tasks.items():
            self._wait_saved(name, task)
        cluster.cancel(*self._demo.tasks.values())
        say(
            "compare",
            f"each task with {NUM_ORDERS} undisturbed runs, in one process each, to "
            + ", ".join(f"{name} {steps[-1]}" for name, steps in self._steps.items()),
        )
        runs = {
            name: [
                twins.start(
                    self._specs[name],
                    "--order",
                    str(order),
                    "--iterations",
                    str(steps[-1]),
                    "--keep",
                    *map(str, dict.fromkeys(steps)),
                )[1]
                for order in range(NUM_ORDERS)
            ]
            for name, steps in self._steps.items()
        }
        equal = [True] * len(self._results)
        for name, task in self._demo.tasks.items():
            for out in runs[name]:
                twins.trained(out)
            losses = cluster.losses(task)
            for number, step in enumerate(self._steps[name]):
                equal[number] &= self._is_equal(name, step, losses, runs[name])
        cluster.verify()
        return equal

    def _wait_saved(self, name: str, task: int) -> None:
        """Wait until the task has saved, and told its losses, after the last case."""
        cluster, output = self._demo.cluster, Path(self._specs[name]["train"]["output"])
        last = self._results[-1].reached[name]

        def look() -> dict[int, Path] | None:
            saved = {
                record.body.step_version: output / record.body.path
                for record in cluster.told(0, "CheckpointSaved", task=task)
            }
            return saved if max(saved, default=-1) >= last else None

        saved = self._saved[name] = cluster.wait(look, f"a checkpoint of {name} after {last}")
        steps = self._steps[name] = [
            min(step for step in saved if step >= result.reached[name]) for result in self._results
        ]
        cluster.wait(
            lambda: cluster.task(task)["iteration"] >= steps[-1] or None,
            f"{name}'s iteration {steps[-1]}",
        )

    def _is_equal(self, name: str, step: int, losses: list[float], runs: list[Path]) -> bool:
        ours, (first, *others) = self._saved[name][step], [state_folder(one, step) for one in runs]
        kept = list(read(ours)["numbers.losses"])
        assert len(kept) == step, f"{name} at {step} has {len(kept)} losses"
        assert all(
            abs(told - loss) <= SAME_REL_MAX * loss
            for told, loss in zip(losses, kept, strict=False)
        ), f"{name}'s reported losses"
        gap, noises = compare(ours, first), [compare(other, first) for other in others]
        for what in ("loss_rel", "param_rel", "optimizer_rel"):
            most = tolerance([getattr(noise, what) for noise in noises])
            if not getattr(gap, what) <= most:
                say("BROKEN", f"{name} at {step}: {what} {getattr(gap, what):.1e} > {most:.1e}")
                return False
        return True


BEGAN_S = time.monotonic()


def say(label: str, text: str) -> None:
    """Print a line with the time since the start."""
    elapsed = f"{time.monotonic() - BEGAN_S:.1f} s"
    print(f"{elapsed:>8}  {label:<18} {text}".rstrip(), flush=True)


@contextmanager
def started(folder: Path) -> Iterator[HostsCluster]:
    """The hosts and the cluster, removed at the end."""
    with (
        laid(f"unicron-d{os.getpid()}", (BRAIN, *HOSTS), (MANAGE, TRAIN)) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        cluster = HostsCluster(folder, network, POLICY, num_slots=NUM_SLOTS)
        try:
            cluster.start()
            yield cluster
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave a part
            cluster.stop()


def demo_hosts(cases: list[str], folder: Path) -> list[Row]:
    """Run these cases; the rows. Raises AssertionError if a case did not go as it must."""
    results: list[Result] = []
    twins = Twins(folder)
    try:
        with started(folder) as cluster:
            say(
                "hosts",
                f"{', '.join(HOSTS)} with {NUM_SLOTS} slots each; {BRAIN} has the "
                "control plane and the server",
            )
            batch = {"global": 32, "micro": 2}  # few iterations, so few differences of rounding
            specs = {
                name: small(
                    name,
                    folder / "out",
                    slots=slots,
                    weight=weight,
                    rates=RATES,
                    checkpoint_every=10,
                    batch=batch,
                )
                for name, slots, weight in (("wide", (1, 3), 1.0), ("aside", (1, 1), 9.0))
            }
            demo = Demo(cluster, specs)
            say("tasks", "wide with 3 ranks on three hosts, aside with 1 rank: small GPTs")
            for case in cases:
                after = cluster.seq()
                results.append(result := demo.run(case))
                say(
                    case,
                    f"{CASES[case]}: next step after {result.fault_to_step_s:.2f} s, "
                    f"{result.touched} healthy tasks touched",
                )
                for line in demo.evidence(after):
                    say("", line)
            equal = Comparison(demo, specs, results).run(twins)
    finally:
        twins.stop()
    return [
        row(result.case, SYSTEM, metric, [value], unit)
        for result, same in zip(results, equal, strict=True)
        for (metric, unit), value in zip(
            UNITS.items(), (result.fault_to_step_s, result.touched, int(same)), strict=True
        )
    ]


def table_of(rows: list[Row], units: Mapping[str, str]) -> str:
    """One line for each case, a column for each of these metrics."""
    found = {(one.case, one.metric): one.value or 0 for one in rows}
    lines = [f"{'case':18}" + "".join(f"{metric:>{len(metric) + 2}}" for metric in units)]
    for case in dict.fromkeys(one.case for one in rows):
        lines.append(
            f"{case:18}"
            + "".join(
                f"{found[case, metric]:{len(metric) + 2}.{2 if unit == 's' else 0}f}"
                for metric, unit in units.items()
            )
        )
    return "\n".join(lines)


def shown(
    run: Callable[[], list[Row]],
    folder: Path,
    out: Path,
    units: Mapping[str, str],
    wanted: Mapping[str, float],
    gone: str,
) -> int:
    """Run a demo in an empty folder, print its table and write its rows. Returns the exit status:
    0 if the metrics in `wanted` have these values. `gone`: what an interrupt has removed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        rows = run()
    except AssertionError as error:
        say("BROKEN", f"{error}; logs are in {folder}")
        return 1
    except KeyboardInterrupt:
        say("end", f"interrupted; {gone}")
        return 130
    print(f"\n{table_of(rows, units)}")
    took_s = round(time.monotonic() - BEGAN_S)
    write(rows, out, {"cores": os.cpu_count(), "load_1min": os.getloadavg()[0], "took_s": took_s})
    print(f"\n{len(rows)} rows in {out}; took {took_s} s")
    return int(any(wanted.get(one.metric, one.value) != one.value for one in rows))


def main() -> int:
    """Run the cases; print a line for each and the table, and write the rows."""
    parser = argparse.ArgumentParser(prog="make demo-hosts")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for logs and checkpoints")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "hosts.json")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    if why := network_namespaces.why_not():
        print(f"error: {why} (run it as root on Linux, with the package iproute2)", file=sys.stderr)
        return 2
    return shown(
        lambda: demo_hosts(cases, options.folder),
        options.folder,
        options.out,
        UNITS,
        {"healthy_tasks_touched": 0, "loss_equal": 1},
        "all hosts are removed",
    )


if __name__ == "__main__":
    sys.exit(main())
