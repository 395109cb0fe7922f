"""A loop of one's own that heals in memory: a spec's `loop:`, beside `command:` and `heal:`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from .output import check_output
from .parallel import Parallel, check_fits, check_sizes

Need = Callable[..., None]


class Loop(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the cluster has to know of a loop that a command runs, and that has adopted Unicron.

    All else is the script's own business (workers/training/adopt.py). `micro_batches` are those of
    one iteration, over all ranks: the batch never changes. `output`, `checkpoint_every` and
    `copy_every` are as in `train:`. `parallel`: the layouts in which the script can build what it
    trains.
    """

    micro_batches: int
    iterations: int
    output: str
    checkpoint_every: int = 0
    copy_every: int = 10
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def num_micro_batches(self) -> int:
        """The same word as in `train:`."""
        return self.micro_batches


def check_loop(loop: Loop, counts: Sequence[int], floor: int, need: Need,
               need_count: Need) -> None:
    """Tell `need` what has to hold of a loop on one of these numbers of slots, ascending; it raises
    where something does not."""
    need_count(loop.micro_batches, "loop.micro_batches")
    need_count(loop.iterations, "loop.iterations")
    for name in ("checkpoint_every", "copy_every"):
        need_count(getattr(loop, name), f"loop.{name}", least=0)
    check_output(loop.output, "loop.output", need)
    check_sizes(loop.parallel, "loop.parallel", need)
    need(loop.parallel.optimizer != "mirrored", "loop.parallel.optimizer",
         "a mirror is the optimizer built a second time, and a script builds it once",
         "write sharded: who alone has a shard takes the task back to its last copy")
    need(not loop.parallel.is_plain or counts[-1] <= loop.micro_batches, "slots.max",
         f"{counts[-1]} ranks, but an iteration has {loop.micro_batches} micro-batches",
         "lower slots.max, or make micro-batches smaller")
    check_fits(loop.parallel, loop.micro_batches, counts, floor, "loop.parallel", need)
