"""`adopt`: in-memory recovery for a custom training loop on megatron-core.

Import this module before megatron. deploy/examples/loop.py is a complete example;
docs/guides/scripts.md has a shorter one, and lists what such a loop may contain.
"""

import gc
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from msgspec.structs import replace

from ....events.decoding import from_json
from ....events.errors import UsageError
from ....events.records.reports import InMemoryRecoveryDeclined
from ....events.spec.job import Loop, Reproducible, check_reproducible
from ....events.spec.model import Axes
from ....events.spec.parallelism import Parallel, coordinates, num_positions
from ...ipc.pipe_protocol import FD, LOOP, PULSE, Adopted
from ...ipc.progress_page import ProgressWriter
from ..process.control_thread import Interrupted
from ..rank import connect_agent
from .arguments import Loss, check_arguments, check_values, preload_checked, usage_errors_reported

# Before the first Megatron import, which without CUDA would load a compiler for nothing.
preload_checked()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from ..checkpoint.saver import Format  # noqa: E402
from ..dependencies.known_versions import warn_unknown  # noqa: E402
from ..member import Member  # noqa: E402
from ..model import determinism  # noqa: E402
from ..model.megatron_passes import evaluate  # noqa: E402
from ..model.workload import Beginning  # noqa: E402
from .custom_loop import (  # noqa: E402
    Build,
    Forward,
    LoopWorkload,
    NotRecoverable,
    NotTrainable,
    OnRebuild,
    Sample,
)
from .drivers import RestartOnlyDriver  # noqa: E402

T = TypeVar("T")
Driver = Member | RestartOnlyDriver
log = structlog.get_logger()

EVALUATIONS_NUM_MAX = 1 << 30
"""More than follow any step: what a member tells that has all of them behind it."""
ENDS_NUM = EVALUATIONS_NUM_MAX + 1
"""What a member tells that is in `finish`, and never comes to an evaluation again."""


class Declined(UsageError):
    """In-memory recovery does not support this loop; the message gives the reason. The control
    plane has been told: a fault restarts all processes of the task."""


