"""`make bench-scale`: what 64, 256 and 1,024 agents cost the control plane and the server.

The printed results are also written to build/bench/scale.json. docs/guides/bench-scale.md describes
the phases and has the results of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.recovery.rows import Row, finish, row
from bench.scale.cluster import Cluster, Watch
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.types import Member
from unicron.events.spec.job import API_VERSION
from unicron.events.timing import BEAT_S

ROOT = Path(__file__).resolve().parents[3]
CASES = {
    "agents_64": (64, 1),
    "agents_256": (256, 1),
    "agents_1024": (1024, 1),
    "agents_4096": (4096, 1),
    "agents_1024_ranks_8": (1024, 8),
}
"""The number of agents, and of the ranks of each."""
CPU_ONLY = ("agents_4096",)
"""More agents than the cores of one machine can play at their rates: only CPU seconds count."""
RARE_BEAT_S = 2.0
"""The interval of heartbeats there. `core_share` is that for each second of the usual rate."""
TASK_NODES = 16
PP = 4
QUIET_S, SETTLE_S = 20.0, 5.0
NUM_FAULTS, FAULT_EVERY_S = 60, 1.0
AGENT_DESCRIPTORS, OTHER_DESCRIPTORS = 2, 256
"""An agent has two connections to the server, whose process has the most descriptors."""
SYSTEM = "unicron"
GOALS = {"core_share": 0.5, "decision_p99_ms": 100.0, "rack_lost_s": 1.0}
GROWING, GROWTH_MAX = ("join_cpu_s", "start_cpu_s", "core_share", "rack_cpu_s"), 2.2
"""CPU seconds that grow with the agents. 2 is linear, the rest is the noise of a shared machine."""
UNITS = {
    "core_share": "cores",
    "decision_p99_ms": "ms",
    "rack_lost_s": "s",
    "rack_healed_s": "s",
    "join_all_s": "s",
    "record_us": "us",
    "memory_mb": "MB",
    "server_memory_mb": "MB",
    "join_cpu_s": "s",
    "start_cpu_s": "s",
    "rack_cpu_s": "s",
    "rack_record_us": "us",
}
GOAL_CASE = "agents_1024"
Found = dict[str, float]


def main() -> None:
    """Measure, compare with the goals."""
    parser = argparse.ArgumentParser(prog="make bench-scale")
    parser.add_argument("-n", type=int, default=1, help="trials of each case")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "scale.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    began_s, found = time.monotonic(), dict[str, list[Found]]()
    try:
        for case in options.cases:
            num, num_ranks = CASES[case]
            check_descriptors(num)
            for _ in range(options.n):
                with tempfile.TemporaryDirectory(prefix="unicron-scale-") as folder:
                    found.setdefault(case, []).append(
                        asyncio.run(trial(Path(folder), case, num, num_ranks))
                    )
    except KeyboardInterrupt:
        sys.exit("interrupted")
    rows = rows_of(found)
    finish(rows, options.out, began_s, held_to(rows), rounds=options.n)


def check_descriptors(num_agents: int) -> None:
    """End with one line if the server could not hold the connections of so many agents."""
    wanted = AGENT_DESCRIPTORS * num_agents + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, -1) and hard < wanted:
        print(
            f"bench-scale: {num_agents} agents need {wanted} file descriptors, the limit is "
            f"{hard}\nhint: ulimit -n {wanted}, or fewer agents: CASES=agents_64",
            file=sys.stderr,
        )
        sys.exit(2)
    if soft not in (resource.RLIM_INFINITY, -1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


# --- one trial ----------------------------------------------------------------------------------
async def trial(folder: Path, case: str, num: int, num_ranks: int) -> Found:
    """Start a cluster of `num` agents of `num_ranks` ranks, take it through all phases, stop it."""
    cpu_only = case in CPU_ONLY
    cluster = Cluster(folder, num, num_ranks, RARE_BEAT_S if cpu_only else BEAT_S)
    try:
        await cluster.start()
        found = await joined(cluster, num)
        found |= await started(cluster, num, num_ranks)
        found |= await quiet(cluster, num)
        if not cpu_only:
            found |= await faults(cluster)
            found |= await rack_lost(cluster, num)
        found |= {
            "memory_mb": cluster.memory_mb("control_plane"),
            "server_memory_mb": cluster.memory_mb("server"),
        }
        if cpu_only:
            del found["join_all_s"]
        late = cluster.watch.kinds["NodeReachable"]
        print(
            f"{case}  {late} verdicts about agents that only waited for a core: "
            "take the times with care\n" * bool(late),
            end="",
            flush=True,
        )
    finally:
        await cluster.stop()
    print(
        f"{case}  " + "  ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True
    )
    return found


async def joined(cluster: Cluster, num: int) -> Found:
    """All agents join at the same time."""
    watch, began_s, cpu_s = cluster.watch, time.time(), cluster.cpu_s()
    cluster.tell("join")
    await cluster.until(lambda: watch.kinds["NodeJoined"] >= num, f"{num} agents joined")
    last_s = max(
        seen_s
        for seen_s, record in zip(watch.seen_s, watch.records, strict=True)
        if isinstance(record.body, r.NodeJoined)
    )
    return {"join_all_s": last_s - began_s, "join_cpu_s": cluster.cpu_s() - cpu_s}


async def started(cluster: Cluster, num: int, num_ranks: int) -> Found:
    """Tasks take all slots; all their ranks start."""
    watch = cluster.watch
    num_tasks = num // TASK_NODES
    cpu_s, own_cpu_s, seq = cluster.cpu_s(), cluster.cpu_s("control_plane"), len(watch.records)
    for number in range(num_tasks):
        await asyncio.to_thread(cluster.client.post, "/v1/tasks", job(number, num_ranks))
    await cluster.until(lambda: len(watch.training) >= num_tasks, f"{num_tasks} tasks train")
    own_cpu_s = cluster.cpu_s("control_plane") - own_cpu_s
    return {
        "start_cpu_s": cluster.cpu_s() - cpu_s,
        "record_us": own_cpu_s / (len(watch.records) - seq) * 1e6,
    }


def job(number: int, tp: int) -> dict[str, object]:
    """The spec of a task on TASK_NODES nodes of `tp` slots, or on fewer after a loss."""
    num_ranks = TASK_NODES * tp
    return {
        "apiVersion": API_VERSION,
        "name": f"task-{number}",
        "slots": {"min": tp * PP, "max": num_ranks},
        "train": {
            "iterations": 10**9,
            "output": f"/srv/task-{number}",
            "batch": {"global": num_ranks, "micro": 1},
            "model": {"num_layers": 48, "hidden": 4096, "num_heads": 32, "sequence": 2048},
            "parallel": {"tensor": [tp], "pipeline": [PP]},
        },
    }


async def quiet(cluster: Cluster, num: int) -> Found:
    """Only heartbeats, progress and stored in-memory checkpoints, at their usual rates.

    The time is that in which the agents send these heartbeats at their own rate: if the cores are
    too few for them, it is shorter than the measurement."""
    await asyncio.sleep(SETTLE_S)
    beats, cpu_s, began_s = await cluster.num_beats(), cluster.cpu_s(), time.monotonic()
    await asyncio.sleep(QUIET_S)
    beats, cpu_s = await cluster.num_beats() - beats, cluster.cpu_s() - cpu_s
    lasted_s = time.monotonic() - began_s
    return {"core_share": cpu_s / min(beats * BEAT_S / num, lasted_s)}


async def faults(cluster: Cluster) -> Found:
    """One rank after another is killed, and heals in memory."""
    watch = cluster.watch
    first, struck = len(watch.records), set[tuple[int, int]]()

    def unharmed() -> list[tuple[int, Member]]:
        return [
            (number, one)
            for number, latest in sorted(watch.whole.items())
            for one in latest.members
            if (number, one.rank) not in struck
        ]

    for _ in range(NUM_FAULTS):
        await cluster.until(lambda: bool(unharmed()), "a task without an incident")
        number, member = random.choice(unharmed())
        struck.add((number, member.rank))
        cluster.tell(f"kill {member.node} {number} {member.rank}")
        await asyncio.sleep(FAULT_EVERY_S)
    await healed(cluster)
    return {"decision_p99_ms": 1e3 * percentile(decision_times_s(watch, first), 0.99)}


async def rack_lost(cluster: Cluster, num: int) -> Found:
    """A node of each task is lost, all at once; the tasks go on with the others."""
    watch, first, cpu_s = cluster.watch, len(cluster.watch.records), cluster.cpu_s()
    lost = {f"n{number:05}" for number in range(0, num, TASK_NODES)}
    cluster.tell("lose " + ",".join(lost))
    await cluster.until(lambda: watch.unreachable >= lost, f"{len(lost)} nodes are lost")
    await healed(cluster)
    verdicts = [
        record
        for record in watch.records[first:]
        if isinstance(record.body, r.NodeUnreachable) and record.body.node in lost
    ]
    caused = {record.seq for record in verdicts}
    orders = [
        (seen_s, record.cause in caused)
        for seen_s, record in zip(watch.seen_s[first:], watch.records[first:], strict=True)
        if isinstance(record.body, o.ORDERS)
    ]
    began_s, all_s = verdicts[0].at_s, [seen_s for seen_s, _ in orders]
    # On a slow machine, a collective may fail before the first verdict, and cause all orders.
    at_once_s = [seen_s for seen_s, at_once in orders if at_once] or all_s
    cpu_s = cluster.cpu_s() - cpu_s
    return {
        "rack_lost_s": max(at_once_s) - began_s,
        "rack_healed_s": max(all_s) - began_s,
        "rack_cpu_s": cpu_s,
        # How many records follow depends on which tasks fail again while nodes are being lost.
        "rack_record_us": cpu_s / (len(watch.records) - first) * 1e6,
    }


async def healed(cluster: Cluster) -> None:
    """Wait until all tasks train and no incident is open."""
    watch = cluster.watch
    await cluster.until(lambda: len(watch.whole) == len(watch.latest), "all tasks are whole")


def decision_times_s(watch: Watch, first: int) -> list[float]:
    """From each report, as it occurred at a rank, to the publication of each order that it caused:
    of the records from index `first` on."""
    times_s: list[float] = []
    for record, seen_s in zip(watch.records[first:], watch.seen_s[first:], strict=True):
        if isinstance(record.body, o.ORDERS):
            cause = watch.records[record.cause - 1]
            if not cause.source.startswith("leader/"):
                times_s.append(seen_s - cause.occurred_s)
    return times_s


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


# --- all trials ---------------------------------------------------------------------------------
def rows_of(found: dict[str, list[Found]]) -> list[Row]:
    """The rows of all cases, with the growth of CPU time to the case before."""
    rows: list[Row] = []
    before: tuple[str, int] | None = None
    for case, trials in found.items():
        num, num_ranks = CASES[case]
        rows += [
            row(case, SYSTEM, metric, [one.get(metric) for one in trials], unit)
            for metric, unit in UNITS.items()
            if metric in trials[0]
        ]
        if before is not None and num_ranks == 1:
            doublings = math.log2(num / before[1])
            rows += [
                row(
                    case,
                    SYSTEM,
                    f"{metric}_growth",
                    [growth(found[before[0]], trials, metric, doublings)],
                    "x a doubling",
                )
                for metric in GROWING
                if metric in trials[0]
            ]
        before = case, num
    return rows


def growth(fewer: Sequence[Found], more: Sequence[Found], metric: str, doublings: float) -> float:
    """By how much the metric grows when the agents are doubled; 2 is linear."""
    return (median(one[metric] for one in more) / median(one[metric] for one in fewer)) ** (
        1 / doublings
    )


def held_to(rows: Sequence[Row]) -> list[str]:
    """The goals, at the size that they are for; the growth at every size."""
    return [
        f"{'holds ' if one.value <= goal else 'misses'}  {one.case}, {one.metric}: "
        f"{one.value:.3g}, goal at most {goal:g}"
        for one in rows
        if one.value is not None and (goal := goal_of(one.case, one.metric)) is not None
    ]


def goal_of(case: str, metric: str) -> float | None:
    """The goal of a metric in a case, None if it has none."""
    if metric.endswith("_growth"):
        return GROWTH_MAX
    return GOALS.get(metric) if case == GOAL_CASE else None


if __name__ == "__main__":
    main()
