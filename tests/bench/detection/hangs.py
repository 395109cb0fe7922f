"""The cases of a hang: a rank of a layout sleeps for ever in its forward, its peers wait for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.detection import faults
from bench.detection.faults import Trial
from bench.recovery.trial import NotStarted
from real_cluster import RealCluster, running
from twins import small
from unicron.control_plane.incidents.hangs import FIRST_MORE_S
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions
from unicron.events.spec.policy import Policy

NODES_NUM = 2
USUAL_NUM = 20
"""Iterations before the hang whose median is the usual iteration."""
FIRST_ITERATION_S_MAX = 5.0
"""The policy's limit of a first iteration, here; by default it is 20 minutes."""
MODEL = {"num_layers": 2, "hidden": 64, "num_heads": 2, "sequence": 64}
BATCH = {"global": 8, "micro": 2}
EVENT = "forward"
LOOK_S_MAX = 1.0
"""How long after its limit a hang in the first iteration may be acted upon."""
Spec = dict[str, Any]


class Hang(NamedTuple):
    """Rank `victim` hangs in the usual course, or in the first iteration."""

    axes: Axes
    victim: int
    is_first: bool = False

    @property
    def num_ranks(self) -> int:
        return num_positions(self.axes)

    @property
    def limit_s(self) -> float:
        """The least limit that Unicron's policy has for it: a peer with one limit gets the same."""
        return FIRST_ITERATION_S_MAX if self.is_first else Policy().hang_s_min

    @property
    def policy(self) -> dict[str, float]:
        """The policy is the default one, but for the limit of a first iteration."""
        limits = {"hang_s_min": Policy().hang_s_min}  # other tests of real clusters have none
        return limits | ({"first_iteration_s_max": self.limit_s} if self.is_first else {})

    @property
    def asked(self) -> dict[str, Any]:
        """What the victim's trace is asked to do (rank_trace.py)."""
        return {"event": EVENT, "then": "sleep"} | ({"iteration": 0} if self.is_first else {})


FIRST = "hang_first_iteration"
HANGS = {
    "hang_tp2dp2": Hang(Axes(tp=2, dp=2), 1),
    "hang_pp2dp2": Hang(Axes(pp=2, dp=2), 2),
    "hang_tp2pp2dp2": Hang(Axes(tp=2, pp=2, dp=2), 5),
    FIRST: Hang(Axes(tp=2, dp=2), 1, is_first=True),
}
CASES = tuple(HANGS)


def goal_s(case: str, iteration_s: float) -> float:
    """The longest time from the hang to the order that acts."""
    if HANGS[case].is_first:
        return FIRST_ITERATION_S_MAX + FIRST_MORE_S + LOOK_S_MAX
    return 3 * iteration_s + 5


def spec_of(hang: Hang, folder: Path) -> Spec:
    """The task, also that of the peers."""
    return small(
        "hang",
        folder,
        slots=(1, hang.num_ranks),
        checkpoint_every=0,
        model=MODEL,
        batch=BATCH,
        parallel={"tensor": [hang.axes.tp], "pipeline": [hang.axes.pp]},
    )


def trials(folder: Path, case: str, num: int, say: Callable[[str], None]) -> list[Trial]:
    """`num` hangs, each in a cluster of its own: a second one on a slot is treated otherwise."""
    found: list[Trial] = []
    while len(found) < num and not faults.never(found):
        place = folder / str(len(found))
        place.mkdir(parents=True)
        hang = HANGS[case]
        try:
            with running(
                place, NODES_NUM, hang.policy, num_slots=hang.num_ranks // NODES_NUM
            ) as cluster:
                found.append(_strike(cluster, case))
        except (AssertionError, NotStarted) as error:  # what was awaited did not come
            found.append(Trial(case, "unicron", None, str(error).partition("\n")[0]))
        took = found[-1].why or f"{found[-1].detect_s:.3f} s"
        say(f"{case} unicron {len(found)} of {num}: {took}")
    return found


def _strike(cluster: RealCluster, case: str) -> Trial:
    hang = HANGS[case]
    task, usual_s = cluster.submit(spec_of(hang, cluster.path)), None
    if not hang.is_first:
        cluster.wait_whole(task, hang.num_ranks)
        cluster.wait_paced(task, hang.num_ranks)
        steps_s = [
            step_s
            for record in cluster.told(0, "TaskProgressed", task=task)
            for step_s in record.body.step_s  # type: ignore[attr-defined]
        ]
        usual_s = median(steps_s[-USUAL_NUM:])
    cluster.hold(task, hang.victim, **hang.asked)  # long before a new process has a model
    began_s = cluster.wait_held(task, hang.victim, 0.0)["t"]
    before = cluster.pids(task)
    stopped = cluster.wait_told(0, "StopRank", task=task, rank=hang.victim)
    cluster.wait_whole(task, hang.num_ranks)
    opened = cluster.told(0, "IncidentOpened", task=task)
    closed = cluster.wait_told(0, "IncidentClosed", of=opened[0].seq)
    named = [record.body.ranks for record in opened]
    return Trial(
        case,
        "unicron",
        stopped.at_s - began_s,
        iteration_s=usual_s,
        named=float(named == [(hang.victim,)]),
        iterations_lost=float(closed.body.iterations_lost),
        healthy_touched=float(len(before.keys() - cluster.kept(task, before) - {hang.victim})),
    )
