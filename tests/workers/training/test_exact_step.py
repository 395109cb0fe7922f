"""The step with exact sums is that of plain Python: gradients, norm, clipping, moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
from exact_member import LOSS_SCALE, MICRO_BATCHES, TRAIN, ExactMember, drawn
from msgspec.structs import replace
from plain_arithmetic import (
    FP32_ERROR_RATIO,
    AdamW,
    exponent_after,
    integer_sum,
    nearest_fp32,
    norm,
    unit_of,
)
from unicron.events.spec.job import Optimizer
from unicron.workers.training.model import training_state
from unicron.workers.training.model.step_barrier import norm_square_of

pytestmark = pytest.mark.filterwarnings("ignore:::megatron", "ignore:The .grad attribute")

RATE, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8
ADAM = Optimizer(
    lr=RATE, decay="constant", weight_decay=DECAY, beta1=BETAS[0], beta2=BETAS[1], clip_grad=0.0
)
STEPS_NUM, TOKENS_NUM = 3, 96
SGD_RATE = 0.125
SGD = replace(ADAM, lr=SGD_RATE * 1e9, eps=1e9, beta1=0.0, beta2=0.0, weight_decay=0.0)
"""Adam's step is lr * m / (sqrt(v) + eps). With an eps far above every gradient, and no memory, it
is that of SGD with the rate lr / eps: it has the gradient's scale, which Adam's own has not."""
ROUNDINGS = 12
"""In `ROUNDINGS` times the error of one rounding to fp32, a step may differ from that in fp64: it
rounds the gradient twice (its divisor, the product), each moment three times (two products, a
sum), and the parameter's change seven times, in each of which the errors are at most those."""


def gradients(member: ExactMember, precision: str) -> Iterator[tuple[Any, dict[str, list[float]]]]:
    """By step: the micro-batches, and the sums that plain Python finds for them, unscaled."""
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    scaled = 9 if precision == "fp16" else 0
    limits = dict.fromkeys(member.parameters, 9 + scaled)
    for seed in range(STEPS_NUM):
        lowest = math.log2(scale) - 9
        micro_batches = drawn(member, seed, lowest, lowest + 13)
        sums = {
            name: [
                nearest_fp32(integer_sum(values, unit_of(limit, 64, MICRO_BATCHES)))
                for values in zip(
                    *(one[name].view(-1).tolist() for one in micro_batches), strict=True
                )
            ]
            for name, limit in limits.items()
        }
        limits = {name: exponent_after(64, max(map(abs, of)), 0.0) for name, of in sums.items()}
        yield (
            micro_batches,
            {name: [value / scale / TOKENS_NUM for value in of] for name, of in sums.items()},
        )


def elements(member: ExactMember, kind: str) -> dict[str, list[float]]:
    """The elements of each parameter, or of its state of this kind."""
    state = training_state.tensors(member.trainee)
    return {name: state[f"{kind}{name}"].view(-1).tolist() for name in member.parameters}


def is_near(found: Sequence[float], wanted: Sequence[float], sizes: Sequence[float]) -> bool:
    """Whether each is what plain Python finds, but for the rounding of numbers of these sizes."""
    return all(
        abs(one - other) <= ROUNDINGS * FP32_ERROR_RATIO * size
        for one, other, size in zip(found, wanted, sizes, strict=True)
    )


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
@pytest.mark.parametrize("optimizer", ["whole", "sharded"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_moments_and_masters_are_those_of_adam(
    alone: Any, precision: str, optimizer: Any, clip_grad: float
) -> None:
    member = ExactMember(
        alone,
        precision=precision,
        optimizer=replace(ADAM, clip_grad=clip_grad),
        parallel=replace(TRAIN.parallel, optimizer=optimizer),
    )
    kind = "model." if precision == "fp32" else "master."
    plain = {
        name: [AdamW(value, BETAS, EPS) for value in values]
        for name, values in elements(member, kind).items()
    }
    largest = {name: [0.0] * len(values) for name, values in plain.items()}
    for micro_batches, found in gradients(member, precision):
        barrier = member.add_up(micro_batches)
        total = norm(chain(*found.values()))
        scale = LOSS_SCALE if precision == "fp16" else 1.0
        assert norm_square_of(barrier.limbs) ** 0.5 / scale / TOKENS_NUM == pytest.approx(
            total, rel=1e-12
        )
        member.step(barrier, TOKENS_NUM)
        # Megatron's clipping: by the norm plus 1e-6, if it is above the limit.
        factor = min(clip_grad / (total + 1e-6), 1.0) if clip_grad else 1.0
        assert (factor < 0.9) == bool(clip_grad)
        for name, values in found.items():
            decay = DECAY if member.parameters[name].dim() > 1 else 0.0
            for index, (one, value) in enumerate(zip(plain[name], values, strict=True)):
                one.step(value * factor, RATE, decay)
                largest[name][index] = max(largest[name][index], abs(value * factor))
    state = {of: elements(member, of) for of in ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")}
    for name, found in elements(member, kind).items():
        sizes = largest[name]
        first, second = (of[name] for of in state.values())
        assert is_near(first, [one.first for one in plain[name]], sizes), name
        assert is_near(second, [one.second for one in plain[name]], [size**2 for size in sizes])
        moved = [abs(one.value) + STEPS_NUM * RATE for one in plain[name]]
        assert is_near(found, [one.value for one in plain[name]], moved), name


def test_a_step_of_sgd_has_the_gradients_scale(alone: Any) -> None:
    """Parameters after three steps of SGD, which show a factor that Adam's steps hide."""
    member = ExactMember(alone, optimizer=SGD)
    wanted = elements(member, "model.")
    sizes = {name: list(map(abs, values)) for name, values in wanted.items()}
    for micro_batches, found in gradients(member, "fp32"):
        member.step(member.add_up(micro_batches), TOKENS_NUM)
        for name, values in found.items():
            for index, value in enumerate(values):
                wanted[name][index] -= SGD_RATE * value
                sizes[name][index] += SGD_RATE * abs(value)
    for name, values in elements(member, "model.").items():
        assert is_near(values, wanted[name], sizes[name]), name
