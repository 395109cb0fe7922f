"""T(t, x): the achieved FLOP/s of a task on x slots."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Literal

from ...events.records.decisions import ThroughputSet
from ...events.spec.job import RATE_FLOPS_MAX, JobSpec
from ...events.spec.model import Axes, Modelled
from . import training_layouts
from .training_layouts import layout_within, speed

NO_NOISE: Mapping[int, float] = {}
SLOT_FLOPS = 1e12
"""Prior of the FLOP/s of one slot. It is nominal: until a task is measured, modelled rates are only
relative. A task whose spec has a `model` gets its rates from that model."""


def table(
    task: int, spec: JobSpec, slot_flops: float = SLOT_FLOPS, modelled: Modelled | None = None
) -> ThroughputSet:
    """The declared table if there is one, else the modelled one, over the allowed sizes. An
    undeclared size has the rate of the next smaller declared one, or 0; with a `model` it follows
    the model's shape. A modelled size has the model's rate, or `slot_flops` times the shape."""
    allowed = set(spec.slots.counts)
    declared = {size: rate for size, rate in spec.throughput.items() if size in allowed}
    if modelled is not None and declared:
        return table_through(task, "declared", spec, declared, modelled)
    sizes = _sizes(spec, modelled)
    if spec.throughput:
        below = (max((x for x in spec.throughput if x <= size), default=0) for size in sizes)
        rates = tuple(spec.throughput.get(size, 0.0) for size in below)
        return ThroughputSet(task=task, origin="declared", sizes=sizes, rates_flops=rates)
    own = training_layouts.slot_flops(spec.training) if spec.training is not None else 0.0
    unit = 1.0 if modelled is not None else own or slot_flops
    rates = tuple(unit * shape(spec, size, modelled) for size in sizes)
    return ThroughputSet(task=task, origin="modelled", sizes=sizes, rates_flops=rates)


def table_through(
    task: int,
    origin: Literal["declared", "measured"],
    spec: JobSpec,
    rates: dict[int, float],
    modelled: Modelled | None = None,
    noise: Mapping[int, float] = NO_NOISE,
) -> ThroughputSet:
    """A table through the known `rates` (size -> FLOP/s, at least one), with the `noise` of those
    that were measured. Any other size follows the shape from the nearest known size, of two equally
    near ones from the smaller. A known size with shape 0 sets only its own rate. No other size
    exceeds the rate of a larger known one."""
    sizes = _sizes(spec, modelled)
    if modelled is not None:
        sizes = tuple(sorted({*sizes, *rates}))
    known = [size for size in rates if shape(spec, size, modelled) > 0]
    found: list[float] = []
    for size in sizes:
        near = min(((abs(one - size), one) for one in known), default=(0, 0))[1]
        most = min((rate for one, rate in rates.items() if one > size), default=RATE_FLOPS_MAX)
        times = shape(spec, size, modelled) / shape(spec, near, modelled) if near else 0.0
        found.append(rates[size] if size in rates else min(rates.get(near, 0.0) * times, most))
    return ThroughputSet(
        task=task,
        origin=origin,
        sizes=sizes,
        rates_flops=tuple(found),
        noise=tuple(noise.get(size, 0.0) for size in sizes) if noise else (),
    )


def origin(spec: JobSpec, rates: ThroughputSet | None, modelled: Modelled | None) -> str:
    """Where a task's table comes from: declared, measured, modelled; "" if it has none. nominal: a
    command without a model, whose rate ranks plans and is no claim of what it computes."""
    if rates is None or rates.origin != "modelled":
        return rates.origin if rates is not None else ""
    return "nominal" if spec.training is None and modelled is None else "modelled"


def shape(spec: JobSpec, size: int, modelled: Modelled | None = None) -> float:
    """Relative throughput of `size` slots: with a `model`, its FLOP/s; for training, the speed of
    the fastest layout, or 0 if there is none; for a command without a model, `size`."""
    if modelled is not None:
        at = bisect_right(modelled.sizes, size)
        return modelled.rates_flops[at - 1] if at else 0.0
    if spec.training is None:
        return float(size)
    return speed(spec.training, size)


def layout(modelled: Modelled | None, size: int) -> str:
    """The model's layout for `size` slots and what limits it; empty without a model."""
    at = bisect_right(modelled.sizes, size) if modelled is not None else 0
    return modelled.layouts[at - 1] if modelled is not None and at else ""


def axes(spec: JobSpec, modelled: Modelled | None, size: int) -> Axes | None:
    """The layout on `size` slots; None without a model and for data-parallel training."""
    if spec.training is not None:
        return layout_within(spec.training, size)
    at = bisect_right(modelled.sizes, size) if modelled is not None else 0
    return modelled.axes[at - 1] if modelled is not None and 0 < at <= len(modelled.axes) else None


def _sizes(spec: JobSpec, modelled: Modelled | None) -> tuple[int, ...]:
    """The sizes of the table. Without a model: all allowed sizes, for training those with a layout.
    With a model: the next allowed size from each modelled one (else the largest), and the floor."""
    counts = spec.slots.counts
    if modelled is None:
        return (
            counts
            if spec.training is None
            else tuple(size for size in counts if speed(spec.training, size) > 0)
        )
    places = [bisect_left(counts, size) for size in modelled.sizes]
    found = {counts[at] for at in places if at < len(counts)} or {counts[-1]}
    return tuple(sorted(found | {spec.slots.floor} - {0}))


def rate_at(throughput: ThroughputSet | None, size: int) -> float:
    """T(t, size) of any size. Slots may idle, so T(x) is the maximum over y <= x."""
    return (
        max(throughput.rates_flops[: bisect_right(throughput.sizes, size)], default=0.0)
        if throughput is not None
        else 0.0
    )


def candidates(throughput: ThroughputSet, now: int, floor: int = 0) -> list[tuple[int, float]]:
    """(size, FLOP/s) of the candidate sizes, ascending, with rates as in `rate_at`. A size that is
    no faster than a smaller one is left out, except the present size (`now`) and the floor."""
    found: list[tuple[int, float]] = []
    best = 0.0
    for size, rate in sorted(zip(throughput.sizes, throughput.rates_flops, strict=True)):
        if rate > best or size in (now, floor):
            best = max(best, rate)
            found.append((size, best))
    return found
