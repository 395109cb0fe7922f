"""Random planning problems: running tasks, a few of them faulted, and waiting tasks.

T(t, x) is that of data parallelism. The micro-batches of an iteration are divided among replicas;
the replica with the most sets the speed. So T rises in steps that become smaller.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from msgspec.structs import replace
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.planner.solver.candidates import Candidates
from unicron.control_plane.throughput.transition_cost import Transition

MTBF_GPU_S = 7.2e6
GPU_FLOPS = 1.5e14
NODE_NUM = 8
SIZES = {"6x128": (6, 128), "100x4096": (100, 4096), "1000x100000": (1000, 100_000)}


def candidates_of(found: Sequence[Sequence[tuple[int, int]]]) -> Candidates:
    """Candidates from (size, gain) pairs by row."""
    flat = [pair for row in found for pair in row]
    starts = np.cumsum([0, *(len(row) for row in found)], dtype=np.int64)
    return Candidates(
        sizes=np.array([size for size, _ in flat], dtype=np.int64),
        gains=np.array([gain for _, gain in flat], dtype=np.int64),
        starts=starts,
    )


def case(num_tasks: int, num_gpus: int, seed: int = 0, *, gain_min: float = 0.0) -> PlanProblem:
    """A problem with these tasks and GPUs. All running tasks fit; one in fifty is faulted."""
    random = Random(f"{seed} {num_tasks} {num_gpus}")
    most = max(4 * num_gpus // max(num_tasks, 1), 2 * NODE_NUM)
    wishes = [_wish(random, task, most) for task in range(1, num_tasks + 1)]
    now = _greedy(wishes, num_gpus)
    waits = set(random.sample(range(num_tasks), num_tasks // 20))
    run = [i for i in range(num_tasks) if i not in waits and now[i] > 0]
    hurt = set(random.sample(run, -(-num_tasks // 50)))
    return PlanProblem(
        demands=tuple(
            replace(wish, now=0 if i in waits else now[i], faulted=i in hurt)
            for i, wish in enumerate(wishes)
        ),
        num_slots=num_gpus,
        mtbf_gpu_s=MTBF_GPU_S,
        gain_min=gain_min,
    )


def _wish(random: Random, task: int, most: int) -> TaskDemand:
    model = random.choice([size for size in (1, 2, 4, 8, 16, 32) if 2 * size <= most])
    micro = random.choice([32, 64, 128, 256, 512, 1024])
    weight = round(random.uniform(0.5, 3.0), 3)
    rate = GPU_FLOPS * random.uniform(0.6, 1.4)
    reduce_share = random.uniform(0.0005, 0.004)
    sizes: list[int] = []
    wafs: list[float] = []
    rounds = 0
    for replicas in range(1, min(micro, most // model) + 1):
        if -(-micro // replicas) == rounds:
            continue  # not faster than fewer replicas
        rounds = -(-micro // replicas)
        speed = model * micro / rounds / (1 + reduce_share * replicas)
        sizes.append(model * replicas)
        wafs.append(weight * rate * speed)
    return TaskDemand(
        task=task,
        name=f"t{task}",
        now=0,
        faulted=False,
        transition=Transition.uniform(round(random.uniform(5.0, 90.0), 1)),
        sizes=tuple(sizes),
        wafs=tuple(wafs),
    )


def _greedy(wishes: list[TaskDemand], num_gpus: int) -> list[int]:
    """Sizes by a greedy choice: the step with the largest gain per GPU, while one fits."""
    now, left = [-1] * len(wishes), num_gpus
    heap = [(-wish.wafs[0] / wish.sizes[0], i) for i, wish in enumerate(wishes)]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        wish, at = wishes[i], now[i] + 1
        more = wish.sizes[at] - (wish.sizes[at - 1] if at else 0)
        if more > left:
            continue
        now[i], left = at, left - more
        if at + 1 < len(wish.sizes):
            gain = (wish.wafs[at + 1] - wish.wafs[at]) / (wish.sizes[at + 1] - wish.sizes[at])
            heapq.heappush(heap, (-gain, i))
    return [wish.sizes[at] if at >= 0 else 0 for wish, at in zip(wishes, now, strict=True)]


# --- inputs that tell the candidates apart by little, or not at all ------------------------------
Curve = Callable[[int], float]
"""Throughput by number of slots."""


def degenerate(family: str, num_tasks: int, num_gpus: int, seed: int = 0) -> PlanProblem:
    """A problem of one of FAMILIES. Each task may use up to twice its share of the GPUs."""
    return FAMILIES[family](Random(f"{family} {seed} {num_tasks} {num_gpus}"), num_tasks, num_gpus)


def _asked(num_gpus: int, tasks: list[tuple[list[int], Curve]]) -> PlanProblem:
    """A problem in which no task has slots yet."""
    return PlanProblem(
        demands=tuple(
            TaskDemand(
                task=task,
                name=f"t{task}",
                now=0,
                faulted=False,
                transition=Transition.uniform(30.0),
                sizes=tuple(sizes),
                wafs=tuple(curve(size) for size in sizes),
            )
            for task, (sizes, curve) in enumerate(tasks, 1)
        ),
        num_slots=num_gpus,
        mtbf_gpu_s=MTBF_GPU_S,
    )


def _upto(num_tasks: int, num_gpus: int, step: int = 1) -> list[int]:
    return list(range(step, max(2 * num_gpus // num_tasks, step) + 1, step))


def _curve(rate: float, power: float = 1.0) -> Curve:
    return lambda size: rate * size if power == 1.0 else rate * size**power


def _all(
    power: float, step: int = 1, rates: Callable[[Random], float] = lambda _: GPU_FLOPS
) -> Callable[[Random, int, int], PlanProblem]:
    return lambda random, num_tasks, num_gpus: _asked(
        num_gpus,
        [
            (_upto(num_tasks, num_gpus, step), _curve(rates(random), power))
            for _ in range(num_tasks)
        ],
    )


def _huge(power: float) -> Callable[[Random, int, int], PlanProblem]:
    """One task that may use every GPU, beside small ones."""
    return lambda random, num_tasks, num_gpus: _asked(
        num_gpus,
        [
            (list(range(1, num_gpus + 1)), _curve(GPU_FLOPS, power)),
            *(
                (list(range(1, 9)), _curve(GPU_FLOPS * random.uniform(0.6, 1.4), 0.9))
                for _ in range(num_tasks - 1)
            ),
        ],
    )


def _one_size(more: float) -> Callable[[Random, int, int], PlanProblem]:
    """Each task has one size. It earns as much as `more` additional slots would."""

    def made(random: Random, num_tasks: int, num_gpus: int) -> PlanProblem:
        most = 4 * num_gpus // num_tasks
        return _asked(
            num_gpus,
            [
                ([random.randint(2, most)], lambda size: GPU_FLOPS * (size + more))
                for _ in range(num_tasks)
            ],
        )

    return made


def _noisy(share: float) -> Callable[[Random, int, int], PlanProblem]:
    """Linear, except for a random share of this size."""

    def made(random: Random, num_tasks: int, num_gpus: int) -> PlanProblem:
        return _asked(
            num_gpus,
            [
                (
                    _upto(num_tasks, num_gpus),
                    lambda size: GPU_FLOPS * size * (1 + share * random.random()),
                )
                for _ in range(num_tasks)
            ],
        )

    return made


def _faulty(
    make: Callable[[Random, int, int], PlanProblem],
) -> Callable[[Random, int, int], PlanProblem]:
    """All tasks train; then one node is lost, and two tasks are faulted."""

    def made(random: Random, num_tasks: int, num_gpus: int) -> PlanProblem:
        problem = make(random, num_tasks, num_gpus)
        left, wishes = num_gpus, list[TaskDemand]()
        for wish in problem.demands:
            fits = [size for size in wish.sizes if size <= min(num_gpus // num_tasks, left)]
            now = fits[-1] if fits else 0
            left -= now
            wishes.append(replace(wish, now=now, faulted=False))
        for i in random.sample(range(num_tasks), min(2, num_tasks)):
            wishes[i] = replace(wishes[i], faulted=wishes[i].now > 0)
        return replace(problem, demands=tuple(wishes), num_slots=num_gpus - NODE_NUM)

    return made


def _ratios(random: Random) -> float:
    return GPU_FLOPS * 10.0 ** random.uniform(-6, 6)


FAMILIES: dict[str, Callable[[Random, int, int], PlanProblem]] = {
    "linear": _all(1.0, rates=lambda random: GPU_FLOPS * random.uniform(0.6, 1.4)),
    "linear, all alike": _all(1.0),
    "linear, steps of 8, all alike": _all(1.0, NODE_NUM),
    "linear, two rates": _all(1.0, rates=lambda random: random.choice([1.0, 2.0]) * GPU_FLOPS),
    "linear, weights from 1e-6 to 1e6": _all(1.0, rates=_ratios),
    "linear, after a fault": _faulty(
        _all(1.0, rates=lambda random: GPU_FLOPS * random.uniform(0.6, 1.4))
    ),
    "linear, all alike, after a fault": _faulty(_all(1.0)),
    "linear but for 0.1 %": _noisy(1e-3),
    "linear but for 1e-9": _noisy(1e-9),
    "concave, all alike": _all(0.9),
    "concave, all alike, after a fault": _faulty(_all(0.9)),
    "convex, all alike": _all(1.2),
    "all 0": _all(1.0, rates=lambda _: 0.0),
    "one huge, concave": _huge(0.9),
    "one huge, linear": _huge(1.0),
    "one size each": _one_size(0.0),
    "one size each, and a constant": _one_size(50.0),
}
