"""A loop of somebody's own, as a member trains it: their model, optimizer and data, our iteration.

What they write is called here and nowhere else: so what it may not do has one place to be said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from msgspec.structs import replace
from torch import Tensor

from ...events.loop import Loop
from ...events.model_spec import Axes
from ...events.spec import Batch, Train
from . import model
from .draw import Draw
from .model import Trainee
from .published import publish
from .support import unsupported

Build = Callable[[Any, Axes, int], tuple[Sequence[Any], Any, Any]]
"""(groups, axes, place) -> chunks of the model in Megatron's DDP, its optimizer, its schedule."""
Sample = Callable[[int, int], Any]
"""(iteration, micro-batch) -> what `forward` takes; the same whichever rank asks."""
Forward = Callable[[Any, Any], tuple[Any, Any]]
"""(chunk, batch) -> the sum of its tokens' loss and their number; or, as Megatron's forward_step,
the output and a function of it that returns these two first."""

OnRebuild = Callable[[Any], Any]
"""(groups) -> what a script has made of them, until they go down."""


class Unfit(Exception):
    """What was built cannot be healed in memory; `str()` says why, in one line."""


@dataclass
class OwnTrainee(Trainee):
    """What their `build` has made, with their `forward`."""

    call: Forward = field(kw_only=True)
    _loss_func: Callable[[Any], Any] = field(init=False, repr=False, default=lambda out: out)
    _tokens_num: int = field(init=False, repr=False, default=0)

    def loss(self, tokens: Any) -> Tensor:
        return self.loss_of(self.forward(self.ddps[0], tokens), tokens)

    def forward(self, ddp: Any, tokens: Any) -> Any:
        out, rest = self.call(ddp, tokens)
        self._loss_func = rest if callable(rest) else lambda out: (out, rest)
        return out

    def loss_of(self, per_token: Any, tokens: Any) -> Tensor:
        found, num, *_ = self._loss_func(per_token)
        self._tokens_num = int(num)
        loss: Tensor = found
        if self.train.loss == "per_token":
            return loss
        return loss / max(self._tokens_num, 1) / self.train.num_micro_batches

    def num_tokens(self, tokens: Any) -> int:
        """Of the micro-batch whose loss was asked for last."""
        return self._tokens_num


class OwnWork:
    """Their loop. `samples_num` are those of one micro-batch: what their schedule counts."""

    def __init__(self, loop: Loop, build: Build, sample: Sample, forward: Forward, *,
                 samples_num: int = 1, loss: Any = "per_token", seed: int = 1234,
                 flops: float = 0.0, on_rebuild: OnRebuild | None = None) -> None:
        self.train = Train(
            iterations=loop.iterations, output=loop.output, copy_every=loop.copy_every,
            checkpoint_every=loop.checkpoint_every, parallel=loop.parallel, seed=seed, loss=loss,
            batch=Batch(global_=loop.micro_batches * samples_num, micro=samples_num))
        self.flops = flops
        self.digest = ""
        self.made: Any = None
        """What `on_rebuild` has returned for the generation that is up."""
        self._on_rebuild = on_rebuild
        self._build, self._sample, self._forward = build, sample, forward

    def on_groups(self, groups: Any) -> None:
        self.made = None
        if groups is not None:
            publish(groups)
            self.made = self._on_rebuild(groups) if self._on_rebuild is not None else None

    def load(self) -> OwnWork:
        return self

    def sample(self, seed: int, iteration: int, micro_batch: int, *, rows: int, sequence: int
               ) -> Any:
        return self._sample(iteration, micro_batch)

    def build(self, device: torch.device, groups: Any, axes: Axes, place: int) -> Trainee:
        """Raises Unfit."""
        draw = Draw(self.train.seed)
        draw.at(0, 0)  # what is drawn while building is the same on every rank
        told = copy.copy(groups)
        # As in model.py: the first and the last stage tell each other nothing, and a step asks
        # nobody; what it would ask of a whole replica is told before.
        told.embd, told.mp = None, told.intra_dist_opt
        publish(told)
        with model.asking_nobody():
            chunks, optimizer, scheduler = self._build(told, axes, place)
        publish(groups)
        ddps = list(chunks)
        check(ddps, optimizer, scheduler, self.train)
        model.materialise(optimizer)
        modules = [_inner(ddp) for ddp in ddps]
        if not self.flops:
            num_params = sum(param.numel() for module in modules for param in module.parameters())
            self.flops = 6.0 * num_params * self.train.num_micro_batches
        train = replace(self.train, precision=_precision(ddps[0].config),
                        overlap=ddps[0].ddp_config.overlap_grad_reduce)
        return OwnTrainee(train, device, draw, axes, place, modules, ddps, optimizer, scheduler,
                          torch.empty(0), call=self._forward)

    def build_whole(self, device: torch.device, groups: Any) -> Trainee:
        return self.build(device, groups, Axes(), 0)


def check(ddps: Sequence[Any], optimizer: Any, scheduler: Any, train: Train) -> None:
    """Raises Unfit for what cannot be kept, redone or handed over exactly."""
    for ddp in ddps:
        if not isinstance(ddp, DistributedDataParallel):
            raise Unfit(f"{type(ddp).__name__} is not megatron.core.distributed."
                        "DistributedDataParallel, whose buffers hold the local sum of gradients")
    if train.parallel.pipeline != (1,):
        raise Unfit("a pipeline passes the house's own batches alone as yet")
    optimizers = model.chained(optimizer)
    rows = unsupported(ddps[0].config, ddps[0].ddp_config, optimizers[0].config,
                       parallel=train.parallel, modules=[_inner(ddp) for ddp in ddps])
    if rows:
        raise Unfit("; ".join(f"{row.what}: {row.loop.why}" for row in rows))
    for one in optimizers:
        if one.optimizer is not None and not isinstance(one.optimizer, torch.optim.AdamW):
            kind = type(one.optimizer)
            raise Unfit(f"the state of {kind.__module__}.{kind.__name__} is not known; "
                        "that of torch.optim.AdamW is")
    is_sharded = bool(model.shards(optimizer))
    if is_sharded != (train.parallel.optimizer != "whole"):
        raise Unfit("the optimizer is " + ("sharded: write loop.parallel.optimizer: sharded"
                    if is_sharded else "whole, and loop.parallel.optimizer says that it is not"))
    if not isinstance(scheduler, OptimizerParamScheduler):
        raise Unfit(f"its schedule is a {type(scheduler).__name__}, not Megatron's "
                    "OptimizerParamScheduler, whose position is known")


def _inner(ddp: Any) -> Any:
    module = ddp.module
    return module.module if isinstance(module, Float16Module) else module


def _precision(config: Any) -> Any:
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"
