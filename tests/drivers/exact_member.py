"""One member with exact sums in a world of one process, given its gradients by the test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from msgspec.structs import replace
from reference import Unwatched
from unicron.events.spec.job import Batch, DynamicLossScale, Model, Optimizer, Train
from unicron.workers.training.communicators.operations import Operations
from unicron.workers.training.model import megatron_step
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model.megatron_exact import MegatronExactGradients
from unicron.workers.training.model.step_barrier import ExactBarrier, norm_square_of

MICRO_BATCHES = 5
LOSS_SCALE = 2.0**8
TRAIN = Train(
    model=Model(num_layers=1, hidden=8, num_heads=1, sequence=8),
    batch=Batch(global_=2 * MICRO_BATCHES, micro=2),
    optimizer=Optimizer(lr=1e-2, decay="constant", clip_grad=0.0),
    iterations=10,
    output="unused",
    reproducible="bitwise",
)
"""3,000 parameters, so that plain Python is fast enough."""
Gradients = Mapping[str, torch.Tensor]
"""One micro-batch's gradient of each parameter."""


class ExactMember:
    """A real model, optimizer and reduction; `train` is TRAIN with `changes`."""

    def __init__(self, groups: Any, **changes: Any) -> None:
        train = replace(TRAIN, **changes)
        if train.precision == "fp16":
            dynamic = DynamicLossScale(initial=LOSS_SCALE, hysteresis=1)
            train = replace(train, dynamic_loss_scale=dynamic)
        self.trainee = model.build(train, torch.device("cpu"), groups)
        self.parameters = dict(self.trainee.named_parameters())
        self.exact = self.trainee.exact
        assert self.exact is not None
        self.exponents = self.exact.exponents
        self._operations = Operations(groups)
        self._reduction = MegatronExactGradients(self.trainee, self.exact)

    def begin(self, redone: int = 0) -> None:
        assert self.exact is not None
        self.trainee.clear()
        self.exact.begin(megatron_step.scale_of(self.trainee.optimizer), redone)

    def add_up(self, micro_batches: Iterable[Gradients], redone: int = 0) -> ExactBarrier:
        """The sum of these, reduced; what the member adds to the step barrier."""
        self.begin(redone)
        for gradients in micro_batches:
            backward(self.parameters, gradients)
        return self.reduce()

    def reduce(self) -> ExactBarrier:
        self._reduction.reduce(self._operations, Unwatched())
        return self._reduction.barrier()

    def reduced(self) -> dict[str, list[float]]:
        """The elements of the reduced gradients, by parameter."""
        return {name: param.main_grad.view(-1).tolist() for name, param in self.parameters.items()}

    def step(self, barrier: ExactBarrier, num_tokens: int) -> None:
        norm = megatron_step.step(
            self.trainee,
            num_tokens,
            lambda event: None,
            norm_square=norm_square_of(barrier.limbs),
        )
        assert norm is not None
        self._reduction.stepped()


def backward(parameters: Mapping[str, Any], gradients: Gradients) -> None:
    """A backward pass that gives each parameter exactly this gradient."""
    torch.autograd.backward(
        [param.view_as(param) for param in parameters.values()],
        [gradients[name] for name in parameters],
    )


def drawn(
    member: ExactMember, seed: int, lowest: float, highest: float
) -> list[dict[str, torch.Tensor]]:
    """Gradients for each micro-batch, in the parameters' precision: magnitudes from 2^`lowest` to
    2^`highest`, any sign, every seventh element 0."""
    random = torch.Generator().manual_seed(seed)

    def one(param: torch.Tensor) -> torch.Tensor:
        power = torch.rand(param.shape, generator=random) * (highest - lowest) + lowest
        sign = torch.randint(0, 2, param.shape, generator=random) * 2 - 1
        values = power.exp2() * sign
        values.view(-1)[torch.randint(7, (), generator=random) :: 7] = 0.0
        return values.to(param.dtype)

    return [
        {name: one(param) for name, param in member.parameters.items()}
        for _ in range(MICRO_BATCHES)
    ]
