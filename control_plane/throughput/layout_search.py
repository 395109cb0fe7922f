"""Layout search: the fastest layout for each number of GPUs, and what limits it.

Of each shape only those dp are tried that lower the number of micro-batches of the fullest replica:
another dp would shorten only the optimizer step.
"""

import math
from bisect import bisect_left, bisect_right
from functools import lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ...events.spec.model import MegatronModel, Modelled
from .flops import iteration_flops
from .layouts import CHUNKS_NUM_MAX, Layout, divisors, shapes
from .memory import capacity, in_gib, memory
from .step_time import Floats, bubble, constants_of, ending, parts

GAIN_RATIO_MIN = 1.005
"""A gain below this ratio is not mentioned."""
AMPLE_TIMES = 2
"""Memory is the limit if this many times the memory allows a faster layout."""
Ints = NDArray[np.int64]


class Best(Struct, frozen=True, kw_only=True):
    """The fastest layout on exactly `size` GPUs."""

    size: int
    layout: Layout
    rate_flops: float
    """Achieved FLOP/s of all GPUs: model FLOPs, without recomputation."""


class Search:
    """T(t, x) for every x up to `num_gpus`, by the model alone, with `memory_bytes` per GPU."""

    def __init__(self, model: MegatronModel, num_gpus: int, memory_bytes: float) -> None:
        self.model, self.num_gpus, self.memory_bytes = model, num_gpus, memory_bytes
        self.flops, self.constants = iteration_flops(model), constants_of(model)
        self._rates: Floats = np.zeros(num_gpus + 1)
        self._chosen: Ints = np.full(num_gpus + 1, -1, dtype=np.int64)
        self._layouts: list[Layout] = []
        self._dp_steps: dict[int, Ints] = {}
        for layout in shapes(model, num_gpus):
            self._try(layout)

    def best(self) -> list[Best]:
        """The best layouts by size, each faster than all smaller ones; empty if nothing fits."""
        fastest = np.maximum.accumulate(self._rates)
        return [self._best(size) for size in (np.flatnonzero(np.diff(fastest) > 0) + 1).tolist()]

    def _best(self, size: int) -> Best:
        layout = self._layouts[int(self._chosen[size])]
        return Best(
            size=size,
            rate_flops=float(self._rates[size]),
            layout=replace(layout, dp=size // layout.model_parallel),
        )

    def _try(self, layout: Layout) -> None:
        """Try all dp and chunks of a shape."""
        least, num = layout.dp, self.model.global_batch // layout.micro
        most = min(num, self.num_gpus // layout.model_parallel) // least * least
        if most < least or not self._fits(layout, most):
            return
        fewest = least * (1 + self._first(layout, range(least, most + 1, least)))
        dps = -(-self._steps(num) // least) * least
        dps = np.unique(np.concatenate(([fewest], dps[(dps > fewest) & (dps <= most)])))
        even = dps[num % (dps * layout.pp) == 0]
        stages = divisors(self.model.num_layers // layout.pp, CHUNKS_NUM_MAX)
        for chunks in stages if layout.pp > 1 and len(even) else [1]:
            other, counts = replace(layout, chunks=chunks), dps if chunks == 1 else even
            self._keep(other, counts[self._first(other, counts.tolist()) :])

    def _first(self, layout: Layout, counts: range | list[int]) -> int:
        """The index of the first dp that fits, by bisection: a larger dp never needs more."""
        if self._fits(layout, counts[0]):
            return 0
        return bisect_left(counts, True, key=lambda dp: self._fits(layout, dp))

    def _fits(self, layout: Layout, dp: int) -> bool:
        return memory(self.model, replace(layout, dp=dp)).total <= self.memory_bytes

    def _steps(self, num: int) -> Ints:
        """Each dp at which the fullest replica has fewer of `num` micro-batches than at dp - 1."""
        if num not in self._dp_steps:
            each = np.unique(-(-num // np.arange(1, num + 1)))
            self._dp_steps[num] = np.unique(-(-num // each))
        return self._dp_steps[num]

    def _keep(self, layout: Layout, dps: Ints) -> None:
        """Record the layout at sizes where it is the fastest so far."""
        if not len(dps):
            return
        micro_s = parts(self.model, layout, self.constants).total_s
        num = -(-(self.model.global_batch // layout.micro) // dps)
        reduce_s, step_s = ending(self.model, layout, self.constants, micro_s).seconds_each(
            dps.astype(np.float64)
        )
        rates = self.flops / ((num + bubble(layout)) * micro_s + (reduce_s + step_s))
        sizes = dps * layout.model_parallel
        better = rates > self._rates[sizes]
        self._rates[sizes[better]] = rates[better]
        self._chosen[sizes[better]] = len(self._layouts)
        self._layouts.append(layout)


@lru_cache(maxsize=64)
def modelled(model: MegatronModel, num_gpus: int) -> Modelled:
    """T(t, x) of the model for x up to `num_gpus`, with layouts and what limits them; cached. The
    search takes tenths of a second and is never part of a decision."""
    room = capacity(model)
    found = Search(model, num_gpus, room).best()
    if not found:
        return Modelled(sizes=(), rates_flops=(), layouts=(), refused=_refused(model, num_gpus))
    free = Search(model, num_gpus, AMPLE_TIMES * room).best()
    free_sizes = [best.size for best in free]
    return Modelled(
        sizes=tuple(best.size for best in found),
        rates_flops=tuple(best.rate_flops for best in found),
        layouts=tuple(
            describe(model, best, free[bisect_right(free_sizes, best.size) - 1]) for best in found
        ),
        axes=tuple(best.layout.axes for best in found),
    )


def describe(model: MegatronModel, best: Best, free: Best) -> str:
    """Describe a layout and its limit. `free` is the best layout with AMPLE_TIMES the memory."""
    used = in_gib(memory(model, best.layout).total).removesuffix(" GiB")
    text = f"{best.layout.told()}; {used} of {in_gib(capacity(model))}"
    if free.rate_flops > best.rate_flops * GAIN_RATIO_MIN:
        needs = in_gib(memory(model, free.layout).total)
        return (
            f"{text}; memory binds: {free.layout.told()} needs {needs} and would be "
            f"{100 * (free.rate_flops / best.rate_flops - 1):.0f} % faster"
        )
    what, share = losses(model, best.layout)[0]
    return f"{text}; most is lost to {what}: {100 * share:.0f} % of the time"


def losses(model: MegatronModel, layout: Layout) -> list[tuple[str, float]]:
    """(what, share of an iteration) of everything but arithmetic, largest first."""
    constants = constants_of(model)
    each = parts(model, layout, constants)
    num = model.global_batch // layout.micro
    reduce_s, step_s = ending(model, layout, constants, each.total_s).seconds(layout.dp)
    most = -(-num // layout.dp)
    idle = most - num / layout.dp
    busy = most - idle
    found = [
        ("element-wise work", busy * each.elements_s),
        ("tensor parallelism", busy * each.tensor_s),
        ("context parallelism", busy * each.context_s),
        ("expert parallelism", busy * each.experts_s),
        ("messages of the pipeline", busy * each.pipeline_s),
        ("the pipeline's bubble", bubble(layout) * each.total_s),
        ("uneven dealing", idle * each.total_s),
        ("the reduction of gradients", reduce_s),
        ("the optimizer's step", step_s),
    ]
    whole = (most + bubble(layout)) * each.total_s + (reduce_s + step_s)
    return sorted(((what, lost_s / whole) for what, lost_s in found), key=lambda one: -one[1])


def _refused(model: MegatronModel, num_gpus: int) -> str:
    """Why no layout fits: names the layout that needs the least memory."""
    nearest, least = "", math.inf
    for shape in shapes(model, num_gpus):
        most = min(model.global_batch // shape.micro, num_gpus // shape.model_parallel)
        layout = replace(shape, dp=most // shape.dp * shape.dp)
        if layout.dp and memory(model, layout).total < least:
            nearest, least = layout.told(), memory(model, layout).total
    if not nearest:
        return f"no layout that Megatron accepts has at most {num_gpus} GPUs"
    return (
        f"no layout on at most {num_gpus} GPUs fits into {in_gib(capacity(model))}: "
        f"{nearest} needs {in_gib(least)}"
    )
