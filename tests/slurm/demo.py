"""`make demo-slurm`: two tasks under a real Slurm, of which Slurm takes and gives the nodes.

cluster.sbatch starts the cluster on two nodes, and `unicron slurm grow` adds a third one. In the
end each task's losses, and its parameters and optimizer state after each case, are compared with
undisturbed runs. Rows are in build/bench/slurm.json, logs in build/demo-slurm. It needs root.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.recovery.rows import Row, row
from cluster_story import RATES
from hosts.demo import NUM_SLOWED, SLOW_S, Comparison, Result, say, shown
from slurm import site as sites
from slurm.cluster import SlurmCluster
from twins import Spec, Twins, small

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "demo-slurm"
NODES = ("n1", "n2", "n3")
NUM_SLOTS = 2
CASES = {
    "join": "unicron slurm grow 1: a job joins with a third node",
    "drain": "scontrol drains that node, and resumes it",
    "preemption": "an urgent job preempts the job that joined, which comes back after it",
    "lost_agent": "a slurmd is killed with its agent and ranks; a node replaces it",
}
UNITS = {"event_to_step_s": "s", "iterations_lost": "iterations", "loss_equal": "yes"}
SYSTEM = "unicron"
POLICY = {"silence_s_max": 3.0, "evidence_s_max": 4.0}
FOLLOW = "--every 1 --both-ways"
DOWN_S_MAX = 60.0


class Demo:
    """The cases, in the order of CASES: each leaves the wide task with four ranks."""

    def __init__(self, cluster: SlurmCluster, specs: dict[str, Spec], door: Path) -> None:
        self.cluster, self.site = cluster, cluster.site
        waits = {
            "apiVersion": "unicron/v1",
            "name": "door",
            "slots": {"min": 1, "max": 1},
            "throughput": {"1": 9e12},
            "command": ["sh", "-c", f"until [ -e {door} ]; do sleep 1; done"],
        }
        cluster.submit_job(
            [specs["aside"], waits, specs["wide"]], "-N2", env={"UNICRON_FOLLOW_OPTIONS": FOLLOW}
        )
        say("sbatch", f"job {cluster.job}: deploy/slurm/cluster.sbatch on two nodes")
        aside, _, wide = cluster.wait_tasks(3)
        self.tasks = {"aside": aside, "wide": wide}
        for task in self.tasks.values():
            for rank in range(NUM_SLOWED):
                cluster.hold(task, rank, event="done", then="slow", slow_s=SLOW_S)
        self._wide = self.tasks["wide"]
        cluster.wait_whole(self._wide, 2)
        self._joined = ""
        self._acts: dict[str, Callable[[], Iterator[float]]] = {
            "join": self._join,
            "drain": self._drain,
            "preemption": self._preemption,
            "lost_agent": self._lost,
        }

    def run(self, case: str) -> tuple[Result, int]:
        """Run a case; what it took, and how many iterations it has lost."""
        cluster = self.cluster
        generation, lost = self._generation(), self._lost_so_far()
        running = self._acts[case]()
        at_s = next(running)
        step_s = cluster.wait(
            lambda: min(
                (
                    line["t"]
                    for line in cluster.traced(self._wide)
                    if line["event"] == "step" and line["generation"] > generation
                ),
                default=None,
            ),
            "the next step",
        )
        for _ in running:
            pass
        cluster.wait_whole(self._wide, 4)
        cluster.wait_steps(self._wide)
        return Result(
            case,
            step_s - at_s,
            0,
            {name: int(cluster.task(task)["iteration"]) for name, task in self.tasks.items()},
        ), (self._lost_so_far() - lost)

    def _join(self) -> Iterator[float]:
        at_s = time.time()
        self._joined = self._grow()
        yield at_s

    def _grow(self) -> str:
        said = self.cluster.slurm("slurm", "grow", "1")
        say("", said)
        return said.split()[1]

    def _drain(self) -> Iterator[float]:
        cluster, after = self.cluster, self.cluster.seq()
        at_s = time.time()
        self.site.call("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=a fan is loud")
        yield at_s
        drained: Any = cluster.wait_told(after, "NodeDrained", node="n3").body
        say("", f"Unicron: n3 drained, {drained.reason}")
        cluster.wait_whole(self._wide, 2)
        self.site.call("scontrol", "update", "NodeName=n3", "State=RESUME")
        cluster.wait_told(after, "NodeUndrained", node="n3")

    def _preemption(self) -> Iterator[float]:
        cluster, after = self.cluster, self.cluster.seq()
        at_s = time.time()
        urgent = self.site.sbatch("-p", "high", "-w", "n3", "--wrap", "sleep 5")
        yield at_s
        drained: Any = cluster.wait_told(after, "NodeDrained", node="n3").body
        say("", f"Unicron: n3 drained, {drained.reason}")
        self.site.wait(lambda: self.site.ended(urgent) == "COMPLETED", "the urgent job", DOWN_S_MAX)
        say("", f"the urgent job {urgent} had n3 {time.time() - at_s:.0f} s after it was submitted")
        self.site.start_again(self._joined)

    def _lost(self) -> Iterator[float]:
        cluster, after = self.cluster, self.cluster.seq()
        assert cluster.on(self._wide, "n2")
        assert not cluster.on(self.tasks["aside"], "n2"), "n2 has the only rank of a task"
        at_s = time.time()
        self.site.kill("n2")
        yield at_s
        opened = cluster.wait_told(after, "IncidentOpened", task=self._wide)
        cluster.wait_told(after, "IncidentClosed", of=opened.seq, outcome="healed")
        self.site.wait(
            lambda: self.site.state("n2").startswith("down"), "Slurm sees it", DOWN_S_MAX
        )
        say(
            "",
            f"Slurm marks n2 down {time.time() - at_s:.1f} s after its end "
            f"(SlurmdTimeout {sites.DOWN_S} s); job {cluster.job}, {self.site.job(cluster.job)}, "
            "goes on without it",
        )
        drained: Any = cluster.wait_told(after, "NodeDrained", node="n2").body
        say("", f"Unicron: n2 drained, {drained.reason}")
        self.site.start_slurmd("n2")
        cluster.wait_told(after, "NodeUndrained", node="n2")
        self._grow()

    def _generation(self) -> int:
        return int(self.cluster.task(self._wide)["generation"])

    def _lost_so_far(self) -> int:
        return sum(int(self.cluster.task(task)["iterations_lost"]) for task in self.tasks.values())


@contextmanager
def started(folder: Path) -> Iterator[SlurmCluster]:
    """Slurm and a cluster's folder; all that runs there is ended."""
    with sites.running(folder / "site", *NODES) as site:
        yield SlurmCluster(folder, site, POLICY, num_slots=NUM_SLOTS)


