"""The step: from the reduced sum of gradients to the next state, the same on every member.

Megatron's own chain of in-place phases, none of which may be done twice. So nothing here waits for
anybody, and nothing here is interrupted: it is begun when the whole sum is known to be good, and
it ends. What one member cannot know of the sum, where it has only a part, all tell each other
before: `norm_square`, added up, and `has_inf`, of any. Where the optimizer is sharded, `gather`
comes after: that waits for others, and may be done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import structlog
import torch
from torch import Tensor

from ..model.optimizers import follow, ranges, scalers
from ..model.trainee import Trainee
from ..process.trace import Event

log = structlog.get_logger()


def norm_square(trainee: Trainee) -> float:
    """This member's part of the squared norm of the reduced sum as it lies in the buffers.

    Over all members every element of the model counts once.
    """
    return math.fsum(torch.linalg.vector_norm(own, dtype=torch.float64).item() ** 2
                     for own in _counted(trainee))


def has_inf(trainee: Trainee) -> bool:
    """Whether anything in this member's buffers is not finite."""
    return not all(bool(gradient.isfinite().all()) for gradient in trainee.gradients)


def step(trainee: Trainee, num_tokens: float, note: Callable[[Event], None], *,
         norm_square: float | None = None, found_inf: bool = False) -> bool:
    """Divide as the loss asks for, step the optimizer, then its schedule; whether it stepped.

    Where a scaled gradient is not finite, Megatron's optimizer skips its step and lowers the scale,
    and the schedule stands still; the iteration counts. All members see the same sum, so all
    decide alike; where they see parts of it, `norm_square` and `found_inf` are those of all.
    """
    note("scale")
    divisor = trainee.divisor(num_tokens)
    if divisor != 1.0:
        count = torch.tensor(divisor, dtype=torch.int, device=trainee.device)
        for ddp in trainee.ddps:
            ddp.scale_gradients(1.0 / count)
    if found_inf:  # elsewhere: Megatron is to see it here too
        for gradient in trainee.gradients:
            gradient.fill_(math.inf)
    if norm_square is not None:
        _hand_over(trainee, math.sqrt(norm_square) / divisor)
    if trainee.mirror is not None:
        follow(trainee.mirror, trainee.optimizer)
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


def gather(trainee: Trainee) -> None:
    """Where the optimizer is sharded: the parameters that the other replicas have stepped.

    Waits for them. Raises RuntimeError; each has stepped its own by then, and it can be repeated.
    """
    for ddp in trainee.ddps:
        ddp.start_param_sync(force_dispatch=True)


def _hand_over(trainee: Trainee, scaled_norm: float) -> None:
    """Have Megatron clip by this norm, of gradients that still have the loss scale in them."""
    norm = scaled_norm / trainee.optimizer.get_loss_scale().item()
    for optimizer in trainee.optimizers:
        (part,) = optimizer.chained_optimizers
        part.get_grad_norm = lambda: norm


def _counted(trainee: Trainee) -> Iterator[Tensor]:
    """The gradients that are this member's to count, as Megatron chooses them for its norm."""
    owned = ranges(trainee.optimizer)
    shards = trainee.is_sharded
    if trainee.at.dp and not shards:
        return
    for _, param in trainee.named_parameters():
        if getattr(param, "shared", False):  # with the first stage, which counts it
            continue
        if trainee.at.tp and not getattr(param, "tensor_model_parallel", False):
            continue
        if not shards:
            yield param.main_grad
        elif id(param) in owned:
            yield param.main_grad.view(-1)[owned[id(param)]]
