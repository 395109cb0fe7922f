"""Megatron's step: from the reduced gradients to the next state, the same on every member.

The step is Megatron's own chain of in-place phases, none of which may run twice. So no phase waits
for another member, and none is interrupted. With a sharded optimizer, `gather` follows, which waits
for other members and can be repeated.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import torch
from torch import Tensor

from ..dependencies import private_megatron
from ..process.trace import Event
from .optimizers import ranges, scalers, sync_mirror
from .trainee import TrainingModel

log = structlog.get_logger()


def norm_square(trainee: TrainingModel, *, dp: int | None = None) -> Tensor:
    """This member's part of the squared norm of the reduced gradients, on the device. In the sum
    over all members, every element of the model counts once: without a sharded optimizer, on
    data-parallel rank 0. `dp`: as if this member had that data-parallel rank."""
    norms = [
        torch.linalg.vector_norm(own, dtype=torch.float64)
        for own in _counted(trainee, trainee.at.dp if dp is None else dp)
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=trainee.device)
    return torch.stack(norms).square().sum()


def has_inf(trainee: TrainingModel) -> Tensor:
    """Whether any gradient of this member is not finite, on the device."""
    return ~torch.stack([gradient.isfinite().all() for gradient in trainee.gradients]).all()


def step_barrier(trainee: TrainingModel, *, dp: int | None = None) -> Tensor:
    """What this member adds to the step barrier: the fields of a StepBarrier, on the device."""
    return torch.stack((norm_square(trainee, dp=dp), has_inf(trainee).double()))


def scale_of(optimizer: Any) -> Tensor | None:
    """The loss scale, on the device; None without one."""
    each = scalers(optimizer)
    return each[0].scale if each else None


def step(
    trainee: TrainingModel,
    num_tokens: float,
    note: Callable[[Event], None],
    *,
    norm_square: float | None = None,
    found_inf: bool = False,
    scale: float | None = None,
    skips: bool = False,
) -> float | None:
    """Divide by the loss's divisor, then step optimizer and schedule. Returns the norm of the
    gradient; None: it did not step.

    If a scaled gradient is not finite, Megatron's optimizer skips its step and lowers the scale,
    and the schedule does not advance, but the iteration counts. Members with the same gradients
    decide the same. If each member has a part of the gradients, `norm_square` and `found_inf` are
    of all. `scale` is the loss scale; None: it is read from the device. `skips`: the iteration
    takes no step, and only counts (`train.skip_not_finite`).
    """
    note("scale")
    if skips:
        log.warning("loss not finite, step skipped")
        trainee.is_gathered = True
        note("done")
        return None
    divisor = trainee.divisor(num_tokens)
    if divisor != 1.0:
        count = torch.full((), divisor, dtype=torch.int, device=trainee.device)
        for ddp in trainee.ddps:
            ddp.scale_gradients(1.0 / count)
    if found_inf:  # on another member: Megatron must see it here too
        for gradient in trainee.gradients:
            gradient.fill_(math.inf)
    if norm_square is not None:
        if scale is None:
            read = scale_of(trainee.optimizer)
            scale = 1.0 if read is None else read.item()
        norm = math.sqrt(norm_square) / divisor / scale
        for optimizer in trainee.optimizers:  # Megatron clips by this norm, without a loss scale
            (part,) = optimizer.chained_optimizers
            part.get_grad_norm = lambda: norm
    if trainee.mirror is not None:
        sync_mirror(trainee.mirror, trainee.optimizer)
        trainee.mirror.step()
    stepped, norm, _ = trainee.optimizer.step()
    trainee.is_gathered = not stepped or trainee.axes.dp == 1 or not trainee.is_sharded
    note("schedule")
    if stepped:
        trainee.scheduler.step(trainee.train.batch.global_)
    else:
        log.warning(
            "gradient not finite, step skipped",
            loss_scale=[scaler.scale.item() for scaler in scalers(trainee.optimizer)],
        )
    note("done")
    return float(norm or 0.0) if stepped else None


def gather(trainee: TrainingModel) -> None:
    """Gather the parameters that other replicas stepped. Can be repeated after RuntimeError."""
    for ddp in trainee.ddps:
        if trainee.gathers_in_forward:
            private_megatron.finish_gather(ddp)
        else:
            ddp.start_param_sync(force_dispatch=True)


def is_first_holder(trainee: TrainingModel, param: Any) -> bool:
    """Whether no earlier rank of this replica has the parameter, or this part of it, too."""
    is_split = getattr(param, "tensor_model_parallel", False)
    return not getattr(param, "shared", False) and (not trainee.at.tp or bool(is_split))


def _counted(trainee: TrainingModel, dp: int) -> Iterator[Tensor]:
    """The gradients that this member adds to the norm. Megatron chooses the same for its norm."""
    owned = ranges(trainee.optimizer)
    is_sharded = trainee.is_sharded
    if dp and not is_sharded:
        return
    for _, param in trainee.named_parameters():
        if not is_first_holder(trainee, param):
            continue
        if not is_sharded:
            yield param.main_grad
        elif id(param) in owned:
            yield param.main_grad.view(-1)[owned[id(param)]]
