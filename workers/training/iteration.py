"""An iteration: micro-batches into the local sum, the sum reduced over all members, one step.

Every phase can be left and taken up again. Up to the reduction the local sum only grows, by whole
micro-batches; a reduction that fails leaves it as it was (reduction.py). Nothing that belongs to
the step (stepping.py) is touched before the whole reduction is known to be good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ..pulse import Pulse
from .communicators import Communicators
from .control import Control
from .holding import NO_STATE, Claim
from .ledger import Share, deal
from .marks import Marks
from .model import Trainee
from .reduction import Outcome, Reduction, Stats
from .stepping import step
from .text import Text
from .trace import Event, Trace


class Iteration:
    """The iteration that this member is in, and what it has of it.

    `step_version` is the number of steps taken; NO_STATE until the member has settled once.
    `loss` is that of the last step, `step_s` what it took from the iteration's first micro-batch
    on: a recovery in between counts, so that a rate told from it is never flattered.
    `after_boundary`: a checkpoint or a copy was due since the last one, on whichever member.
    """

    def __init__(self, trainee: Trainee, text: Text, trace: Trace, pulse: Pulse) -> None:
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
        self.after_boundary = False
        self.marks = Marks(pulse, overlap=trainee.train.overlap)
        self.reduction = Reduction(trainee, self._note, self.marks, closely=trace.is_on)
        self._began_s: float | None = None
        self._item = -1

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
        self.begun = True
        self._began_s = clock() if self._began_s is None else self._began_s
        self.marks.begin(generation, self.step_version,
                         "first" if self.trained_in != generation else
                         "boundary" if self.after_boundary else "usual")
        self.trained_in = generation
        todo = [item for item in self.owned if item not in self.done]
        for item in todo:
            if control.asked(generation) == "now":
                return "quiesced"
            self._micro_batch(item, partial(self.reduction.begin, control, communicators)
                              if item == todo[-1] else None)
        return self._reduce_and_step(control, communicators)

    def meet(self, control: Control, communicators: Communicators) -> Outcome:
        """After the last iteration: wait until every member has come this far."""
        stats = self.reduction.meet(control, communicators, Stats(0.0, 0))
        if isinstance(stats, str):
            return stats
        return "boundary" if stats.num_stopping else "stepped"

    def _micro_batch(self, item: int, begin: Callable[[Stats], None] | None) -> None:
        """Forward and backward; `begin` is to be called between those of the last one."""
        trainee, train = self.trainee, self.trainee.train
        self._item = item
        self._note("micro_batch")
        trainee.draw.at(self.step_version, item)
        tokens = self.text.sample(train.seed, self.step_version, item, rows=train.batch.micro,
                                  sequence=train.model.sequence)
        self._note("forward")
        self.forward_calls += 1
        loss = trainee.loss(tokens)
        if begin is not None:
            begin(Stats(self.loss_sum + loss.item(), self.num_tokens + trainee.num_tokens(tokens)))
        self._note("backward")
        with self.reduction.backward():
            trainee.optimizer.scale_loss(loss).backward()
        self.loss_sum += loss.item()
        self.num_tokens += trainee.num_tokens(tokens)
        self.done.append(item)
        self.marks.pulse.worked()
        self._item = -1

    def _note(self, event: Event, bucket: int = -1) -> None:
        self.trace.note(event, self.trained_in, self.step_version, micro_batch=self._item,
                        bucket=bucket)
        self.marks.note(event)

    def _reduce_and_step(self, control: Control, communicators: Communicators) -> Outcome:
        stats = self.reduction.run(control, communicators, Stats(self.loss_sum, self.num_tokens))
        if isinstance(stats, str):
            return stats
        step(self.trainee, stats.num_tokens, self._note)
        self.loss = stats.loss_sum / self.trainee.divisor(stats.num_tokens)
        self.step_version += 1
        self.step_s = clock() - (self._began_s or clock())
        self.marks.pulse.finish()
        self._clear()
        self.owned = deal(self.trainee.train.num_micro_batches, communicators.num_members,
                          communicators.place)
        self.dealt_in = communicators.generation
        self.begun = False
        return "boundary" if stats.num_stopping else "stepped"

    def _clear(self) -> None:
        self.trainee.clear()
        self.done = []
        self.loss_sum = 0.0
        self.num_tokens = 0
        self._began_s = None


def clock() -> float:
    """Seconds, never going back; for step times only."""
    return time.monotonic()
