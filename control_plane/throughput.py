"""T(t, x): the achieved FLOP/s of a task on x slots."""

from __future__ import annotations

from ..events.orders import ThroughputSet
from ..events.spec import JobSpec

SLOT_FLOPS = 1e12
"""Prior: what one slot achieves. Nominal: modelled rates compare with one another only."""


def table(task: int, spec: JobSpec) -> ThroughputSet:
    """The declared table where there is one, else the model; for each size from min to max.

    Declared: sizes in between earn what the next smaller declared size earns, below the smallest
    nothing. Modelled, training: an iteration takes ceil(micro-batches / x) times one micro-batch.
    Modelled, command: in proportion to x.
    """
    sizes = tuple(range(spec.slots.min, spec.slots.max + 1))
    if spec.throughput:
        rates = tuple(_declared(spec.throughput, size) for size in sizes)
        return ThroughputSet(task=task, origin="declared", sizes=sizes, rates_flops=rates)
    if spec.train is not None:
        num = spec.train.num_micro_batches
        rates = tuple(SLOT_FLOPS * num / -(-num // size) for size in sizes)
    else:
        rates = tuple(SLOT_FLOPS * size for size in sizes)
    return ThroughputSet(task=task, origin="modelled", sizes=sizes, rates_flops=rates)


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
