"""T(t, x): the achieved FLOP/s of a task on x slots."""

from __future__ import annotations

from ..events.orders import ThroughputSet
from ..events.spec import RATE_FLOPS_MAX, JobSpec

SLOT_FLOPS = 1e12
"""Prior: what one slot achieves. Nominal: until a task of the cluster was measured, modelled rates
compare with one another only."""


def table(task: int, spec: JobSpec, slot_flops: float = SLOT_FLOPS) -> ThroughputSet:
    """The declared table where there is one, else the model; for each size that the spec allows.

    Declared: sizes in between earn what the next smaller declared size earns, below the smallest
    nothing. Modelled: `slot_flops` times the shape.
    """
    sizes = spec.slots.counts
    if spec.throughput:
        rates = tuple(_declared(spec.throughput, size) for size in sizes)
        return ThroughputSet(task=task, origin="declared", sizes=sizes, rates_flops=rates)
    rates = tuple(slot_flops * shape(spec, size) for size in sizes)
    return ThroughputSet(task=task, origin="modelled", sizes=sizes, rates_flops=rates)


def measured_table(task: int, spec: JobSpec, rates: dict[int, float]) -> ThroughputSet:
    """Measured sizes stand for themselves; each other follows the shape from the nearest of them.

    `rates`: size -> FLOP/s, at least one. Of two equally near the smaller counts. No size is said
    to earn more than a larger one that was measured.
    """
    sizes = spec.slots.counts
    found: list[float] = []
    for size in sizes:
        near = min((abs(known - size), known) for known in rates)[1]
        most = min((rate for known, rate in rates.items() if known > size), default=RATE_FLOPS_MAX)
        found.append(min(rates[near] * (shape(spec, size) / shape(spec, near)), most)
                     if size not in rates else rates[size])
    return ThroughputSet(task=task, origin="measured", sizes=sizes, rates_flops=tuple(found))


def shape(spec: JobSpec, size: int) -> float:
    """How many times one slot `size` slots are, by the model.

    Training: an iteration takes ceil(micro-batches / size) times one micro-batch. Command: `size`.
    """
    if spec.train is None:
        return float(size)
    num = spec.train.num_micro_batches
    return num / -(-num // size)


def _declared(rates: dict[int, float], size: int) -> float:
    below = [declared for declared in rates if declared <= size]
    return rates[max(below)] if below else 0.0


def candidates(throughput: ThroughputSet, now: int) -> list[tuple[int, float]]:
    """(size, FLOP/s) worth choosing, by size: workers may idle, T(x) = max over y <= x.

    A size that earns no more than a smaller one is left out, unless the task has it `now`.
    """
    found: list[tuple[int, float]] = []
    best = 0.0
    for size, rate in sorted(zip(throughput.sizes, throughput.rates_flops, strict=True)):
        if rate > best or size == now:
            best = max(best, rate)
            found.append((size, best))
    return found
