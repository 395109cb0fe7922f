"""The reduction: the local sums of all members added up, in place, over a copy that is put back.

Its result counts only if the whole of it is known to be good, and nobody had begun to abort it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from . import cpu
from .communicators import Communicators
from .control import Abandoned, Control, Interrupted
from .model import Trainee
from .watched import Note, Watched

Outcome = Literal["stepped", "boundary", "quiesced", "failed"]
"""`boundary`: stepped, and all members stop here. `quiesced`: told to stop. `failed`: see why."""


class Stats(NamedTuple):
    """Of this member before the reduction, of all members after it."""

    loss_sum: float
    num_tokens: float
    num_stopping: float = 0.0
    """How many were told to stop at this boundary."""


class Reduction:
    """Adds up the gradients in Megatron's buffers. `why` says what made the last one fail."""

    def __init__(self, trainee: Trainee, note: Note, *, closely: bool) -> None:
        self.why = ""
        self._trainee = trainee
        self._note = note
        self._watched = Watched(trainee, note, closely=closely)
        self._kept: list[Tensor] = []

    @property
    def num_complete(self) -> int:
        """How many buckets were seen whole in the last reduction, before it was left."""
        return self._watched.num_complete

    def run(self, control: Control, communicators: Communicators, mine: Stats) -> Stats | Outcome:
        """The stats and gradients of all members; or why not, with the local sum as it was."""
        self._note("reduce")
        self._keep()
        found = self._together(control, communicators, partial(self._reduce, communicators, mine))
        if isinstance(found, str):
            self._put_back()
        return found

    def meet(self, control: Control, communicators: Communicators, mine: Stats) -> Stats | Outcome:
        """The stats alone: every member has come this far."""
        return self._together(control, communicators, partial(self._stats, mine))

    def _together(self, control: Control, communicators: Communicators,
                  collective: Callable[[bool], Stats]) -> Stats | Outcome:
        """Run what needs all members."""
        generation = communicators.generation
        stopping = control.asked(generation) is not None
        found: Stats | Outcome = "failed"
        self.why = ""
        try:
            found = self._call(control, communicators, partial(collective, stopping))
        except (Interrupted, Abandoned):
            return "quiesced"
        except RuntimeError as error:
            if poisoned(error):
                raise
            self.why = f"{type(error).__name__}: {error}".strip()
        if communicators.woken or (self.why and control.asked(generation) == "now"):
            return "quiesced"
        return found

    def _call(self, control: Control, communicators: Communicators,
              collective: Callable[[], Stats]) -> Stats:
        """gloo has waits that nothing ends, so it waits in a thread of its own; NCCL is aborted."""
        if communicators.backend == "nccl":
            with control.waiting_for_others(communicators.generation, communicators.wake):
                return collective()

        def call() -> Stats:
            with cpu.stand_in_here():
                return collective()

        return control.apart(communicators.generation, communicators.wake, call)

    def _stats(self, mine: Stats, stopping: bool) -> Stats:
        stats = torch.tensor(mine._replace(num_stopping=float(stopping)), dtype=torch.float64,
                             device=self._trainee.device)
        dist.all_reduce(stats)
        return Stats(*stats.tolist())

    def _reduce(self, communicators: Communicators, mine: Stats, stopping: bool) -> Stats:
        """The loss sum, the token count and the wish to stop; then Megatron's own reduction.

        Without Megatron's division by the token count: what this does beside waiting, it could do
        after it was abandoned, to a sum that has been put back.
        """
        groups = communicators.groups
        self._note("stats")
        stats = self._stats(mine, stopping)

        def goes_on() -> None:
            if communicators.woken or communicators.groups is not groups:
                raise RuntimeError("the generation ended meanwhile")

        goes_on()
        with self._watched.reduction(goes_on):
            finalize_model_grads([self._trainee.ddp], None, pg_collection=groups)
        self._note("reduced")
        if self._trainee.device.type == "cuda":
            torch.cuda.synchronize()
        return stats

    def _keep(self) -> None:
        if not self._kept:
            self._kept = [torch.empty_like(part) for part in self._trainee.gradients]
        for kept, live in zip(self._kept, self._trainee.gradients, strict=True):
            kept.copy_(live)

    def _put_back(self) -> None:
        for kept, live in zip(self._kept, self._trainee.gradients, strict=True):
            live.copy_(kept)


def poisoned(error: BaseException) -> bool:
    """Whether this error has ruined the process's CUDA context: only a new process helps."""
    return "CUDA error" in str(error)
