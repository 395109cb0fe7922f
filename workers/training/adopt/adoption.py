"""A training loop of one's own on megatron-core adopts Unicron: `adopt`.

Import this before megatron. A whole example is deploy/examples/loop.py; what may be in such a loop,
and what not, is in docs/guides/scripts.md.

    with adopt(build=build, sample=sample, forward=forward) as job:
        for _ in job:
            iteration = job.step()
            if iteration % 100 == 0:
                job.evaluate(lambda: validate(job.model))

`job.step()` returns when all members have stepped. If one of them is lost meanwhile, the others
keep what they have of the iteration, build communicators anew, and finish it; who takes the place
of the lost one begins in the same script, and is given the state before its first `job.step()`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from msgspec import json

from ....events.errors import UsageError
from ....events.records.reports import InMemoryRecoveryDeclined
from ....events.spec.job import Loop
from ....events.spec.model import Axes
from ....events.spec.parallelism import Parallel, coordinates, num_places
from ...ipc.pipe_protocol import FD, LOOP, PULSE, Adopted
from ...ipc.progress_page import Pulse
from ..process.control_thread import Interrupted
from ..rank import load, meet_agent
from .arguments import Loss, check_given, used_rightly, wrong_input_told

load()  # before anybody imports Megatron: without CUDA that would load a compiler for nothing
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ..member import Member  # noqa: E402
from ..step.forward_backward import evaluate  # noqa: E402
from .custom_loop import Build, Forward, OnRebuild, OwnWork, Sample, Unfit, Untrained  # noqa: E402
from .drivers import Driver, Unhealed  # noqa: E402

T = TypeVar("T")
log = structlog.get_logger()


class Declined(UsageError):
    """What was built cannot be healed in memory; the message says why. The control plane has been
    told: from here on the script is on its own, and its processes start again together."""


class Job:
    """A loop's way to its task. Everything here is of the generation that is up now."""

    def __init__(self, driver: Driver, work: OwnWork) -> None:
        self._driver = driver
        self._work = work
        self._steps = driver.steps()
        self._began = self._ended = self._is_void = False
        self._stepped = self._num_evaluated = 0
        self._evaluating = ""

    # --- what there is ----------------------------------------------------------------------------
    @property
    def chunks(self) -> list[Any]:
        """The chunks of the model that this rank has, as `build` has wrapped them. Another layout
        has other ones: ask again after each step."""
        return self._driver.iteration.trainee.ddps

    @property
    def model(self) -> Any:
        """The first of them: all there is without interleaving."""
        return self.chunks[0]

    @property
    def optimizer(self) -> Any:
        """As `build` has made it."""
        return self._driver.iteration.trainee.optimizer

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self._driver.iteration.trainee.device

    @property
    def groups(self) -> Any:
        """The generation's ProcessGroupCollection. Never keep it, or a group of it: what is kept
        keeps dead connections open."""
        return self._driver.communicators.groups

    @property
    def own(self) -> Any:
        """What `on_rebuild` has returned for this generation."""
        return self._work.made

    @property
    def num_members(self) -> int:
        """How many processes there are now: a world size that somebody has cached goes stale."""
        return self._driver.communicators.num_members

    @property
    def place(self) -> int:
        """This one's torch.distributed rank, from 0. It may be another in the next generation."""
        return self._driver.communicators.place

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes what is written once."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """The same, for whoever writes on the last rank, as Megatron-LM does."""
        return self.place == num_places(self._driver.communicators.axes) - 1

    @property
    def iteration(self) -> int:
        """How many iterations have been stepped: the number of the next one."""
        return self._stepped

    @property
    def loss(self) -> float:
        """Of the whole batch, in the last iteration that was stepped; the same on every rank of the
        layout."""
        return self._driver.iteration.history.last[0]

    @property
    def step_s(self) -> float:
        """How long that took, with what had to be healed in it."""
        return self._driver.iteration.history.last[1]

    # --- what it does -----------------------------------------------------------------------------
    def __iter__(self) -> Iterator[int]:
        """The iterations that are left, from the one that the task is at. `step` each of them.

        Where all was lost and the task was set back, it goes on from there.
        """
        if not self._began:
            self._advance()
        while not self._ended and self.iteration < self._work.train.iterations:
            yield self.iteration

    def step(self) -> int:
        """Take the next step, whatever has to be healed for that; the iteration that was stepped.

        That is not always the one that was to come: where a state was lost with all who had it,
        the task goes on from an earlier one. A member may also be lost when some have stepped and
        others not yet: these are given what those have, which is the step, and evaluate nothing
        before the next one, since those may be past that. -1: there was none left.
        """
        self._is_void, self._num_evaluated = False, 0
        asked = self.iteration
        while True:
            stepped = self._advance()
            if self._ended:
                return -1
            if stepped is not None:
                return stepped
            if self.iteration > asked:
                self._is_void = True
                return self.iteration - 1

    def evaluate(self, call: Callable[[], T]) -> T | None:
        """Between two steps: do `call` with all members, collectives and all; its result.

        It runs in a thread of its own where the backend is gloo. If a member is lost in it, it is
        done again where all members of the next generation had come to it; else it is skipped, on
        this rank and on all that had not come to its end: None. So are all others before the next
        step then. `call` must change nothing that is trained.
        """
        if self._is_void:
            return None
        self._num_evaluated += 1
        found: list[T] = []
        while True:
            self._evaluating = f"{self.iteration}.{self._num_evaluated}"
            if self._driver.together(lambda: found.append(call())):
                self._evaluating = ""
                return found[-1]
            found.clear()
            again = self._advance_to_generation()
            if not again:
                self._evaluating, self._is_void = "", True
                log.warning("evaluation skipped: a member was lost in it",
                            iteration=self.iteration)
                return None

    def mean_loss(self, num: int, batch_of: Callable[[int], Any]) -> float:
        """In an evaluation: the mean loss of so many batches, as `loss` of `adopt` has it.

        They are dealt to the replicas that there are, by whatever schedule these have; the same on
        every rank. `batch_of` is asked by number, from 0 on.
        """
        communicators, trainee = self._driver.communicators, self._driver.iteration.trainee
        axes, told = communicators.axes, (0.0, 0)
        if self.place < num_places(axes):  # else it is beside the layout
            items = range(coordinates(axes, self.place).dp, num, axes.dp)
            told = evaluate(trainee, self.groups, items, batch_of)
        summed = torch.tensor(told, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        loss_sum, num_tokens = summed.tolist()
        if trainee.train.loss == "per_token":
            return float(loss_sum / max(num_tokens, 1.0))
        return float(loss_sum * trainee.train.num_micro_batches / num)

    def finish(self) -> None:
        """Take all steps that are left; the final checkpoint is written and published."""
        while not self._ended:
            self._advance()

    # --- inside -----------------------------------------------------------------------------------
    def _advance(self) -> int | None:
        """To the next step, or to the next generation: None. Sets `_ended` where all is done."""
        try:
            found = next(self._steps)
        except StopIteration:
            self._ended = True
            return None
        self._stepped = self._driver.settled if found is None else found + 1
        if found is None:
            self._began = True
            self._is_agreed = self._agree()
        return found

    def _advance_to_generation(self) -> bool:
        """Healed; whether all members were in the same evaluation."""
        stepped = self._advance()
        return stepped is None and not self._ended and self._is_agreed

    def _agree(self) -> bool:
        """All members tell each other what they are in, once in a generation."""
        communicators, mine = self._driver.communicators, self._evaluating
        others = [f"between/{place}" for place in range(communicators.num_members)]
        try:
            with self._driver.control.waiting_for_others(communicators.generation,
                                                         communicators.wake):
                communicators.store.set(others[communicators.place], mine)
                told = {communicators.store.get(name).decode() for name in others}
        except (Interrupted, RuntimeError):
            return False  # whoever trains on finds out why
        return told == {mine} and mine != ""


@used_rightly
@contextmanager
def adopt(*, build: Build, sample: Sample, forward: Forward, iterations: int = 0,
          micro_batches: int = 0, samples: int = 1, sequence: int = 0,
          loss: Loss = "per_token", seed: int = 1234,
          flops: float = 0.0, on_rebuild: OnRebuild | None = None,
          axes: Axes | None = None, check: Sequence[Callable[[], str]] = (),
          falls_back: bool = True, environment: Mapping[str, str] = os.environ
          ) -> Generator[Job]:
    """Train what `build` builds, healing in memory where an agent has started this process.

    `build(groups, axes, place)` returns the chunks of the model at this place of a layout, wrapped
    in Megatron's DistributedDataParallel, Megatron's optimizer and its OptimizerParamScheduler. It
    is given a ProcessGroupCollection, draws the same weights on every rank, and asks no other one:
    it is called for each layout that this process is to be in. `sample(iteration, micro_batch)` is
    the data, by random access: `micro_batch` counts over all ranks. `forward(chunk, batch)` returns
    the sum of its tokens' loss, and their number; or an output and a function of it that returns
    these two, as Megatron's forward_step.

    `iterations` and `micro_batches` (of one iteration, over all ranks) are the job's `loop:`; what
    is given here must be the same, and is what counts where there is no agent. `samples` are those
    of one micro-batch: what the schedule counts; `sequence` is the length of each, without which
    there is no pipeline. `loss`: as `train.loss` of a job file. `seed`: the generators are seeded
    anew for each micro-batch, by it and by which that is. `flops`: of one iteration; 0 counts 6 for
    each parameter and micro-batch. `on_rebuild(groups)` is called in each generation, by all
    members alike: it makes groups of one's own; what it returns is `job.own` until that generation
    ends. `axes` is the layout of a replica where there is no agent. `check` are asked at the start:
    a reason, other than "", is why this loop cannot heal in memory.

    What cannot be healed in memory is said, and trained all the same, unhealed: all processes of
    the task start again after a fault. Unless it `falls_back`: then Declined is raised, before
    anything is trained. What cannot be trained by `job.step()`, and what is given wrongly, is wrong
    input: one line, and the process ends, with an agent its task. Whatever else is raised in it is
    told as this rank's error.
    """
    def work(loop: Loop) -> OwnWork:
        for name, told, given in (("iterations", loop.iterations, iterations),
                                  ("micro_batches", loop.micro_batches, micro_batches)):
            if given not in (0, told):
                raise UsageError(f"loop.{name} is {told} in the job file, and {given} in the "
                                 "script", "write the same, or leave it out of the script")
        return OwnWork(loop, build, sample, forward, samples_num=samples, sequence=sequence,
                       loss=loss, seed=seed, flops=flops, on_rebuild=on_rebuild)

    def asked() -> None:
        check_given({"build": build, "sample": sample, "forward": forward}, loss,
                    {"samples": samples, "sequence": sequence})

    with wrong_input_told(environment):
        driver: Driver
        if FD in environment:
            driver, made = _healed(asked, work, check, environment, falls_back=falls_back)
        else:
            asked()
            made = work(json.decode(environment[LOOP], type=Loop) if LOOP in environment else
                        _alone(iterations, micro_batches, axes or Axes()))
            driver = Unhealed(made, environment)
        job = Job(driver, made)
        yield job
        job.finish()
        driver.control.flush()
        # Or torch would wait for peers when the process ends.
        driver.communicators.down(driver.iteration.trainee.roots)


def _healed(asked: Callable[[], None], work: Callable[[Loop], OwnWork],
            check: Sequence[Callable[[], str]], environment: Mapping[str, str], *,
            falls_back: bool) -> tuple[Driver, OwnWork]:
    """The member of this process's task; what trains all the same where it cannot be one."""
    control, start, last_words = meet_agent(int(environment[FD]))
    control.tell(Adopted(pid=os.getpid()))
    loop = start.spec.loop
    assert loop is not None, "an agent gives its way to a loop alone"
    asked()
    made = work(loop)
    try:
        for ask in check:
            if why := ask():
                raise Unfit(why)
        member = Member(control, start, environment, Pulse(int(environment.get(PULSE, "-1"))),
                        made)
    except Unfit as unfit:
        if falls_back and isinstance(unfit, Untrained):
            raise
        why = str(unfit)
    else:
        last_words.member = member
        return member, made
    control.tell(InMemoryRecoveryDeclined(task=start.task, rank=start.rank, attempt=start.attempt,
                                          why=why))
    control.flush()
    if not falls_back:
        raise Declined(f"this loop cannot heal in memory: {why}",
                       "docs/guides/scripts.md says what can")
    log.warning("this loop cannot heal in memory: at a fault all its processes start again",
                why=why)
    gc.collect()  # what was built for that goes first
    made = work(loop)
    return Unhealed(made, environment), made


def _alone(iterations: int, micro_batches: int, replica: Axes) -> Loop:
    """What an agent would have told. Raises UsageError."""
    for name, given in (("iterations", iterations), ("micro_batches", micro_batches)):
        if given < 1:
            raise UsageError(f"{name} is not given", "without an agent nobody else says it")
    return Loop(iterations=iterations, output="", micro_batches=micro_batches,
                parallel=Parallel(tensor=(replica.tp,), pipeline=(replica.pp,),
                                  chunks=replica.chunks))
