"""A cluster of fewer slots that is played as the whole one: where tasks sit on multiples alone.

Where all that tasks may have, and what a node has, are multiples of so many GPUs, no plan parts
these, and a slot on paper stands for that many: an eighth of the processes, and of the time. What
is earned is the same. Two things are coarser: a device that fails takes the slot with it until its
node is drained, which is at once; and with several slots to a node, those next to it. A task that
heals is never on one node alone if it may be on two: one that fits on one is played as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from ...events.policy import Policy as Limits
from ...events.spec import JobSpec


def grain(num_slots: int, every: Sequence[JobSpec]) -> int:
    """How many GPUs a slot stands for, where nodes have `num_slots`; 1: for itself."""
    found = divisor(num_slots, every)
    alone = any(spec.training is not None and spec.slots.counts[0] < 2 * found for spec in every)
    return 1 if alone else found


def divisor(num_slots: int, every: Sequence[JobSpec]) -> int:
    """What all that tasks may have, and a node's slots, are multiples of."""
    found = num_slots
    for slots in (spec.slots for spec in every):
        step = slots.multiple_of if slots.max > slots.min and not slots.sizes else 0
        found = math.gcd(found, slots.min, step, slots.floor, *slots.sizes)
    return max(found, 1)


def of_job(spec: JobSpec, by: int) -> JobSpec:
    """The same task, of whose slots each stands for so many."""
    slots, rates = spec.slots, dict[int, float]()
    for size in slots.counts:
        below = [one for one in spec.throughput if one <= size]
        if below:
            rates[size // by] = spec.throughput[max(below)]
    few = replace(slots, min=slots.min // by, max=slots.counts[-1] // by, floor=slots.floor // by,
                  multiple_of=max(slots.multiple_of // by, 1),
                  sizes=tuple(size // by for size in slots.sizes))
    return replace(spec, slots=few, throughput=rates)


def of_limits(limits: Limits, by: int) -> Limits:
    """A slot that stands for so many fails so much oftener."""
    return replace(limits, mtbf_gpu_s=limits.mtbf_gpu_s / by)
