"""An iteration: micro-batches into the local sum, the sum reduced over all members, one step.

Every phase can be left and taken up again. Up to the reduction the local sum only grows, by whole
micro-batches. The reduction is done in place and so on a copy's credit: `kept` is the sum before
it, put back if it fails. Nothing that belongs to the step is touched before the whole reduction
is known to be good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from . import cpu
from .communicators import Communicators
from .control import Abandoned, Control, Interrupted
from .ledger import NO_STATE, Claim, Share, deal
from .model import Trainee
from .text import Text
from .trace import Event, Trace
from .watched import Watched

Outcome = Literal["stepped", "boundary", "quiesced", "failed"]
"""`boundary`: stepped, and all members stop here. `quiesced`: told to stop. `failed`: see why."""


class Iteration:
    """The iteration that this member is in, and what it has of it.

    `step_version` is the number of steps taken; NO_STATE until the member has settled once.
    `loss` is that of the last step, `step_s` what it took from the iteration's first micro-batch
    on: a recovery in between counts, so that a rate told from it is never flattered.
    """

    def __init__(self, trainee: Trainee, text: Text, trace: Trace) -> None:
        self.trainee = trainee
        self.text = text
        self.trace = trace
        self.step_version = NO_STATE
        self.done: list[int] = []
        self.owned: tuple[int, ...] = ()
        self.dealt_in = 0
        self.begun = False
        self.trained_in = 0
        self.loss_sum = 0.0
        self.num_tokens = 0
        self.forward_calls = 0
        self.loss = 0.0
        self.step_s = 0.0
        self.why = ""
        self._began_s: float | None = None
        self._kept: list[Tensor] = []
        self._item = -1
        self._watched = Watched(trainee, self._note, closely=trace.is_on)

    def claim(self) -> Claim:
        """What this member brings into a settlement."""
        return Claim(step_version=self.step_version, kept=tuple(sorted(self.done)),
                     owned=self.owned, dealt_in=self.dealt_in, begun=self.begun,
                     trained_in=self.trained_in)

    def replaced(self, step_version: int) -> None:
        """The member's state is another's now, `step_version` steps old; no sum is of it."""
        self._clear()
        self.step_version = step_version
        self.owned, self.begun = (), False

    def take(self, step_version: int, share: Share, generation: int, *, begun: bool) -> None:
        """Go on from a settlement: keep the sum only if the settlement keeps it."""
        if step_version != self.step_version or sorted(self.done) != list(share.kept):
            assert not share.kept
            self._clear()
        self.step_version = step_version
        self.owned = tuple(sorted((*share.kept, *share.todo)))
        self.dealt_in = generation
        # Whoever is given a part of what others have begun has begun it too.
        self.begun = begun

    def run(self, control: Control, communicators: Communicators) -> Outcome:
        """Finish this iteration with the members of the generation that is up."""
        generation = communicators.generation
        self.why = ""
        self.begun = True
        self._began_s = clock() if self._began_s is None else self._began_s
        self.trained_in = generation
        for item in self.owned:
            if item in self.done:
                continue
            if control.asked(generation) == "now":
                return "quiesced"
            self._micro_batch(item)
        return self._reduce_and_step(control, communicators)

    @property
    def buckets_reduced(self) -> int:
        """How many buckets were seen whole in the last reduction, before it was left."""
        return self._watched.num_complete

    def meet(self, control: Control, communicators: Communicators) -> Outcome:
        """After the last iteration: wait until every member has come this far."""
        outcome, stats = self._together(control, communicators, self._stats_alone)
        if outcome == "stepped" and stats is not None and stats[2] > 0:
            return "boundary"
        return outcome

    def _micro_batch(self, item: int) -> None:
        trainee, train = self.trainee, self.trainee.train
        self._item = item
        self._note("micro_batch")
        trainee.draw.at(self.step_version, item)
        tokens = self.text.sample(train.seed, self.step_version, item, rows=train.batch.micro,
                                  sequence=train.model.sequence)
        self._note("forward")
        self.forward_calls += 1
        loss = trainee.loss(tokens)
        self._note("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss_sum += loss.item()
        self.num_tokens += trainee.num_tokens(tokens)
        self.done.append(item)
        self._item = -1

    def _note(self, event: Event, bucket: int = -1) -> None:
        self.trace.note(event, self.trained_in, self.step_version, micro_batch=self._item,
                        bucket=bucket)

    def _reduce_and_step(self, control: Control, communicators: Communicators) -> Outcome:
        self._note("reduce")
        self._keep()
        outcome, stats = self._together(control, communicators, self._reduce)
        if outcome != "stepped" or stats is None:
            self._put_back()
            return outcome
        self._note("scale")
        num_tokens = torch.tensor(stats[1], dtype=torch.int, device=self.trainee.device)
        self.trainee.ddp.scale_gradients(1.0 / num_tokens)
        self.trainee.optimizer.step()
        self._note("schedule")
        self.trainee.scheduler.step(self.trainee.train.batch.global_)
        self._note("done")
        self.loss = stats[0] / stats[1]
        self.step_version += 1
        self.step_s = clock() - (self._began_s or clock())
        self._clear()
        self.owned = deal(self.trainee.train.num_micro_batches, communicators.num_members,
                          communicators.place)
        self.dealt_in = communicators.generation
        self.begun = False
        return "boundary" if stats[2] > 0 else "stepped"

    def _together(self, control: Control, communicators: Communicators, collective: Any
                  ) -> tuple[Outcome, list[float] | None]:
        """Run what needs all members. Its result counts only if nobody had begun to abort it."""
        generation = communicators.generation
        boundary = control.asked(generation) is not None
        stats: list[float] | None = None
        self.why = ""
        try:
            stats = self._call(control, communicators, partial(collective, communicators, boundary))
        except (Interrupted, Abandoned):
            return "quiesced", None
        except RuntimeError as error:
            if poisoned(error):
                raise
            self.why = f"{type(error).__name__}: {error}".strip()
        if communicators.woken or (self.why and control.asked(generation) == "now"):
            return "quiesced", None
        return ("failed", None) if self.why else ("stepped", stats)

    def _call(self, control: Control, communicators: Communicators,
              collective: Callable[[], list[float]]) -> list[float]:
        """gloo has waits that nothing ends, so it waits in a thread of its own; NCCL is aborted."""
        if communicators.backend == "nccl":
            with control.waiting_for_others(communicators.generation, communicators.wake):
                return collective()

        def call() -> list[float]:
            with cpu.stand_in_here():
                return collective()

        return control.apart(communicators.generation, communicators.wake, call)

    def _stats_alone(self, communicators: Communicators, boundary: bool) -> list[float]:
        stats = torch.tensor([self.loss_sum, self.num_tokens, float(boundary)],
                             dtype=torch.float64, device=self.trainee.device)
        dist.all_reduce(stats)
        found: list[float] = stats.tolist()
        return found

    def _reduce(self, communicators: Communicators, boundary: bool) -> list[float]:
        """The loss sum, the token count and the wish to stop; then Megatron's own reduction.

        Without Megatron's division by the token count: what this does beside waiting, it could do
        after it was abandoned, to a sum that has been put back.
        """
        groups = communicators.groups
        self._note("stats")
        stats = self._stats_alone(communicators, boundary)

        def goes_on() -> None:
            if communicators.woken or communicators.groups is not groups:
                raise RuntimeError("the generation ended meanwhile")

        goes_on()
        with self._watched.reduction(goes_on):
            finalize_model_grads([self.trainee.ddp], None, pg_collection=groups)
        self._note("reduced")
        if self.trainee.device.type == "cuda":
            torch.cuda.synchronize()
        return stats

    def _keep(self) -> None:
        if not self._kept:
            self._kept = [torch.empty_like(part) for part in self.trainee.gradients]
        for kept, live in zip(self._kept, self.trainee.gradients, strict=True):
            kept.copy_(live)

    def _put_back(self) -> None:
        for kept, live in zip(self._kept, self.trainee.gradients, strict=True):
            live.copy_(kept)

    def _clear(self) -> None:
        self.trainee.ddp.zero_grad_buffer()
        self.trainee.optimizer.zero_grad()
        self.done = []
        self.loss_sum = 0.0
        self.num_tokens = 0
        self._began_s = None


def poisoned(error: BaseException) -> bool:
    """Whether this error has ruined the process's CUDA context: only a new process helps."""
    return "CUDA error" in str(error)


def clock() -> float:
    """Seconds, never going back; for step times only."""
    return time.monotonic()
