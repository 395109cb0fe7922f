"""The step: from the reduced gradients to the next state, the same on every member.

Megatron's own chain of in-place phases, none of which may run twice. Nothing here therefore waits
for another member or is interrupted: the step starts when the whole reduction is known to be good,
and it ends. A member that has only a part of the gradients needs global values first: the sum of
`norm_square` and any `has_inf` of all members. With a sharded optimizer, `gather` follows: it waits
for other members and can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import structlog
import torch
from torch import Tensor

from ..model.optimizers import ranges, scalers, sync_mirror
from ..model.trainee import TrainingModel
from ..process.trace import Event

log = structlog.get_logger()


def norm_square(trainee: TrainingModel) -> float:
    """This member's part of the squared norm of the reduced gradients.

    Over all members, every element of the model counts once.
    """
    return math.fsum(torch.linalg.vector_norm(own, dtype=torch.float64).item() ** 2
                     for own in _counted(trainee))


def has_inf(trainee: TrainingModel) -> bool:
    """Whether any gradient of this member is not finite."""
    return not all(bool(gradient.isfinite().all()) for gradient in trainee.gradients)


def step(trainee: TrainingModel, num_tokens: float, note: Callable[[Event], None], *,
         norm_square: float | None = None, found_inf: bool = False) -> bool:
    """Divide by the loss's divisor, step the optimizer, then its schedule; whether it stepped.

    If a scaled gradient is not finite, Megatron's optimizer skips its step and lowers the scale,
    and the schedule does not advance; the iteration counts. All members see the same gradients and
    decide the same; if they see parts, `norm_square` and `found_inf` are those of all members.
    """
    note("scale")
    divisor = trainee.divisor(num_tokens)
    if divisor != 1.0:
        count = torch.tensor(divisor, dtype=torch.int, device=trainee.device)
        for ddp in trainee.ddps:
            ddp.scale_gradients(1.0 / count)
    if found_inf:  # on another member: Megatron must see it here too
        for gradient in trainee.gradients:
            gradient.fill_(math.inf)
    if norm_square is not None:
        _set_norm(trainee, math.sqrt(norm_square) / divisor)
    if trainee.mirror is not None:
        sync_mirror(trainee.mirror, trainee.optimizer)
        trainee.mirror.step()
    stepped: bool = trainee.optimizer.step()[0]
    trainee.is_gathered = not stepped or trainee.axes.dp == 1 or not trainee.is_sharded
    note("schedule")
    if stepped:
        trainee.scheduler.step(trainee.train.batch.global_)
    else:
        log.warning("gradient not finite, step skipped",
                    loss_scale=[scaler.scale.item() for scaler in scalers(trainee.optimizer)])
    note("done")
    return stepped


def gather(trainee: TrainingModel) -> None:
    """Gather the parameters that the other replicas have stepped, with a sharded optimizer.

    Waits for those replicas. Raises RuntimeError; the gather can then be repeated.
    """
    for ddp in trainee.ddps:
        ddp.start_param_sync(force_dispatch=True)


def _set_norm(trainee: TrainingModel, scaled_norm: float) -> None:
    """Make Megatron clip by this norm, of gradients that still contain the loss scale."""
    norm = scaled_norm / trainee.optimizer.get_loss_scale().item()
    for optimizer in trainee.optimizers:
        (part,) = optimizer.chained_optimizers
        part.get_grad_norm = lambda: norm


def _counted(trainee: TrainingModel) -> Iterator[Tensor]:
    """The gradients that this member counts, as Megatron chooses them for its norm."""
    owned = ranges(trainee.optimizer)
    is_sharded = trainee.is_sharded
    if trainee.at.dp and not is_sharded:
        return
    for _, param in trainee.named_parameters():
        if getattr(param, "shared", False):  # the first stage counts it
            continue
        if trainee.at.tp and not getattr(param, "tensor_model_parallel", False):
            continue
        if not is_sharded:
            yield param.main_grad
        elif id(param) in owned:
            yield param.main_grad.view(-1)[owned[id(param)]]