def demo_slurm(cases: list[str], folder: Path) -> list[Row]:
    """Run these cases; the rows. Raises AssertionError if a case did not go as it must."""
    results: list[tuple[Result, int]] = []
    twins, door = Twins(folder), folder / "door"
    batch = {"global": 32, "micro": 2}
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
        for name, slots, weight in (("aside", (1, 1), 9.0), ("wide", (1, 4), 1.0))
    }
    try:
        with started(folder) as cluster:
            say(
                "slurm",
                f"slurmctld, and a slurmd for each of {', '.join(NODES)}, with "
                f"{NUM_SLOTS} slots each",
            )
            demo = Demo(cluster, specs, door)
            for case in cases:
                results.append(found := demo.run(case))
                say(
                    case,
                    f"{CASES[case]}: next step after {found[0].fault_to_step_s:.2f} s, "
                    f"{found[1]} iterations lost",
                )
            equal = Comparison(demo, specs, [result for result, _ in results]).run(twins)
            door.touch()
            cluster.site.wait(lambda: cluster.site.ended(cluster.job), "the job ends", DOWN_S_MAX)
            say("end", f"all tasks have ended, and job {cluster.job} with them")
    finally:
        twins.stop()
    return [
        row(result.case, SYSTEM, metric, [value], unit)
        for (result, lost), same in zip(results, equal, strict=True)
        for (metric, unit), value in zip(
            UNITS.items(), (result.fault_to_step_s, lost, int(same)), strict=True
        )
    ]


def main() -> int:
    """Run the cases; print a line for each and the table, and write the rows."""
    parser = argparse.ArgumentParser(prog="make demo-slurm")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for logs and checkpoints")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "slurm.json")
    options = parser.parse_args()
    if why := sites.why_not():
        print(f"error: {why}", file=sys.stderr)
        return 2
    return shown(
        lambda: demo_slurm(list(CASES), options.folder),
        options.folder,
        options.out,
        UNITS,
        {"iterations_lost": 0, "loss_equal": 1},
        "Slurm and all its processes are gone",
    )


if __name__ == "__main__":
    sys.exit(main())
