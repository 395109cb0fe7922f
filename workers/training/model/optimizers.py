"""Access to the parts of Megatron's optimizer, and its preparation for recovery."""

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ..dependencies import private_megatron

FUSED = ("transformer_engine", "apex")
"""The packages that have FusedAdam; Megatron takes it from the first that is installed."""

# --- The mirrored shard: a member also steps the shard of the previous data-parallel rank ---
#
# The mirror is a second instance of Megatron's distributed optimizer over the same buffers, built
# for the previous rank, the owner. It takes the same step with the same code on the same reduced
# gradients, which the owner sends, so its state is bit-identical to the owner's. Who builds the
# optimizer, a script too, builds it once: the mirror is made from what that was built from.


class PreviousRank(NamedTuple):
    """The part of a process group's interface that Megatron uses to build a shard."""

    own: int
    num_ranks: int

    def rank(self) -> int:
        return (self.own - 1) % self.num_ranks

    def size(self) -> int:
        return self.num_ranks


class BuiltFrom(NamedTuple):
    """What a DistributedOptimizer was built from: the parameter groups of its torch optimizer, of
    whole parameters then, and its other arguments."""

    groups: list[dict[str, Any]]
    args: tuple[Any, ...]
    options: Mapping[str, Any]


@contextmanager
def noted_builds() -> Generator[dict[int, BuiltFrom]]:
    """Within this context, notes from what each DistributedOptimizer is built, by its id."""
    noted: dict[int, BuiltFrom] = {}
    original: Any = DistributedOptimizer.__init__

    @wraps(original)
    def build(self: Any, optimizer: Any, *args: Any, **options: Any) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        whole = [{**group, "params": list(group["params"])} for group in groups]
        original(self, optimizer, *args, **options)
        noted[id(self)] = BuiltFrom(whole, args, options)

    DistributedOptimizer.__init__ = build  # type: ignore[method-assign, unused-ignore]
    try:
        yield noted
    finally:
        DistributedOptimizer.__init__ = original  # type: ignore[method-assign, unused-ignore]


def mirror_of(optimizer: Any, ddps: Sequence[Any], noted: Mapping[int, BuiltFrom]) -> Any:
    """The optimizer of the previous data-parallel rank's shard, prepared as `prepare` does it.
    `noted`: what each part of `optimizer` was built from."""
    buffers = [buffer for ddp in ddps for buffer in private_megatron.buffers_of(ddp)]
    with private_megatron.data_parallel_groups(
        buffers, lambda group: PreviousRank(group.rank(), group.size())
    ):
        mirror = ChainedOptimizer(
            [_mirror_of_part(part, noted[id(part)]) for part in chained(optimizer)]
        )
    prepare(ddps, mirror)
    return mirror


def _mirror_of_part(part: Any, built: BuiltFrom) -> Any:
    inner = part.optimizer
    if inner is not None:
        inner = object.__new__(type(inner))  # its constructor takes other options than `defaults`
        vars(inner).update(vars(part.optimizer))
        inner.param_groups, inner.state = built.groups, defaultdict(dict)
    mirror = type(part)(inner, *built.args, **built.options)
    mirror.grad_scaler = deepcopy(part.grad_scaler)
    for name, value in vars(part).items():  # what Megatron sets after building: groups
        vars(mirror).setdefault(name, value)
    return mirror


def sync_mirror(mirror: Any, optimizer: Any) -> None:
    """Copy the loss scale, learning rate and weight decay to the mirror before its step."""
    for ours, theirs in zip(mirror.chained_optimizers, optimizer.chained_optimizers, strict=True):
        if theirs.grad_scaler is not None and (scale := theirs.grad_scaler.state_dict()):
            ours.grad_scaler.load_state_dict(
                {
                    name: value.clone() if hasattr(value, "clone") else value
                    for name, value in scale.items()
                }
            )
    for ours, theirs in zip(mirror.param_groups, optimizer.param_groups, strict=True):
        ours["lr"], ours["weight_decay"] = theirs["lr"], theirs["weight_decay"]


@contextmanager
def without_collectives() -> Generator[None]:
    """Within this context, Megatron builds an optimizer without its collective: it gathers the
    parameter groups of all ranks, in case a stage lacks a group. None does: each has a layer, with
    weights that decay and biases that do not. The members do not build at the same time, so a
    collective would stall."""

    def local(gathered: list[Any], mine: Any, group: Any = None) -> None:
        gathered[:] = [mine] * len(gathered)

    original, dist.all_gather_object = dist.all_gather_object, local  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = original


@contextmanager
def lowest_rate_of_schedule() -> Generator[None]:
    """Within this context, parameter groups without `min_lr` get that of the schedule. Megatron
    itself would compute with None."""

    def get_lr(self: Any, param_group: Any) -> Any:
        if param_group.get("min_lr") is None:
            param_group["min_lr"] = self.min_lr
        return original(self, param_group)

    original = OptimizerParamScheduler.get_lr
    OptimizerParamScheduler.get_lr = get_lr
    try:
        yield
    finally:
        OptimizerParamScheduler.get_lr = original


