"""The reduction: the local sums of all members added up, in place, over a copy that is put back.

Its result counts only if the whole of it is known to be good, and nobody had begun to abort it.
Overlapped with the last backward (flight.py), or after it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from ...diagnosis.classifier import NOTHING
from ..communicators.communicators import ABORTED, Communicators
from ..model import cpu_device
from ..model.trainee import Trainee
from ..process.control_thread import Abandoned, Control, Interrupted
from ..process.exit_report import verdict_of
from ..process.trace import Marks, Note
from .overlapped_reduction import Buckets, Kept
from .phase_hooks import Watched

T = TypeVar("T")
Outcome = Literal["stepped", "boundary", "quiesced", "failed"]
"""`boundary`: stepped, and all members stop here. `quiesced`: told to stop. `failed`: see why."""


class Stats(NamedTuple):
    """Of this member before the reduction, of all members after it."""

    loss_sum: float
    num_tokens: float
    num_stopping: float = 0.0
    """How many were told to stop at this boundary."""
    saver: float = 0.0
    """Place + 1 of who was told to save before it leaves, at this boundary; 0: nobody."""


class Gate(NamedTuple):
    """What a step has to know of all gradients, where a member has but a part: see `gate`."""

    norm_square: float
    num_not_finite: float = 0.0


class Reduction:
    """Adds up the gradients in Megatron's buffers.

    `why` says what made the last one fail, `verdict` what that means.

    `num_complete` is how many buckets of the iteration were seen whole, in order, in a reduction
    that came to nothing all the same.
    """

    def __init__(self, trainee: Trainee, note: Note, marks: Marks, *, closely: bool) -> None:
        self.why = ""
        self.verdict = NOTHING
        self.num_complete = 0
        self.was_abandoned = False
        """Whether what waited last waits on, in a thread that may still hold the trainee."""
        self._trainee = trainee
        self._note = note
        self._marks = marks
        self._watched = Watched(trainee, note, closely=closely)
        self._kept = Kept(trainee)
        self._buckets = (Buckets(trainee.bucket_groups, self._kept, note)
                         if trainee.train.overlap else None)

    def begin(self, control: Control, communicators: Communicators, mine: Stats) -> None:
        """Before the last backward, which then launches buckets: launch the stats.

        They are those of the whole local sum, that of the last micro-batch included, and go before
        the first bucket: they die with whoever dies. Does nothing without overlap, or where this
        member is told to stop at once: its last backward is then as any other.
        """
        if self._buckets is None:
            return
        generation = communicators.generation

        def leaves() -> bool:
            return control.asked(generation) == "now"

        if leaves():
            return
        self._note("reduce")
        if leaves():  # told so meanwhile
            return
        self._note("stats")
        self._buckets.begin(self._told(control, communicators, mine), leaves)

    def backward(self) -> AbstractContextManager[None]:
        """Around every backward: only one that a reduction was begun for launches buckets."""
        if self._buckets is None or self._buckets.flight is not None:
            return nullcontext()
        nothing: AbstractContextManager[None] = self._trainee.ddps[0].no_sync()
        return nothing

    def run(self, control: Control, communicators: Communicators, mine: Stats) -> Stats | Outcome:
        """The stats and gradients of all members; or why not, with the local sum as it was."""
        if self._buckets is None:
            found = self._run_at_once(control, communicators, mine)
        else:
            found = self._run_overlapped(self._buckets, control, communicators, mine)
        if isinstance(found, str):
            self.undo()
        elif self._trainee.is_plain:
            self.done()
        return found

    def undo(self) -> None:
        """The reduction comes to nothing: the local sum is what it was before."""
        self._kept.put_back()

    def done(self) -> None:
        """Its result counts: the local sum before it is of no use any more."""
        self._kept.drop()
        self.num_complete = 0

    def gate(self, control: Control, communicators: Communicators, mine: Gate) -> Gate | Outcome:
        """What all members, of which each has a part of the gradients, have to know before a step.

        Who comes out of it steps, whatever becomes of the others: it ends for nobody before all
        have entered it, with their parts reduced.
        """
        def through() -> Gate:
            told = torch.tensor(mine, dtype=torch.float64, device=self._trainee.device)
            dist.all_reduce(told)
            self._note("passed")
            return Gate(*told.tolist())

        self._note("gate")
        return self.together(control, communicators, through)

    def _run_at_once(self, control: Control, communicators: Communicators, mine: Stats
                     ) -> Stats | Outcome:
        self._note("reduce")
        for group in self._trainee.bucket_groups:
            self._kept.keep(group)
        complete: list[bool] = []
        found = self.together(control, communicators, partial(
            self._reduce, self._told(control, communicators, mine), communicators.groups,
            dist.group.WORLD, complete, _going_on(communicators)))
        self.num_complete = sum(complete)
        return found

    def _run_overlapped(self, buckets: Buckets, control: Control, communicators: Communicators,
                        mine: Stats) -> Stats | Outcome:
        """What was begun in the last backward; all of it, if no backward was left to run."""
        if buckets.flight is None:
            self.begin(control, communicators, mine)
        flight = buckets.flight
        if flight is None:
            return "quiesced"
        buckets.launch_rest()
        goes_on = _going_on(communicators)

        def land() -> Stats:
            self._until_computed()
            self._marks.lands()
            return Stats(*flight.land(self._note, goes_on))

        found = self.together(control, communicators, land)
        self.num_complete = flight.num_complete
        if isinstance(found, str):
            if buckets.flight is not None and (left := flight.end(communicators.wake)) is not None:
                control.leave_behind(left.is_alive)
            buckets.reset()
        else:
            # Nothing of this waits any more: Megatron takes note of what has ended.
            finalize_model_grads(self._trainee.ddps, None, pg_collection=communicators.groups)
            buckets.flight = None
            self._note("reduced")
        return found

    def meet(self, control: Control, communicators: Communicators, mine: Stats) -> Stats | Outcome:
        """The stats alone: every member has come this far."""
        return self.together(control, communicators, partial(
            self._stats, self._told(control, communicators, mine), dist.group.WORLD))

    def together(self, control: Control, communicators: Communicators,
                 collective: Callable[[], T], replica: frozenset[int] = frozenset()
                 ) -> T | Outcome:
        """Run what needs all members, or all of `replica`: its answer, or why there is none."""
        found: T | Outcome = "failed"
        self.was_abandoned = False
        self.why, self.verdict = "", NOTHING
        try:
            with self._marks.together():
                found = self._call(control, communicators, collective, replica)
        except Interrupted:
            return "quiesced"
        except Abandoned:
            self.was_abandoned = True
            if self._buckets is not None:
                self._buckets.flight = None  # the thread that waits for it sees to its end
            return "quiesced"
        except (RuntimeError, *ABORTED) as error:
            if poisoned(error) or (isinstance(error, ABORTED) and not communicators.woken):
                raise
            self.why = f"{type(error).__name__}: {error}".strip()
            self.verdict = verdict_of(error)
        if communicators.woken or (self.why and control.asked(communicators.generation) == "now"):
            return "quiesced"
        return found

    def _call(self, control: Control, communicators: Communicators,
              collective: Callable[[], T], replica: frozenset[int]) -> T:
        """gloo has waits that nothing ends, so it waits in a thread of its own; NCCL is aborted."""
        if communicators.backend == "nccl":
            with control.waiting_for_others(communicators.generation, communicators.wake,
                                            replica):
                return collective()

        def call() -> T:
            with cpu_device.stand_in_here():
                return collective()

        return control.apart(communicators.generation, communicators.wake, call, replica)

    def _told(self, control: Control, communicators: Communicators, mine: Stats) -> Tensor:
        """What this member has to say: its stats, whether it was told to stop, and to save."""
        generation = communicators.generation
        mine = mine._replace(num_stopping=float(control.asked(generation) is not None),
                             saver=(communicators.place + 1.0) * control.saves(generation))
        return torch.tensor(mine, dtype=torch.float64, device=self._trainee.device)

    def _stats(self, told: Tensor, world: Any) -> Stats:
        dist.all_reduce(told, group=world)
        return Stats(*told.tolist())

    def _reduce(self, told: Tensor, groups: Any, world: Any, complete: list[bool],
                goes_on: Callable[[], None]) -> Stats:
        """The loss sum, the token count and the wish to stop; then Megatron's own reduction.

        Without Megatron's division by the token count: what this does beside waiting, it could do
        after it was abandoned, to a sum that counts. For the same reason it is given the groups of
        its own generation, and asks before it begins anything.
        """
        self._until_computed()
        self._note("stats")
        goes_on()
        stats = self._stats(told, world)
        self._marks.told()
        goes_on()
        with self._watched.reduction(complete, goes_on):
            # Who mirrors a shard needs the gradients of two.
            finalize_model_grads(self._trainee.ddps, None, pg_collection=groups,
                                 force_all_reduce=self._trainee.mirror is not None)
        if self._trainee.device.type == "cuda":
            self._marks.lands()  # there a collective's wait holds the stream, not the host
            torch.cuda.synchronize()
        self._note("reduced")
        return stats

    def _until_computed(self) -> None:
        """Before it waits for others, the device has done this member's own work."""
        if self._trainee.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _going_on(communicators: Communicators) -> Callable[[], None]:
    """What raises RuntimeError as soon as the generation that is up now is being left."""
    groups = communicators.groups

    def goes_on() -> None:
        if communicators.woken or communicators.groups is not groups:
            raise RuntimeError("the generation ended meanwhile")

    return goes_on


def poisoned(error: BaseException) -> bool:
    """Whether this error has ruined the process's CUDA context: only a new process helps."""
    return "CUDA error" in str(error)
