"""Losses and gradients that are NaN or infinite: what is refused, and what is only told."""

import math

import structlog

from ....events.errors import UsageError
from ..model.engine import Engine
from .own_part import E, OwnPart
from .stats import Stats

log = structlog.get_logger()


def raise_if_rejected(part: OwnPart[E], error: str) -> None:
    """Raise UsageError if this error is a check of the engine's, and no failed collective: the next
    process would fail in it too."""
    rejected = part.engine.rejection(error)
    if rejected is None:
        return
    items = [item for item, _ in part.losses.not_finite()] or sorted(part.state.done)
    if part.notes.micro_batch >= 0 or not items:  # in a pass
        items = [part.engine.micro_batch]
    where = f"micro-batch{'es' if len(items) > 1 else ''} {', '.join(map(str, items))}"
    raise UsageError(
        f"rank {part.notes.trace.rank}: {rejected}, in {where} of iteration "
        f"{part.state.step_version}",
        "correct the data or lower the learning rate; without Megatron's check "
        "for NaN the step is taken with it",
    )


def spoils_state(part: OwnPart[E], told: Stats) -> bool:
    """Whether the loss says that this step, the first of a series, makes a finite state NaN or
    infinite. A loss scaler skips such a step, and so does `skip_not_finite`. The same on all
    members."""
    at, history = part.state.step_version, part.history
    return (
        not math.isfinite(told.loss_sum)
        and at > 0
        and not history.spoilt_by
        and history.is_finite(at - 1)
        and part.engine.loss_scale is None
        and not part.engine.train.skip_not_finite
    )


def warn_of_losses(part: OwnPart[E], told: Stats) -> None:
    """Name the micro-batches of this member whose loss is not finite."""
    if math.isfinite(told.loss_sum):
        return
    for item, loss in part.losses.not_finite():
        log.warning(
            f"the loss is {loss}",
            rank=part.notes.trace.rank,
            iteration=part.state.step_version,
            micro_batch=item,
        )


def refuse_exactly(engine: Engine, iteration: int) -> None:
    """A gradient of some member is not finite. Raise UsageError if the sum is exact; with a loss
    scale, the step is only skipped."""
    if engine.exact is not None and engine.loss_scale is None:
        raise UsageError(
            f"a gradient of iteration {iteration} is NaN or infinite, which an "
            "exact sum cannot hold",
            "correct the data or lower the learning rate; with "
            "train.reproducible: rounding the step is taken with it",
        )
