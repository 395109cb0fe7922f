"""The step: from the reduced sum of gradients to the next state, the same on every member.

Megatron's own chain of in-place phases, none of which may be done twice. So nothing here waits for
anybody, and nothing here is interrupted: it is begun when the whole sum is known to be good, and
it ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .model import Trainee
from .trace import Event


def step(trainee: Trainee, num_tokens: float, note: Callable[[Event], None]) -> None:
    """Divide by the tokens of the whole batch, step the optimizer, then its schedule."""
    note("scale")
    count = torch.tensor(num_tokens, dtype=torch.int, device=trainee.device)
    trainee.ddp.scale_gradients(1.0 / count)
    trainee.optimizer.step()
    note("schedule")
    trainee.scheduler.step(trainee.train.batch.global_)
    note("done")
