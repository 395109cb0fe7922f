"""Clusters as planners meet them, from a seed: tasks that run, a few of them hurt, some that wait.

T(t, x) is that of data parallelism over a model of so many GPUs: an iteration's micro-batches are
dealt to the replicas, and the fullest one makes the pace, so that it rises in steps, ever less.
"""

from __future__ import annotations

import heapq
from random import Random

from msgspec.structs import replace
from unicron.control_plane.wishes import PlanInput, Transition, Wish

MTBF_GPU_S = 7.2e6
GPU_FLOPS = 1.5e14
NODE_NUM = 8
SIZES = {"6x128": (6, 128), "100x4096": (100, 4096), "1000x100000": (1000, 100_000)}


def case(num_tasks: int, num_gpus: int, seed: int = 0, *, gain_min: float = 0.0) -> PlanInput:
    """So many tasks on so many GPUs; all that run fit, and one in fifty is hurt."""
    random = Random(f"{seed} {num_tasks} {num_gpus}")
    most = max(4 * num_gpus // max(num_tasks, 1), 2 * NODE_NUM)
    wishes = [_wish(random, task, most) for task in range(1, num_tasks + 1)]
    now = _greedy(wishes, num_gpus)
    waits = set(random.sample(range(num_tasks), num_tasks // 20))
    run = [i for i in range(num_tasks) if i not in waits and now[i] > 0]
    hurt = set(random.sample(run, -(-num_tasks // 50)))
    return PlanInput(wishes=tuple(
        replace(wish, now=0 if i in waits else now[i], hurt=i in hurt)
        for i, wish in enumerate(wishes)),
        num_slots=num_gpus, mtbf_gpu_s=MTBF_GPU_S, gain_min=gain_min)


def _wish(random: Random, task: int, most: int) -> Wish:
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
            continue  # as fast as with fewer
        rounds = -(-micro // replicas)
        speed = model * micro / rounds / (1 + reduce_share * replicas)
        sizes.append(model * replicas)
        wafs.append(weight * rate * speed)
    return Wish(task=task, name=f"t{task}", now=0, hurt=False,
                transition=Transition.alike(round(random.uniform(5.0, 90.0), 1)),
                sizes=tuple(sizes), wafs=tuple(wafs))


def _greedy(wishes: list[Wish], num_gpus: int) -> list[int]:
    """What each has: the steps that earn most for each GPU, while one fits."""
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
