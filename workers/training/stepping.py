"""The step: from the reduced sum of gradients to the next state, the same on every member.

Megatron's own chain of in-place phases, none of which may be done twice. So nothing here waits for
anybody, and nothing here is interrupted: it is begun when the whole sum is known to be good, and
it ends.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import torch

from .model import Trainee, scalers
from .trace import Event

log = structlog.get_logger()


def step(trainee: Trainee, num_tokens: float, note: Callable[[Event], None]) -> bool:
    """Divide as the loss asks for, step the optimizer, then its schedule; whether it stepped.

    Where a scaled gradient is not finite, Megatron's optimizer skips its step and lowers the scale,
    and the schedule stands still; the iteration counts. All members see the same sum, so all
    decide alike.
    """
    note("scale")
    divisor = trainee.divisor(num_tokens)
    if divisor != 1.0:
        count = torch.tensor(divisor, dtype=torch.int, device=trainee.device)
        for ddp in trainee.ddps:
            ddp.scale_gradients(1.0 / count)
    stepped: bool = trainee.optimizer.step()[0]
    note("schedule")
    if stepped:
        trainee.scheduler.step(trainee.train.batch.global_)
    else:
        log.warning("gradient not finite, step skipped",
                    loss_scale=[scaler.scale.item() for scaler in scalers(trainee.optimizer)])
    note("done")
    return stepped