class Job:
    """The loop's handle on its task. All properties refer to the current generation."""

    def __init__(self, driver: Driver, work: LoopWorkload) -> None:
        self._driver = driver
        self._work = work
        self._steps = driver.steps()
        self._began = self._ended = False
        self._stepped = self._num_evaluated = self._num_skipped = 0
        self._next = (0, 0)
        """The iteration whose evaluations come next, and how many of them this member has finished.
        """

    # --- properties -------------------------------------------------------------------------------
    @property
    def chunks(self) -> list[Any]:
        """The model chunks of this rank. A layout change replaces them: read them again after each
        step."""
        return self._driver.iteration.engine.trainee.ddps

    @property
    def model(self) -> Any:
        """The first chunk; the only one without interleaving."""
        return self.chunks[0]

    @property
    def optimizer(self) -> Any:
        """The optimizer that `build` returned."""
        return self._driver.iteration.engine.trainee.optimizer

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._driver.iteration.engine.trainee.device

    @property
    def groups(self) -> Any:
        """The generation's ProcessGroupCollection. Do not store it: a stored group keeps dead
        connections open."""
        return self._driver.communicators.groups

    @property
    def own(self) -> Any:
        """What `on_rebuild` returned for this generation."""
        return self._work.made

    @property
    def num_members(self) -> int:
        """The current number of processes. Do not cache it, because generations change it."""
        return self._driver.communicators.num_members

    @property
    def place(self) -> int:
        """The torch.distributed rank of this process, from 0. The next generation may change it."""
        return self._driver.communicators.place

    @property
    def is_first(self) -> bool:
        """True on rank 0. Use it for output that one process writes."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """True on the last rank of the layout, which writes the output in Megatron-LM."""
        return self.place == num_positions(self._driver.communicators.axes) - 1

    @property
    def iteration(self) -> int:
        """The number of completed iterations, which is the index of the next one."""
        return self._stepped

    @property
    def loss(self) -> float:
        """The loss of the whole batch in the last completed iteration; equal on all ranks of the
        layout."""
        return self._driver.iteration.history.last[0]

    @property
    def auxiliary_losses(self) -> dict[str, float]:
        """The auxiliary losses of a mixture of experts in the last completed iteration, by name in
        Megatron: the mean over layers and all micro-batches, without the coefficient. Megatron's
        own log of them is cleared in each step."""
        return dict(self._driver.iteration.engine.trainee.experts.losses)

    @property
    def step_s(self) -> float:
        """The duration of the last completed iteration, recovery included."""
        return self._driver.iteration.history.last[1]

    def history(self, first: int) -> dict[int, tuple[float, float]]:
        """Loss and duration (in seconds) of each completed iteration from `first` on, also of those
        before this process joined, but not of those before a restart of the whole task."""
        history = self._driver.iteration.history
        return {
            iteration: (
                history.losses[iteration - history.first],
                history.step_s[iteration - history.first],
            )
            for iteration in range(max(first, history.first), history.end)
        }

    # --- methods ----------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[int]:
        """Yield the remaining iterations. Call `step` once for each. If the task rolls back to an
        earlier iteration, the loop continues from that iteration."""
        if not self._began:
            self._advance()
        while not self._ended and self.iteration < self._work.train.iterations:
            yield self.iteration

    def step(self) -> int:
        """Run the next step, with any recovery that it needs. Returns the completed iteration,
        which is an earlier one if the task rolls back, or -1 if none was left.

        A member that receives the state after a step that others have taken skips the evaluations
        that one of them has finished already.
        """
        self._num_evaluated = 0
        expected = self.iteration
        self._next = (expected + 1, 0)
        while True:
            stepped = self._advance()
            if self._ended:
                return -1
            if stepped is not None:
                if self._num_skipped < ENDS_NUM:
                    self._num_skipped = 0
                return stepped
            if self.iteration > expected:
                return self.iteration - 1
            expected = self.iteration  # the task may be back at an earlier one
            self._next = (expected + 1, 0)

    def evaluate(self, call: Callable[[], T]) -> T | None:
        """Between two steps: run `call`, which may use collectives, on all members and return its
        result. It must not change the model or the optimizer.

        With gloo, it runs in a separate thread. If a member fails during it, `call` runs again on
        all members of the next generation, also on those that had not reached it. It returns None
        on a member that has not finished it if another one has, if a new member has joined, which
        does not come here before its next step, or if the task is back at an earlier iteration,
        from which it comes here again.
        """
        self._num_evaluated += 1
        number, began = self._num_evaluated, self.iteration
        results: list[T] = []
        while number > self._num_skipped:
            self._next = (began, number - 1)
            if self._driver.run_collectively(lambda: results.append(call())):
                return results[-1]
            results.clear()
            if self._advance() is not None or self._ended:
                self._num_skipped = max(self._num_skipped, EVALUATIONS_NUM_MAX)
            if number <= self._num_skipped:
                why = "a member failed during it"
                if self.iteration < began:
                    why += f", and the task is back at iteration {self.iteration}"
                log.warning(f"evaluation skipped: {why}", iteration=began)
        return None

    def mean_loss(self, num: int, batch_of: Callable[[int], Any]) -> float:
        """In an evaluation: the mean loss of `num` batches, in the unit of `loss` of `adopt`. The
        replicas share the batches; every rank gets the result. `batch_of(i)` returns batch i."""
        communicators, trainee = self._driver.communicators, self._driver.iteration.engine.trainee
        axes = communicators.axes
        summed = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.place < num_positions(axes):  # a standby member has no position in the layout
            items = range(coordinates(axes, self.place).dp, num, axes.dp)
            evaluate(trainee, communicators.operations, items, batch_of).write(summed)
        dist.all_reduce(summed)
        loss_sum, num_tokens = summed.tolist()
        if trainee.train.loss == "per_token":
            return float(loss_sum / max(num_tokens, 1.0))
        return float(loss_sum * trainee.train.num_micro_batches / num)

    def finish(self) -> None:
        """Run all remaining steps; write and publish the final checkpoint. If the task goes back to
        an earlier iteration meanwhile, no member evaluates any more."""
        self._num_skipped = ENDS_NUM
        while not self._ended:
            self._advance()

    # --- private ----------------------------------------------------------------------------------
    def _advance(self) -> int | None:
        """Run to the next step: its iteration; or to the next generation: None. Sets `_ended`."""
        try:
            stepped = next(self._steps)
        except StopIteration:
            self._ended = True
            return None
        self._stepped = self._driver.settled if stepped is None else stepped + 1
        if stepped is None:
            self._began = True
            self._num_skipped = self._agree()
            if self._num_skipped == ENDS_NUM and self.iteration < self._work.train.iterations:
                log.warning(
                    "evaluations are skipped from here on: ranks have left the loop of the script",
                    iteration=self.iteration,
                )
        return stepped

    def _agree(self) -> int:
        """Called once per generation. Returns how many evaluations are not repeated: those after
        the last step that some member has finished."""
        communicators = self._driver.communicators
        iteration, num_finished = self._next
        mine = num_finished if iteration == self.iteration else EVALUATIONS_NUM_MAX
        if self._num_skipped == ENDS_NUM:
            mine = ENDS_NUM
        try:
            with self._driver.control.waiting_for_others(
                communicators.generation, communicators.interrupt
            ):
                return int(communicators.rounds.agree(b"%d" % mine, _largest))
        except (Interrupted, RuntimeError):
            return mine  # the next collective reports the cause


def _largest(told: Sequence[bytes]) -> bytes:
    return max(told, key=int)


@check_arguments
@contextmanager
def adopt(
    *,
    build: Build,
    sample: Sample,
    forward: Forward,
    iterations: int = 0,
    micro_batches: int = 0,
    samples: int = 1,
    sequence: int = 0,
    loss: Loss = "per_token",
    reproducible: Reproducible | None = None,
    seed: int = 1234,
    flops: float = 0.0,
    on_rebuild: OnRebuild | None = None,
    axes: Axes | None = None,
    check: Sequence[Callable[[], str]] = (),
    beginning: Beginning | None = None,
    exports: Sequence[Format] = (),
    falls_back: bool = True,
) -> Generator[Job]:
    """Train the model of `build`, with in-memory recovery if an agent has started this process.

    docs/guides/scripts.md has `build`, `sample`, `forward`, `iterations`, `micro_batches`,
    `samples`, `sequence`, `loss`, `reproducible` and `on_rebuild`. `seed`: together with the
    position of a micro-batch, it seeds the generators. `flops`: FLOPs of one iteration; 0 counts 6
    for each parameter and micro-batch. `axes`: the layout of a replica, used without an agent only.
    `check`: functions that run at the start and return "" or the reason why in-memory recovery does
    not support this loop. `beginning`: the state of which training begins, if it is newer than the
    task's own; `exports`: further checkpoints to write. Both need an agent.

    If in-memory recovery does not support the loop, a warning gives the reason, and a fault
    restarts all processes of the task; with `falls_back=False`, `adopt` raises Declined. Invalid
    arguments, or a loop that `job.step()` cannot train, print one line and end the process; with an
    agent, they end the task.
    """

    def work(loop: Loop) -> LoopWorkload:
        for name, spec, given in (
            ("iterations", loop.iterations, iterations),
            ("micro_batches", loop.micro_batches, micro_batches),
        ):
            if given not in (0, spec):
                raise UsageError(
                    f"loop.{name} is {spec} in the job file, and {given} in the script",
                    "write the same, or leave it out of the script",
                )
        loop = _with_reproducible(loop, reproducible)
        return LoopWorkload(
            loop,
            build,
            sample,
            forward,
            samples_num=samples,
            sequence=sequence,
            loss=loss,
            seed=seed,
            flops=flops,
            on_rebuild=on_rebuild,
            beginning=beginning,
            exports=exports,
        )

    def validate() -> None:
        calls = {"build": build, "sample": sample, "forward": forward}
        if isinstance(sample, DataLoader):
            del calls["sample"]
        check_values(calls, loss, {"samples": samples, "sequence": sequence}, reproducible)

    with usage_errors_reported():
        driver: Driver
        if FD in os.environ:
            driver, made = _connect(validate, work, check, falls_back=falls_back)
        else:
            warn_unknown()
            validate()
            made = work(
                from_json(os.environ[LOOP], Loop)
                if LOOP in os.environ
                else _loop_without_agent(iterations, micro_batches, axes or Axes())
            )
            driver = RestartOnlyDriver(made, os.environ)
        job = Job(driver, made)
        yield job
        job.finish()
        driver.control.flush()
        # Without this, torch would wait for peers when the process ends.
        driver.communicators.down(driver.iteration.engine.trainee.roots)


def _connect(
    validate: Callable[[], None],
    work: Callable[[Loop], LoopWorkload],
    check: Sequence[Callable[[], str]],
    *,
    falls_back: bool,
) -> tuple[Driver, LoopWorkload]:
    """This process's member, or a restart-only driver if recovery does not support the loop."""
    control, start, exit_report = connect_agent(int(os.environ[FD]))
    is_known = start.declined and falls_back
    if not is_known:
        control.tell(Adopted(pid=os.getpid()))
    warn_unknown()
    loop = start.spec.loop
    assert loop is not None, "an agent opens its pipe for a loop task only"
    if is_known:
        made = work(loop)
        return RestartOnlyDriver(made, os.environ, (control, start)), made
    validate()
    made = work(loop)
    try:
        for reason in check:
            if why := reason():
                raise NotRecoverable(why)
        member = Member(
            control, start, os.environ, ProgressWriter(int(os.environ.get(PULSE, "-1"))), made
        )
    except NotRecoverable as error:
        if falls_back and isinstance(error, NotTrainable):
            raise
        why = str(error)
    else:
        exit_report.member = member
        return member, made
    if made.train.reproducible == "required":
        determinism.decline("required", why)
    from_memory = falls_back and loop.copy_every > 0
    control.tell(
        InMemoryRecoveryDeclined(
            task=start.task,
            rank=start.rank,
            attempt=start.attempt,
            why=why,
            from_memory=from_memory,
        )
    )
    control.flush()
    if not falls_back:
        raise Declined(
            f"this loop cannot heal in memory: {why}",
            "docs/guides/scripts.md lists what is supported",
        )
    log.warning(
        "this loop cannot heal in place: a fault restarts all its processes",
        why=why,
        from_memory=from_memory,
    )
    gc.collect()  # free the first model before the second is built
    made = work(loop)
    return RestartOnlyDriver(made, os.environ, (control, start)), made


def _with_reproducible(loop: Loop, asked: Reproducible | None) -> Loop:
    """The loop with what the script asks for. Raises UsageError."""
    if asked is None or asked == loop.reproducible:
        return loop
    if loop.reproducible != "rounding":
        raise UsageError(
            f"loop.reproducible is {loop.reproducible} in the job file, and {asked} in the script",
            "write the same, or leave it out of the script",
        )
    if loop.model is not None:
        raise UsageError(
            f"reproducible is {asked} in the script only, but layouts are computed "
            "from the job file",
            f"write loop: {{reproducible: {asked}}} there",
        )
    found = replace(loop, reproducible=asked)
    check_reproducible(found, "loop")
    return found


def _loop_without_agent(iterations: int, micro_batches: int, replica: Axes) -> Loop:
    """The loop spec, which otherwise the agent sends. Raises UsageError."""
    for name, given in (("iterations", iterations), ("micro_batches", micro_batches)):
        if given < 1:
            raise UsageError(f"{name} is not given", "without an agent the script must give it")
    return Loop(
        iterations=iterations,
        output="",
        micro_batches=micro_batches,
        parallel=Parallel(tensor=(replica.tp,), pipeline=(replica.pp,), chunks=replica.chunks),
    )
