"""What a training step needs of a model, its gradients, its optimizer and its state.

`Engine` is the seam for another library: step/ knows nothing else of a model. Megatron's DDP is the
first engine (megatron_engine.py); tests/drivers/plain_engine.py is a small one over torch alone.
The step is not all: state recovery and checkpoints still ask Megatron's TrainingModel
(state_recovery.py, checkpoint/), and another library brings its own.

A member that dies leaves the others in the middle of an operation. So each method says what it may
be called after, whether it may be repeated, and what the members call together. What they call
together, they call in the same order, with tensors of the same shapes. A method that communicates
raises RuntimeError when a member is gone, and uses only the `Operations` that it is given, which
belong to one generation. It may still run, in a thread that nobody waits for, when the next
generation has begun: it then must change nothing that counts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ....events.spec.job import Train
from ....events.spec.model import Axes
from ..communicators.operations import Operations, Works
from ..process.trace import Note
from .exact_sum import ExactSum
from .losses import Losses
from .step_barrier import ExactBarrier

Sample = Callable[[int], Any]
"""A micro-batch by its number: tokens [rows, sequence + 1], or input of a script's `forward`."""
NotePass = Callable[[Literal["micro_batch", "forward", "backward", "stage"], int], None]
"""Called when a micro-batch or a pass of it begins, or when a stage communicates with another."""
Begin = Callable[[Losses], None]
"""Called before the last backward, with the losses so far."""
Backward = Callable[[], AbstractContextManager[None]]
"""The context of the backward of a micro-batch, outside a pipeline."""
SideSums = tuple[Tensor, ...]
"""What micro-batches add up beside gradients, such as the tokens of each expert."""
PADDING = -1
"""A micro-batch without tokens: it adds zeros."""


class Passes(NamedTuple):
    """What was run: the first `num_done` of the micro-batches, and their losses. Only one member of
    the replica has the losses."""

    num_done: int
    losses: Losses


class Watch(Protocol):
    """Is told how a reduction goes on. Each method may raise RuntimeError, to end the reduction."""

    def bucket_begins(self, bucket: int) -> None:
        """The reduction of this bucket begins."""

    def bucket_ends(self, bucket: int) -> None:
        """This bucket is reduced."""

    def tied_begins(self) -> None:
        """The gradients of a tied embedding are about to be added up over its two stages."""

    def mirror_begins(self) -> None:
        """The reduced shards are about to be sent to the members that mirror them."""

    def check(self) -> None:
        """A phase ends or begins."""


class Gradients(Protocol):
    """The local sum of gradients of one model: fp32, or integers with `reproducible: bitwise`. It
    is cut into buckets, which all data-parallel members reduce in the same order, in place.

    While it is reduced, it has a backup, unless the job does without (`train.kept_sum`).
    """

    @property
    def num_buckets(self) -> int: ...

    @property
    def has_backup(self) -> bool:
        """Whether the local sum can be restored. If not, a failed reduction loses it, and its
        micro-batches run again."""
        ...

    # --- the backup ---
    def keep(self, bucket: int) -> None:
        """This bucket is about to be reduced: copy it if there is a backup, and note that it was
        begun. Not after its reduction has begun."""

    def restore(self) -> bool:
        """The reduction failed, or does not count: make the local sum what it was. False: it is
        lost, for a bucket was begun without a backup. A late write into the reduced memory must not
        reach the local sum: the copy takes its place. Repeatable, as `drop` and `free` are."""
        ...

    def drop(self) -> None:
        """The result counts, or the local sum no longer does: the copies are worthless."""

    def free(self) -> None:
        """Free the memory that only a reduction needs, unless the copies count."""

    # --- the reduction ---
    def reduce(self, operations: Operations, watch: Watch) -> None:
        """Reduce all buckets, then what members of a replica share, and wait. Every member calls
        it. Not repeatable before `restore` or a `clear` of the engine."""

    def launch(self, bucket: int, operations: Operations) -> Works:
        """Start to reduce a bucket, and return at once. In the order of the buckets."""
        ...

    def finish(self, operations: Operations, watch: Watch) -> None:
        """All launched buckets are complete: add up what members of a replica share."""

    def on_complete(self, ready: Callable[[int], None]) -> None:
        """From now on, call `ready` as a backward has completed a bucket. Called once, and only if
        the reduction overlaps with the backward (`train.overlap`)."""

    def without_launch(self) -> AbstractContextManager[object]:
        """In this context, a backward completes no bucket."""
        ...

    def reset(self) -> None:
        """A backward has counted gradients that no reduction took, or a launched reduction has
        failed: forget it. The local sum stays."""


class ExactGradients(Gradients, Protocol):
    """Integers: their sum over all members does not depend on which member ran what."""

    def barrier(self) -> ExactBarrier:
        """What this member adds to the step barrier, after `reduce` or `finish`. Waits for the
        device, and for no member."""
        ...

    def stepped(self) -> None:
        """The iteration counts with this gradient: take the exponents of the next one, which
        `barrier` has computed."""


