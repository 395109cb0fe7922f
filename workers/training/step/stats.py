"""What all members tell each other with the reduction: losses, tokens, orders, checkpoints."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.engine import Engine
from ..model.losses import Losses


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


def own_values(engine: Engine, mine: Stats, losses: Losses, *, stops: bool) -> Tensor:
    """What this member adds, on the device: `mine`, then the loss of each micro-batch."""
    values = on_device(mine._replace(num_stopping=float(stops)), engine.device)
    losses.write_num_tokens(values[1])
    return torch.cat((values, losses.by_micro_batch(engine.train.num_micro_batches, engine.device)))


def read(values: Sequence[float]) -> Stats:
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
