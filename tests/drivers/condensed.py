"""Runs in which a slot stands for several GPUs: large clusters in a fraction of the time.

All sizes of tasks have to be multiples of that number, so that no plan splits a group.
"""

from __future__ import annotations

from msgspec.structs import replace
from unicron.control_plane.simulation.run import RunInput
from unicron.events.spec.job import JobSpec


def condensed(run_input: RunInput, by: int) -> RunInput:
    """The same run with `by` GPUs per slot."""
    limits = run_input.limits
    return run_input._replace(
        slots={name: num // by for name, num in run_input.slots.items()},
        tasks=tuple(_with_fewer_slots(spec, by) for spec in run_input.tasks),
        limits=replace(limits, mtbf_gpu_s=limits.mtbf_gpu_s / by),
    )  # slots fail `by` times as often


def _with_fewer_slots(spec: JobSpec, by: int) -> JobSpec:
    slots, rates = spec.slots, dict[int, float]()
    for size in slots.counts:
        assert size % by == 0, f"{spec.name}: {size} is no multiple of {by}"
        below = [one for one in spec.throughput if one <= size]
        if below:
            rates[size // by] = spec.throughput[max(below)]
    scaled = replace(
        slots,
        min=slots.min // by,
        max=slots.counts[-1] // by,
        floor=slots.floor // by,
        multiple_of=max(slots.multiple_of // by, 1),
        sizes=tuple(size // by for size in slots.sizes),
    )
    return replace(spec, slots=scaled, throughput=rates)