class Engine(Protocol):
    """A member's part of a model, with its gradients, optimizer and schedule."""

    # --- what it is ---
    @property
    def train(self) -> Train:
        """The job: batches, precision, what the reduction may do."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def axes(self) -> Axes:
        """The layout for which it is built. With a new generation its data-parallel size and
        `place` may change, while the part of the model stays."""
        ...

    @property
    def place(self) -> int:
        """Its position in this layout."""
        ...

    @property
    def replica_size(self) -> int:
        """The members that train each micro-batch together."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether it steps only a shard of its parameters, and must `gather` the others."""
        ...

    # --- the local sum of gradients ---
    @property
    def gradients(self) -> Gradients: ...

    @property
    def exact(self) -> ExactSum | None:
        """The integers, with `reproducible: bitwise`. `exact_gradients` reduces them, and is the
        same object as `gradients`."""
        ...

    @property
    def exact_gradients(self) -> ExactGradients | None: ...

    @property
    def has_gradients(self) -> bool:
        """Whether the local sum has memory. `clear` allocates it."""
        ...

    def clear(self) -> None:
        """Zero the local sum, and all that micro-batches add up. Repeatable."""

    def release_gradients(self) -> None:
        """Free the memory of the local sum, which no longer counts. Repeatable."""

    def take_gradients(self, other: Any) -> None:
        """Copy the local sum of `other`, an engine with the same part of the model."""

    def release(self) -> None:
        """Free all memory: it is no longer used, even if references to it remain."""

    # --- the passes ---
    def begin_iteration(self) -> None:
        """The passes of an iteration begin, or go on after a fault. Repeatable."""

    def run(
        self,
        operations: Operations,
        iteration: int,
        items: Sequence[int],
        sample: Sample,
        note: NotePass,
        *,
        must_stop: Callable[[], bool] | None,
        begin: Begin | None,
        backward: Backward,
    ) -> Passes:
        """Run forward and backward of these micro-batches, into the local sum. All members of the
        replica call it with the same items, and return the same number; only with pipeline stages
        may `must_stop` end it early. Each calls `begin` before its last backward, and runs each
        backward in `backward()`. A random number may depend on the iteration, the micro-batch and
        the place in the model, and on nothing else. After RuntimeError the local sum is lost."""
        ...

    @property
    def micro_batch(self) -> int:
        """The micro-batch of the last forward."""
        ...

    def side_sums(self, operations: Operations) -> SideSums:
        """What the micro-batches have added up beside gradients, over all members. Every member
        calls it. Repeatable: the local sums stay as they are."""
        ...

    # --- the step ---
    def watch(self, note: Note) -> None:
        """Tell `note` of the phases inside `step` from now on, which are for traces. Called once,
        before anything else."""

    def rejection(self, error: str) -> str | None:
        """What of a loss or a gradient a check of the library's own refuses, if `error` says that;
        None: it is another error."""
        ...

    def divisor(self, num_tokens: float) -> float:
        """The divisor of the loss sum of all micro-batches, with `num_tokens` tokens in all."""
        ...

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale, one element on the device; None without one. The same on all members."""
        ...

    def step_barrier(self, *, dp: int | None = None) -> Tensor:
        """What this member adds to the step barrier: [2] in fp64 on the device, its part of the
        squared norm of the reduced gradients, and whether one is not finite. Of all members, each
        element of the model counts once. `dp`: as if it had that data-parallel rank. Repeatable.
        Not called for a whole replica with the whole optimizer: its reduced gradient is all that a
        step needs."""
        ...

    def step(
        self,
        num_tokens: float,
        side_sums: SideSums,
        note: Note,
        *,
        norm_square: float | None = None,
        found_inf: bool = False,
        scale: float | None = None,
        skips: bool = False,
    ) -> float | None:
        """From the reduced gradients to the next state, the same on every member: divide by the
        divisor, clip, step optimizer and schedule. Returns the norm of the gradient; None: the
        optimizer has not stepped. It waits for no other member, nothing interrupts it, and it is
        never repeated; an error ends the process. `norm_square` and `found_inf` are of all members,
        if they have entered the step barrier, and `scale` is the loss scale, if this one has passed
        it. With `skips` the optimizer does not step; router biases do. Afterwards `is_gathered` is
        False if parameters are stepped elsewhere."""
        ...

    # --- the gather ---
    @property
    def is_gathered(self) -> bool:
        """False: the parameters beside this member's shard are not yet gathered after the step."""
        ...

    def set_gathered(self, *, is_gathered: bool) -> None: ...

    @property
    def gathers_in_forward(self) -> bool:
        """Whether the next forward gathers the parameters."""
        ...

    def expect_gather(self) -> None:
        """The next forward gathers the parameters, unless they are gathered. Repeatable."""

    def gather(self, operations: Operations) -> None:
        """Gather the parameters that other replicas have stepped. They call it together.
        Repeatable, also after RuntimeError."""

    def take_gathers(self) -> Works:
        """The operations of a gather that may still write into parameters. It forgets them."""
        ...

    # --- the state ---
    @property
    def shards(self) -> Any:
        """The tensors of its state by Shard (recovery/regions.py), in the same order on members
        with the same part; with them, states are compared, sent and saved."""
        ...

    def counted(self) -> list[bool]:
        """For each of `shards`, whether this member counts it: of all members, each element of the
        state is counted once."""
        ...

    def parameter_names(self, indices: Sequence[int]) -> list[str]:
        """The names in the whole model of these parameters of `exact`."""
        ...
