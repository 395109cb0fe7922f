"""The passes of a pipeline in Megatron's own schedule, which the first stage can end early.

docs/ARCHITECTURE.md, "The transition table", says how. Megatron's schedule runs to its end, so that
all stages complete the passes of exactly the micro-batches before the marker.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_tensor_shapes,
)
from torch import Tensor

from ..communicators.operations import Operations
from ..dependencies.private_megatron import StageMessages
from .engine import PADDING, Begin, NotePass, Passes, Sample
from .losses import Losses
from .stop_agreement import StopAgreement
from .trainee import TrainingModel

MARKER = b"unicron: no more"
"""The first bytes of a marker: finite numbers in every precision. That an activation begins with
these 128 bits by chance is out of the question."""
SEND_NEXT = "tensor_send_next"
SEND_PREVIOUS = "tensor_send_prev"
KINDS = (SEND_NEXT, SEND_PREVIOUS, "recv_prev", "recv_next")
"""Megatron's arguments for one exchange between stages."""


def run(
    trainee: TrainingModel,
    operations: Operations,
    iteration: int,
    items: Sequence[int],
    sample: Sample,
    note: NotePass,
    *,
    must_stop: Callable[[], bool] | None = None,
    forward_only: bool = False,
    begin: Begin | None = None,
) -> Passes:
    """Run these micro-batches in Megatron's 1F1B schedule, interleaved with chunks. `begin` is
    called before this stage's last backward, unless the schedule is ended early. The first stage
    calls `must_stop` before each group of micro-batches: a group is one, or with chunks as many as
    there are stages. At True no other group begins. Raises RuntimeError."""
    axes, train = trainee.axes, trainee.train
    config = trainee.ddps[0].config
    config.grad_scale_func = trainee.optimizer.scale_loss
    is_chunked = axes.chunks > 1
    # Of each chunk, the schedule lets only the last backward launch the reduction of its gradients.
    no_sync = [ddp.no_sync for ddp in trainee.ddps]
    config.no_sync_func = no_sync if is_chunked else no_sync[0]
    each = padded(items, axes.pp, axes.chunks)
    stages = _Stages(trainee, operations, config, note, must_stop)
    losses, last = Losses(), _LastBackward(begin)
    # Megatron chooses it by its globals, and by arguments only since 0.16.
    schedule = (
        forward_backward_pipelining_with_interleaving
        if is_chunked
        else forward_backward_pipelining_without_interleaving
    )
    schedule(
        forward_step_func=partial(
            _forward, trainee, stages, iteration, sample, note, losses, partial(last.begins, losses)
        ),
        data_iterator=[_numbered(each) for _ in trainee.ddps] if is_chunked else _numbered(each),
        model=trainee.ddps,
        num_microbatches=len(each),
        seq_length=train.model.sequence,
        micro_batch_size=train.batch.micro,
        forward_only=forward_only,
        p2p_communicator=stages,
        pg_collection=operations.groups,
    )
    num_done = len(items) if stages.stop is None else stages.stop // axes.chunks
    return Passes(min(num_done, len(items)), losses)


def padded(items: Sequence[int], num_stages: int, num_chunks: int) -> list[int]:
    """The items, padded for Megatron's interleaved schedule, which runs groups of `num_stages`."""
    num_more = -len(items) % num_stages if num_chunks > 1 else 0
    return [*items, *[PADDING] * num_more]


