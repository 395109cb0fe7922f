"""The gradient reduction: the local gradients of all members added up in place, with a backup.

The result counts only if the whole reduction is known to be good and no member had begun to abort
it. The reduction overlaps with the last backward (overlapped_reduction.py), or follows it.
"""

import math
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from ...diagnosis.classifier import NOTHING
from ..communicators.communicators import ABORTED, Communicators
from ..model import cpu_device
from ..model.experts import RouterSums
from ..model.optimizers import scalers
from ..model.trainee import TrainingModel
from ..process.control_thread import Abandoned, Control, Interrupted
from ..process.exit_report import verdict_of
from ..process.trace import Marks, Note
from .exact_reduction import LIMBS_NUM, ExactBarrier, ExactReduction, norm_square_of
from .losses import Losses
from .overlapped_reduction import BucketLauncher, GradientBackup


# --- Hooks on Megatron's own phases, which report each phase as it begins and change nothing ---
class PhaseHooks:
    """Hooks on the model's buckets and its optimizer."""

    def __init__(self, trainee: TrainingModel, note: Note) -> None:
        self._note = note
        self._local = threading.local()  # an abandoned reduction may still run in another thread
        for index, group in enumerate(trainee.bucket_groups if not trainee.train.overlap else ()):
            _hook(
                group, "finish_grad_sync", partial(self._enter, index), partial(self._leave, index)
            )
        optimizer = trainee.optimizer
        _hook(optimizer, "prepare_grads", lambda: note("unscale"))
        for scaler in scalers(optimizer):
            _hook(scaler, "update", lambda: note("scaler"))
        _hook(optimizer, "get_grad_norm", lambda: note("norm"), lambda: note("clip"))
        _hook(optimizer, "step_with_ready_grads", lambda: note("step"), lambda: note("stepped"))
        for module in {trainee.modules[0], trainee.modules[-1]} if trainee.axes.pp > 1 else ():
            if getattr(module, "share_embeddings_and_output_weights", False):
                _hook(module, "shared_embedding_or_output_weight", self._embedding)

    @contextmanager
    def reduction(self, complete: list[bool], check_active: Callable[[], None]) -> Generator[None]:
        """In this context, `complete` gets an entry per begun bucket: True if it was completed.
        `check_active` raises as soon as the reduction must be left."""
        self._local.complete = complete
        self._local.check_active = check_active
        self._local.is_in = True
        try:
            yield
        finally:
            self._local.is_in = False

    def _enter(self, bucket: int) -> None:
        self._note("bucket", bucket)
        self._local.check_active()
        self._local.complete.append(False)

    def _leave(self, bucket: int) -> None:
        self._note("bucket_done", bucket)
        self._local.check_active()
        self._local.complete[-1] = True

    def _embedding(self) -> None:
        """Megatron calls this before it adds up the tied weight's two gradients, and in passes."""
        if getattr(self._local, "is_in", False):
            self._note("embedding")
            self._local.check_active()


def _hook(
    thing: Any, method: str, before: Callable[[], None], after: Callable[[], None] | None = None
) -> None:
    """Call `before` and `after` around this method of `thing`."""
    original = getattr(thing, method)

    def hooked(*args: Any, **options: Any) -> Any:
        before()
        result = original(*args, **options)
        if after is not None:
            after()
        return result

    setattr(thing, method, hooked)


T = TypeVar("T")
Outcome = Literal["stepped", "boundary", "quiesced", "failed"]
"""`boundary`: stepped, and all members stop. `quiesced`: ordered to stop. `failed`: see `why`."""


class Stats(NamedTuple):
    """Values of this member before the reduction, sums over all members after it: the numbers of
    members that have an order to stop at this boundary, still write their share of a checkpoint,
    cannot take an in-memory checkpoint now, and have their last share of one in no store."""

    loss_sum: float = 0.0
    num_tokens: float = 0.0
    num_stopping: float = 0.0
    num_saving: float = 0.0
    num_sending: float = 0.0
    num_unstored: float = 0.0


class StepBarrier(NamedTuple):
    """Values over all gradients that a step needs if a member has only a part (`step_barrier`).
    `num_overflows`: the parameters whose exact sum does not count; the iteration runs again."""

    norm_square: float
    num_not_finite: float = 0.0
    num_overflows: float = 0.0


