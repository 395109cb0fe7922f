"""Megatron's DDP, optimizer and schedule as an Engine (engine.py): the first one.

What DDP, its flat buffers and its buckets are like inside is known to the files `megatron_*`, to
those that build such a model, and to no other.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ....events.spec.job import Train
from ....events.spec.model import Axes
from ..communicators.operations import Operations, Works
from ..dependencies import private_megatron
from ..process.trace import Note
from . import megatron_passes, megatron_step
from .engine import Backward, Begin, ExactGradients, Gradients, NotePass, Passes, Sample, SideSums
from .exact_sum import ExactSum
from .experts import RouterSums
from .megatron_exact import MegatronExactGradients
from .megatron_gradients import MegatronGradients
from .megatron_hooks import watch_step
from .optimizers import parts
from .trainee import TrainingModel
from .training_state import MOMENTS, OF_OPTIMIZER

REJECTED = re.compile(r"Unexpected result (\S+) \(message='(.*?)'\)")
"""What Megatron raises for a loss or a gradient that is not finite, if it is asked to check."""


class MegatronEngine:
    """The Engine of one `trainee`. Only one is made of it: it hooks into Megatron's objects."""

    def __init__(self, trainee: TrainingModel) -> None:
        self.trainee = trainee
        self.exact_gradients: ExactGradients | None = (
            None if trainee.exact is None else MegatronExactGradients(trainee, trainee.exact)
        )
        self.gradients: Gradients = self.exact_gradients or MegatronGradients(trainee)

    # --- what it is ---
    @property
    def train(self) -> Train:
        return self.trainee.train

    @property
    def device(self) -> Any:
        return self.trainee.device

    @property
    def axes(self) -> Axes:
        return self.trainee.axes

    @property
    def place(self) -> int:
        return self.trainee.place

    @property
    def replica_size(self) -> int:
        return self.trainee.replica_size

    @property
    def is_sharded(self) -> bool:
        return self.trainee.is_sharded

    # --- the local sum of gradients ---
    @property
    def exact(self) -> ExactSum | None:
        return self.trainee.exact

    @property
    def has_gradients(self) -> bool:
        return self.trainee.has_gradients

    def clear(self) -> None:
        self.trainee.clear()

    def release_gradients(self) -> None:
        self.trainee.release_gradients()

    def release(self) -> None:
        self.trainee.release()

    def take_gradients(self, other: "MegatronEngine") -> None:
        mine, theirs = self.trainee, other.trainee
        sums = theirs.experts.sums()
        mine.clear()
        mine.experts.take(sums)
        if mine.exact is not None and theirs.exact is not None:
            mine.exact.take_over(theirs.exact)
        for (_, old), (_, new) in zip(
            theirs.named_parameters(), mine.named_parameters(), strict=True
        ):
            new.main_grad.copy_(old.main_grad)

    # --- the passes ---
    def begin_iteration(self) -> None:
        self.trainee.scale_auxiliary_losses()

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
        return megatron_passes.run(
            self.trainee,
            operations,
            iteration,
            items,
            sample,
            note,
            must_stop=must_stop,
            begin=begin,
            backward=backward,
        )

    @property
    def micro_batch(self) -> int:
        return self.trainee.draw.micro_batch

    def side_sums(self, operations: Operations) -> SideSums:
        return self.trainee.experts.reduced(operations)

    # --- the step ---
    def watch(self, note: Note) -> None:
        watch_step(self.trainee.optimizer, note)

    def rejection(self, error: str) -> str | None:
        rejected = REJECTED.search(error)
        return None if rejected is None else f"{rejected[2]}: {rejected[1]}"

    def divisor(self, num_tokens: float) -> float:
        return self.trainee.divisor(num_tokens)

    @property
    def loss_scale(self) -> Tensor | None:
        return megatron_step.scale_of(self.trainee.optimizer)

    def step_barrier(self, *, dp: int | None = None) -> Tensor:
        return megatron_step.step_barrier(self.trainee, dp=dp)

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
        norm = megatron_step.step(
            self.trainee,
            num_tokens,
            note,
            norm_square=norm_square,
            found_inf=found_inf,
            scale=scale,
            skips=skips,
        )
        self.trainee.experts.step(RouterSums(*side_sums), self.train.num_micro_batches)
        return norm

    # --- the gather ---
    @property
    def is_gathered(self) -> bool:
        return self.trainee.is_gathered

    def set_gathered(self, *, is_gathered: bool) -> None:
        self.trainee.is_gathered = is_gathered

    @property
    def gathers_in_forward(self) -> bool:
        return self.trainee.gathers_in_forward

    def expect_gather(self) -> None:
        for group in self.trainee.bucket_groups:
            private_megatron.set_gathered(group, is_gathered=self.trainee.is_gathered)

    def gather(self, operations: Operations) -> None:
        megatron_step.gather(self.trainee)

    def take_gathers(self) -> Works:
        return [
            work
            for group in self.trainee.bucket_groups
            for work in private_megatron.take_gather_works(group)
        ]

    # --- the state ---
    @property
    def shards(self) -> Any:
        return self.trainee.shards

    def counted(self) -> list[bool]:
        return list(_counted(self.trainee))

    def parameter_names(self, indices: Sequence[int]) -> list[str]:
        assert self.exact is not None
        names = {id(param): name for name, param in self.trainee.named_parameters()}
        return [names[id(self.exact.params[index])] for index in indices]


def _counted(trainee: TrainingModel) -> Iterator[bool]:
    named = dict(trainee.named_parameters())
    own = {
        tensor.untyped_storage().data_ptr()
        for part in parts(trainee.optimizer)
        for main, state in part.state.items()
        for tensor in (main, *(state[moment] for moment in MOMENTS))
    }
    for shard, tensor in trainee.shards.items():
        kind, _, name = shard.key.partition(".")
        param = named.get(name.partition(".")[2] if kind == "optimizer" else name)
        is_split = kind != "exponent" and getattr(param, "tensor_model_parallel", False)
        if getattr(param, "shared", False) or (trainee.at.tp and not is_split):
            yield False  # the first stage, or the first tensor-parallel rank counts it
        elif trainee.is_sharded and kind in OF_OPTIMIZER:
            yield tensor.untyped_storage().data_ptr() in own  # not the mirror of another's
        else:
            yield not trainee.at.dp