def _numbered(items: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Each item, and whether it is the last."""
    return zip(items, [*[False] * (len(items) - 1), True], strict=True)


@cache
def _head_of(dtype: torch.dtype) -> list[float]:
    head: list[float] = torch.tensor(list(MARKER), dtype=torch.uint8).view(dtype).tolist()
    return head


class _LastBackward:
    """Calls `begin` once, before the last backward of the first chunk that comes to it: the last
    stage has all losses by then."""

    def __init__(self, begin: Begin | None) -> None:
        self._begin = begin

    def begins(self, losses: Losses, gradient: Tensor) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin(losses)


class _Stages(StageMessages):
    """Megatron's sends and receives between stages, without those of skipped passes.

    The messages between two stages are numbered in their order. After the stop, sender and receiver
    leave out the same messages: those of the group that does not begin, and of all later groups.
    The marker is the exception. With chunks, the last stage sends to the first one, too: the
    activations of all chunks but the last, in the same order of groups.
    """

    def __init__(
        self,
        trainee: TrainingModel,
        operations: Operations,
        config: Any,
        note: NotePass,
        must_stop: Callable[[], bool] | None,
    ) -> None:
        super().__init__(operations.groups.pp, config)
        self.stop: int | None = None
        """The number of this stage's forward passes before the stop; None: there is no stop."""
        self._trainee, self._operations, self._note = trainee, operations, note
        self._must_stop = must_stop
        self._num_forward = 0
        self._num_chunks = trainee.axes.chunks
        self._group_passes = trainee.axes.pp * self._num_chunks if self._num_chunks > 1 else 1
        """Forward passes of one group on a stage."""
        self._agreement = StopAgreement(operations, "tp", trainee.device)
        self._head = _head_of(config.pipeline_dtype)
        self._inputs = deque[Tensor]()
        """Activations received from the previous stage, for the next forward passes."""
        self._num_messages = Counter[str]()

    def begin_forward(self) -> Tensor | None:
        """Called as each forward pass begins. Returns the output of a skipped one."""
        begins_group = self._num_forward % self._group_passes == 0
        self._num_forward += 1
        if self.stop is not None:
            return torch.zeros(1, device=self._trainee.device)
        if not (
            self._must_stop_here(begins_group) if self._is_first else self._is_told(begins_group)
        ):
            return None
        self.stop = self._num_forward - 1
        return self._marker()

    @property
    def _is_first(self) -> bool:
        return bool(self.pp_group.rank() == 0)

    @property
    def _is_last(self) -> bool:
        return bool(self.pp_group.rank() == self.pp_group.size() - 1)

    def _must_stop_here(self, begins_group: bool) -> bool:
        """On the first stage: whether this group must not begin. The stage's members agree."""
        if self._must_stop is None or not begins_group:
            return False
        if self._trainee.axes.tp == 1:
            return self._must_stop()
        if self._agreement.answer():
            return True
        self._agreement.ask(must_stop=self._must_stop())
        return False

    def _is_told(self, begins_group: bool) -> bool:
        """On a later stage: whether the input of this pass is the marker."""
        activation = self._inputs.popleft()
        if self._must_stop is None or not begins_group:
            return False
        num = len(MARKER) // activation.element_size()
        # The interleaved schedule receives ahead, so this waits for the device, once for each
        # group. In the other schedule Megatron has just waited (batch_p2p_sync).
        head: list[float] = activation.view(-1)[:num].tolist()
        return head == self._head

    def _marker(self) -> Tensor:
        """A tensor in the shape of an activation that tells the next stage to stop."""
        train, groups = self._trainee.train, self._operations.groups
        shape = get_tensor_shapes(
            seq_length=train.model.sequence,
            decoder_seq_length=train.model.sequence,
            micro_batch_size=train.batch.micro,
            config=self.config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )[0]
        marker = torch.zeros(shape, dtype=self.config.pipeline_dtype, device=self._trainee.device)
        marker.view(-1)[: len(self._head)] = torch.tensor(self._head, dtype=marker.dtype)
        return marker

    def exchange(self, given: dict[str, Any]) -> Any:
        self._note("stage", PADDING)
        wanted = [name for name in KINDS if given[name] is not None and given[name] is not False]
        if self.stop is not None:
            for name in [name for name in wanted if self._is_over(name)]:
                wanted.remove(name)
                given[name] = False if name in ("recv_prev", "recv_next") else None
            if not wanted:
                return None, None, None if given.get("wait_on_reqs", True) else {}
        self._num_messages.update(wanted)
        received = super().exchange(given)
        if "recv_prev" in wanted and not self._is_first:
            self._inputs.append(received[0])
        return received

    def _is_over(self, name: str) -> bool:
        """Whether the next message of this kind belongs to a skipped pass."""
        assert self.stop is not None
        num_groups, is_forward = self.stop // self._group_passes, name in (SEND_NEXT, "recv_prev")
        is_wrapped = self._is_last if name in (SEND_NEXT, "recv_next") else self._is_first
        num = (
            num_groups * (self._group_passes // self._num_chunks) * (self._num_chunks - 1)
            if is_wrapped
            else self.stop + is_forward
        )
        return self._num_messages[name] >= num


def _forward(
    trainee: TrainingModel,
    stages: _Stages,
    iteration: int,
    sample: Sample,
    note: NotePass,
    losses: Losses,
    last_backward_begins: Callable[[Tensor], None],
    items: Iterator[tuple[int, bool]],
    ddp: Any,
) -> tuple[Tensor, Any]:
    """Run one micro-batch in one chunk: a forward_step of Megatron's schedule."""
    skipped = stages.begin_forward()
    if skipped is not None:
        return skipped, _loss_of_skipped
    item, is_last = next(items)
    trainee.draw.at(iteration, item)
    trainee.experts.count(counts=item != PADDING)
    if item == PADDING:
        batch = trainee.padding(sample(0))
    else:
        note("micro_batch", item)
        batch = sample(item)
        note("forward", item)
    batch = trainee.given(batch)

    def loss_of_output(per_token: Tensor) -> tuple[Tensor, Tensor, None]:
        loss, num_tokens = trainee.loss_of(per_token, batch), trainee.num_tokens(batch)
        losses.add(item, loss, num_tokens)
        return loss, torch.zeros((), dtype=torch.int), None  # the divisor is that of all members

    def backward_begins(gradient: Tensor) -> None:
        trainee.experts.count(counts=item != PADDING)  # it may compute activations again
        if item != PADDING:
            note("backward", item)

    out = trainee.forward(ddp, batch)
    if is_last and out.requires_grad:
        out.register_hook(last_backward_begins)  # type: ignore[no-untyped-call, unused-ignore]
    if out.requires_grad:
        out.register_hook(backward_begins)  # type: ignore[no-untyped-call, unused-ignore]
    return out, loss_of_output


def _loss_of_skipped(skipped: Tensor) -> tuple[Tensor, Tensor, None]:
    return torch.zeros((), device=skipped.device), torch.zeros((), dtype=torch.int), None