class Reduction:
    """Adds up the gradients in Megatron's buffers. Of the last failed reduction, `why` is the
    error, `verdict` its classification, `num_complete` the number of completed buckets."""

    def __init__(
        self,
        trainee: TrainingModel,
        control: Control,
        communicators: Communicators,
        note: Note,
        marks: Marks,
    ) -> None:
        self.why = ""
        self.verdict = NOTHING
        self.num_complete = 0
        self.was_abandoned = False
        """Whether the last wait was abandoned: the waiting thread may still hold the model."""
        self.has_lost_sum = False
        """Whether the last failed reduction has left no local gradients (`train.kept_sum`)."""
        self.router_sums = trainee.experts.sums()
        """Those over all members, after a reduction."""
        self.checks: tuple[int, ...] = ()
        """Those of all members, after an exact barrier."""
        self._trainee = trainee
        self._control, self._communicators = control, communicators
        self._note = note
        self._marks = marks
        self._hooks = PhaseHooks(trainee, note)
        self.exact = (
            None if trainee.exact is None else ExactReduction(trainee, trainee.exact, communicators)
        )
        self._backup = self.exact or GradientBackup(trainee)
        self._buckets = (
            BucketLauncher(trainee.bucket_groups, self._backup, note)
            if trainee.train.overlap
            else None
        )

    def begin(self, mine: Stats, losses: Losses) -> None:
        """Launch the stats before the last backward, which then launches the buckets. The stats
        cover the last micro-batch already: if a member dies after that, stats and buckets are lost
        together. Does nothing without overlap, or if this member has an immediate order to stop."""
        if self._buckets is None:
            return
        generation = self._communicators.generation

        def must_stop() -> bool:
            return self._control.pending_quiesce(generation) == "now"

        if must_stop():
            return
        self._note("reduce")
        if must_stop():  # the order arrived meanwhile
            return
        self._note("stats")
        self._buckets.begin(self._own_stats(mine, losses), must_stop)

    @contextmanager
    def backward(self, *, is_last: bool) -> Generator[None]:
        """Context of every backward outside a pipeline: only the last one launches buckets."""
        with ExitStack() as stack:
            if self._buckets is not None and not is_last:
                for ddp in self._trainee.ddps:
                    stack.enter_context(ddp.no_sync())
            yield

    def give_up(self) -> None:
        """The passes have failed, or do not count: the local gradients are lost. End the reduction
        if it has begun."""
        if self._buckets is None:
            return
        if self._buckets.current is not None:
            self._end(self._buckets)
            self._backup.drop()
        self._buckets.reset()  # a pipeline's last backward may have counted its gradients

    def _end(self, buckets: BucketLauncher) -> None:
        assert buckets.current is not None
        waiter = buckets.current.end(self._communicators.interrupt)
        if waiter is not None:
            self._control.abandon(waiter.is_alive)
        buckets.reset()

    def run(self, mine: Stats, losses: Losses) -> Stats | Outcome:
        """Reduce. Returns the stats of all members; a failure restores the local gradients, or
        loses them (`has_lost_sum`)."""
        if self._buckets is None:
            found = self._run_at_once(mine, losses)
        else:
            found = self._run_overlapped(self._buckets, mine, losses)
        if isinstance(found, str):
            self.undo()
        elif self.exact is None and self._trainee.is_plain:
            self.done()
        return found

    def undo(self) -> None:
        """The reduction failed, or its result does not count: restore the local gradients."""
        self.has_lost_sum = not self._backup.restore()

    def done(self) -> None:
        """The result counts, or the local gradients no longer do: free their backup."""
        self._backup.drop()
        self.num_complete = 0

    def free(self) -> None:
        """Between two generations: free the memory that only a reduction needs."""
        self._backup.free()

    def step_barrier(
        self, mine: Tensor, scale: Tensor | None = None
    ) -> tuple[StepBarrier, float] | Outcome:
        """The step barrier: add up `mine`, the fields of a StepBarrier. Returns the sums, and
        `scale` (None: 1), with one read, after all members have entered it with their parts
        reduced: a member that passes it steps, whatever happens to the others."""

        def exchange() -> tuple[StepBarrier, float]:
            dist.all_reduce(mine)
            self._note("passed")
            if scale is None:
                return StepBarrier(*mine.tolist()), 1.0
            *values, found = torch.cat((mine, scale.detach().reshape(1).double())).tolist()
            return StepBarrier(*values), found

        self._note("gate")
        return self.run_collectively(exchange)

    def exact_barrier(
        self, mine: ExactBarrier, scale: Tensor | None = None
    ) -> tuple[StepBarrier, float] | Outcome:
        """As `step_barrier`, with exact sums."""

        def exchange() -> tuple[StepBarrier, float]:
            values = torch.tensor(
                [*mine[:2], *mine.limbs, *mine.checks], device=self._trainee.device
            )
            dist.all_reduce(values)
            self._note("passed")
            overflows, not_finite, *rest = values.tolist()
            self.checks = tuple(rest[LIMBS_NUM:])
            gate = StepBarrier(norm_square_of(rest[:LIMBS_NUM]), not_finite, overflows)
            return gate, 1.0 if scale is None else scale.item()

        self._note("gate")
        return self.run_collectively(exchange)

    def _run_at_once(self, mine: Stats, losses: Losses) -> Stats | Outcome:
        self._note("reduce")
        if self._backup.is_kept:
            self._keep_all()
        complete: list[bool] = []
        found = self.run_collectively(
            partial(
                self._reduce,
                self._own_stats(mine, losses),
                self._communicators.groups,
                dist.group.WORLD,
                complete,
                _check_of(self._communicators),
            )
        )
        self.num_complete = sum(complete)
        if isinstance(found, str):
            return found
        stats, self.router_sums = found
        return stats

    def _keep_all(self) -> None:
        for group in self._trainee.bucket_groups:
            self._backup.keep(group)

    def _run_overlapped(
        self, buckets: BucketLauncher, mine: Stats, losses: Losses
    ) -> Stats | Outcome:
        if buckets.current is None:
            self.begin(mine, losses)
        reduction = buckets.current
        if reduction is None:
            buckets.reset()  # the last backward has launched nothing, but counted its gradients
            return "quiesced"
        buckets.launch_rest()
        check_active, groups = _check_of(self._communicators), self._communicators.groups

        def wait_all() -> tuple[Stats, RouterSums]:
            self._until_computed()
            self._marks.wait_begins()
            stats = _read(reduction.wait_all(self._note, check_active))
            if self.exact is not None:
                for group in self._trainee.bucket_groups:
                    self.exact.finish(group)
                self._finish_exact(self.exact, check_active)
            else:
                with self._hooks.reduction([], check_active):
                    # Megatron records the end of all buckets, and then adds up over the ranks of a
                    # replica what these share: tied embeddings, norms in sequence parallelism.
                    finalize_model_grads(self._trainee.ddps, None, pg_collection=groups)
            check_active()
            sums = self._trainee.experts.reduced(groups)
            check_active()
            return stats, sums

        found = self.run_collectively(wait_all)
        self.num_complete = reduction.num_complete
        if not isinstance(found, str):
            buckets.current = None
            self._note("reduced")
            stats, self.router_sums = found
            return stats
        if self.was_abandoned:
            buckets.reset()  # its waiting thread cleans up
        else:
            self._end(buckets)
        return found

    def meet(self, mine: Stats) -> Stats | Outcome:
        """Exchange only the stats. Returns when every member has reached this point."""
        return self.run_collectively(
            partial(self._stats, self._own_stats(mine, Losses()), dist.group.WORLD)
        )

    def run_collectively(
        self, collective: Callable[[], T], replica: frozenset[int] = frozenset()
    ) -> T | Outcome:
        """Run a collective of all members, or of `replica`."""
        found: T | Outcome = "failed"
        communicators = self._communicators
        self.was_abandoned = False
        self.why, self.verdict = "", NOTHING
        try:
            with self._marks.in_collective():
                found = self._call(collective, replica)
        except Interrupted:
            return "quiesced"
        except Abandoned:
            self.was_abandoned = True
            return "quiesced"
        except (RuntimeError, *ABORTED) as error:
            if is_cuda_error(error) or (isinstance(error, ABORTED) and not communicators.woken):
                raise
            self.why = f"{type(error).__name__}: {error}".strip()
            self.verdict = verdict_of(error)
        if communicators.woken or (
            self.why and self._control.pending_quiesce(communicators.generation) == "now"
        ):
            return "quiesced"
        return found

    def _call(self, collective: Callable[[], T], replica: frozenset[int]) -> T:
        """With gloo, run in a detached thread: nothing interrupts some waits. NCCL is aborted."""
        generation, interrupt = self._communicators.generation, self._communicators.interrupt
        if self._communicators.backend == "nccl":
            with self._control.waiting_for_others(generation, interrupt, replica):
                return collective()

        def call() -> T:
            with cpu_device.cpu_mode():
                return collective()

        return self._control.run_detached(generation, interrupt, call, replica)

    def _own_stats(self, mine: Stats, losses: Losses) -> Tensor:
        stops = self._control.pending_quiesce(self._communicators.generation) is not None
        mine = mine._replace(num_stopping=float(stops))
        values = on_device(mine, self._trainee.device)
        losses.write_num_tokens(values[1])
        return torch.cat(
            (
                values,
                losses.by_micro_batch(self._trainee.train.num_micro_batches, self._trainee.device),
            )
        )

    def _stats(self, values: Tensor, world: Any) -> Stats:
        dist.all_reduce(values, group=world)
        return _read(values.tolist())

    def _reduce(
        self,
        own_stats: Tensor,
        groups: Any,
        world: Any,
        complete: list[bool],
        check_active: Callable[[], None],
    ) -> tuple[Stats, RouterSums]:
        """Exchange the stats, then run Megatron's own reduction.

        After an abandoned wait it could still change gradients that count. So it leaves Megatron's
        division by the token count out, uses the groups of its own generation, and checks before
        each phase that the generation is active.
        """
        self._until_computed()
        self._note("stats")
        check_active()
        stats = self._stats(own_stats, world)
        self._marks.stats_received()
        if not self._backup.is_kept:
            self._keep_all()  # the local gradients are lost from here on, not before
        check_active()
        if self.exact is not None:
            self._reduce_exactly(self.exact, complete, check_active)
        else:
            self._reduce_buckets(groups, complete, check_active)
        check_active()
        sums = self._trainee.experts.reduced(groups)
        if self._trainee.device.type == "cuda":
            self._marks.wait_begins()  # on CUDA, a wait blocks the stream, not the host
            torch.cuda.synchronize()
        check_active()
        self._note("reduced")
        return stats, sums

    def _reduce_buckets(
        self, groups: Any, complete: list[bool], check_active: Callable[[], None]
    ) -> None:
        """Megatron's own reduction."""
        with self._hooks.reduction(complete, check_active):
            # A member that mirrors a shard needs the gradients of two shards.
            whole = {"force_all_reduce": True} if self._trainee.mirror is not None else {}
            finalize_model_grads(self._trainee.ddps, None, pg_collection=groups, **whole)

    def _reduce_exactly(
        self, exact: ExactReduction, complete: list[bool], check_active: Callable[[], None]
    ) -> None:
        for index, group in enumerate(self._trainee.bucket_groups):
            self._note("bucket", index)
            check_active()
            complete.append(False)
            for work in exact.launch(group):
                work.wait()
            check_active()
            exact.finish(group)
            self._note("bucket_done", index)
            complete[-1] = True
        self._finish_exact(exact, check_active)

    def _finish_exact(self, exact: ExactReduction, check_active: Callable[[], None]) -> None:
        def embedding_begins() -> None:
            self._note("embedding")
            check_active()

        exact.finish_replica(embedding_begins)
        check_active()

    def _until_computed(self) -> None:
        if self._trainee.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _check_of(communicators: Communicators) -> Callable[[], None]:
    """A function that raises RuntimeError as soon as the current generation is being left."""
    groups = communicators.groups

    def check_active() -> None:
        if communicators.woken or communicators.groups is not groups:
            raise RuntimeError("the generation ended meanwhile")

    return check_active


def _read(values: Sequence[float]) -> Stats:
    """The stats, and the loss sum from the loss of each micro-batch: `fsum` rounds once, so that it
    does not depend on the order."""
    return Stats(*values[: len(Stats())])._replace(loss_sum=math.fsum(values[len(Stats()) :]))


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """A float64 tensor of few values. On CUDA torch.tensor waits for the stream; fill does not."""
    made = torch.zeros(len(values), dtype=torch.float64, device=device)
    for index, value in enumerate(values):
        if value:
            made[index].fill_(value)
    return made


def is_cuda_error(error: BaseException) -> bool:
    """Whether this error has ruined the CUDA context, so that only a new process helps."""
    return "CUDA error" in str(error)