def prepare(ddps: Sequence[Any], optimizer: Any) -> None:
    """Configure a new optimizer for megatron_step.py and allocate all of its state."""
    if is_sharded(optimizer):
        for ddp in ddps:
            if not ddp.ddp_config.overlap_param_gather:
                # Gather the parameters after the step, not during the step.
                private_megatron.gather_after_step(ddp)
    if not not_adam(optimizer):
        _materialise(optimizer)


def _materialise(optimizer: Any) -> None:
    """Allocate Adam's moments and steps: Megatron's init_state_fn leaves out AdamW's `step`."""
    for part in parts(optimizer):
        step = {} if is_fused(part) else {"step": torch.zeros((), dtype=torch.float32)}
        for group in part.param_groups:
            for param in group["params"]:
                if not part.state[param]:
                    part.state[param].update(
                        {name: value.clone() for name, value in step.items()},
                        exp_avg=torch.zeros_like(param),
                        exp_avg_sq=torch.zeros_like(param),
                    )


# --- Adam of torch, of Transformer Engine and of Apex ---
#
# All three keep the moments `exp_avg` and `exp_avg_sq` of each parameter. torch counts the steps of
# each parameter in its state; FusedAdam of Transformer Engine and of Apex counts those of each
# parameter group in the group, from its first step on.


def is_fused(part: Any) -> bool:
    """Whether this is FusedAdam of Transformer Engine or Apex, or derived from it."""
    return any(
        kind.__name__ == "FusedAdam" and kind.__module__.split(".")[0] in FUSED
        for kind in type(part).__mro__
    )


def num_steps(part: Any) -> set[float]:
    """The step counts of one of `parts`."""
    if is_fused(part):
        return {float(group.get("step", 0)) for group in part.param_groups if group["params"]}
    return {
        float(part.state[param]["step"]) for group in part.param_groups for param in group["params"]
    }


def set_num_steps(part: Any, num: float) -> None:
    for group in part.param_groups:
        if not is_fused(part):
            for param in group["params"]:
                part.state[param]["step"].fill_(num)
        elif group["params"]:
            device = group["params"][0].device
            group["step"] = (
                torch.tensor([num], dtype=torch.int, device=device) if part.capturable else int(num)
            )


def not_adam(optimizer: Any) -> list[str]:
    """In words, the torch optimizers whose state is not that of Adam: two fp32 moments."""
    inner = [part.optimizer for part in chained(optimizer) if part.optimizer is not None]
    return [words for part in inner if (words := _unknown(part))]


def _unknown(part: Any) -> str:
    kind = f"{type(part).__module__}.{type(part).__name__}"
    if is_fused(part):
        keeps_masters = getattr(part, "master_weights", False) or getattr(part, "use_master", False)
        moments = (
            getattr(part, "exp_avg_dtype", torch.float32),
            getattr(part, "exp_avg_sq_dtype", torch.float32),
        )
        if keeps_masters:
            return f"{kind} with masters of its own"
        return "" if moments == (torch.float32,) * 2 else f"{kind} with moments in less than fp32"
    if not isinstance(part, torch.optim.Adam):  # AdamW is a subclass
        return kind
    return f"{kind} with amsgrad" if part.defaults["amsgrad"] else ""


def chained(optimizer: Any) -> list[Any]:
    """The single optimizers of a chained Megatron optimizer."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def scalers(optimizer: Any) -> list[Any]:
    """The loss scalers of Megatron's optimizer; empty without loss scaling."""
    each = [getattr(part, "grad_scaler", None) for part in chained(optimizer)]
    return [scaler for scaler in each if scaler is not None]


def parts(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's."""
    inner = [part.optimizer for part in chained(optimizer) if part.optimizer is not None]
    assert all(isinstance(part, torch.optim.Adam) or is_fused(part) for part in inner)
    return inner


def shards(optimizer: Any) -> dict[int, Any]:
    """id of a parameter -> this member's shard of it, in flat fp32: only parameters of which this
    member has a shard, so none if the optimizer is whole."""
    return {
        id(param): shard
        for part in _distributed(optimizer)
        for param, shard in private_megatron.shards_of(part)
    }


def is_sharded(optimizer: Any) -> bool:
    return bool(_distributed(optimizer))


def _distributed(optimizer: Any) -> list[Any]:
    return [part for part in chained(optimizer) if isinstance(part, DistributedOptimizer)]


def ranges(optimizer: Any) -> dict[int, slice]:
    """id of a parameter -> the range of its elements that is this member's shard (`shards`)."""
    return {
        id(param): own
        for part in _distributed(optimizer)
        for param, own in private_megatron.ranges_of(part)
    }
