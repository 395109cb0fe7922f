"""How far exact sums are from the true ones: what docs/guides/reproducible.md claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exact_member import ExactMember, Gradients
from msgspec.structs import replace
from unicron.events.spec.job import Batch, Model, Optimizer
from unicron.workers.training.model import text_data
from unicron.workers.training.model import trainee as model

pytestmark = pytest.mark.filterwarnings("ignore:::megatron", "ignore:The .grad attribute")

BF16_ERROR_RATIO = 2.0**-9
SEQUENCE = 32
GPT = Model(num_layers=1, hidden=32, num_heads=4, sequence=SEQUENCE, tie_embeddings=False)
"""The gradients of the two uses of a tied embedding would be added in fp32 by torch."""


def made(alone: Any, bits: int, num: int) -> ExactMember:
    """A member that has taken one step, so that its exponents are of gradients like the next."""
    member = ExactMember(
        alone,
        reproducible_bits=bits,
        model=GPT,
        batch=Batch(global_=num, micro=1),
        optimizer=Optimizer(lr=1e-3, decay="constant", clip_grad=0.0),
    )
    member.begin()
    for tokens in micro_batches(num, 0):
        member.trainee.loss(tokens).backward()
    member.step(member.reduce(), num_tokens=num * SEQUENCE)
    return member


def micro_batches(num: int, iteration: int) -> list[torch.Tensor]:
    words = text_data.load((), SEQUENCE)
    return [words.sample(1234, iteration, item, rows=1, sequence=SEQUENCE) for item in range(num)]


def gradients(member: ExactMember, alone: Any, tokens: Sequence[torch.Tensor]) -> list[Gradients]:
    """Each micro-batch's, from the same parameters under Megatron's own accumulation."""
    plain = model.build(
        replace(member.trainee.train, reproducible="rounding"), torch.device("cpu"), alone
    )
    found = []
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(member.parameters[name])
    for one in tokens:
        plain.clear()
        plain.loss(one).backward()
        found.append({name: param.main_grad.clone() for name, param in plain.named_parameters()})
    return found


def errors(member: ExactMember, each: Sequence[Gradients]) -> tuple[float, float, float]:
    """The relative errors of the member's sum, of one in fp32 in the order of the micro-batches,
    and of the true sum (in fp64) rounded once to fp32."""
    squares, whole = [0.0] * 3, 0.0
    for name, param in member.parameters.items():
        true = torch.stack([one[name].double() for one in each]).sum(0)
        in_fp32 = torch.zeros_like(param.main_grad)
        for one in each:
            in_fp32 += one[name]
        whole += true.square().sum().item()
        for index, of in enumerate((param.main_grad, in_fp32, true.float())):
            squares[index] += (of.double() - true).square().sum().item()
    mine, fp32, once = (math.sqrt(square / whole) for square in squares)
    return mine, fp32, once


def measured(alone: Any, bits: int, num: int) -> tuple[float, float, float]:
    member, tokens = made(alone, bits, num), micro_batches(num, 1)
    each = gradients(member, alone, tokens)
    member.begin()
    for one in tokens:
        member.trainee.loss(one).backward()
    assert member.reduce()[:2] == (0, 0)
    found = errors(member, each)
    print(f"{bits} bits, {num} micro-batches: {found}, of fp32 {found[0] / found[1]}")
    return found


@pytest.mark.parametrize(("num", "least", "most"), [(12, 1.6, 3.0), (48, 3.0, 5.0)])
def test_64_bits_are_the_true_sum_rounded_once(
    alone: Any, num: int, least: float, most: float
) -> None:
    mine, fp32, once = measured(alone, 64, num)
    assert mine <= once * 1.001
    assert least < fp32 / mine < most


@pytest.mark.parametrize("num", [12, 48])
def test_32_bits_are_far_below_the_rounding_of_bf16(alone: Any, num: int) -> None:
    mine, fp32, _ = measured(alone, 32, num)
    assert 100 < mine / fp32 < 600
    assert mine < BF16_ERROR_RATIO / 30


@pytest.mark.parametrize("bits", [64, 32])
def test_many_micro_batches_lose_nothing(alone: Any, bits: Any) -> None:
    """Each has a small part of the sum, which must not round to 0. Magnitudes within a parameter
    differ by 2^10, as in a model; each micro-batch adds noise of the same size."""
    num = 256
    member = ExactMember(alone, reproducible_bits=bits, batch=Batch(global_=2 * num, micro=2))
    random = torch.Generator().manual_seed(num)
    sizes = {
        name: (torch.rand(param.shape, generator=random) * -10).exp2()
        for name, param in member.parameters.items()
    }
    for iteration in range(2):
        each = [
            {
                name: size * (1 + torch.randn(size.shape, generator=random))
                for name, size in sizes.items()
            }
            for _ in range(num)
        ]
        barrier = member.add_up(each)
        assert barrier[:2] == (0, 0)
        if not iteration:
            member.step(barrier, num_tokens=64)
    mine, fp32, once = errors(member, each)
    print(mine, fp32, once)
    assert mine < (once * 1.001 if bits == 64 else BF16_ERROR_RATIO / 20)
    zeros = sum(values.count(0.0) for values in member.reduced().values())
    assert zeros == 0
