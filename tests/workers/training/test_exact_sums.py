"""Exact sums, their reduction and their norm are those of plain Python, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
import torch
from exact_member import LOSS_SCALE, MICRO_BATCHES, TRAIN, ExactMember, Gradients, backward, drawn
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plain_arithmetic import exponent_after, integer_sum, nearest_fp32, norm, unit_of
from unicron.events.spec.job import Model
from unicron.workers.training.model import megatron_step
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model.step_barrier import limbs_of, norm_square_of

pytestmark = pytest.mark.filterwarnings("ignore:::megatron", "ignore:The .grad attribute")

PRECISIONS, BITS = ("fp32", "bf16", "fp16"), (64, 32)
FIRST_EXPONENT = 9
"""As docs/guides/reproducible.md has it: 2^9 before the first step."""


def exponent_of_scale(precision: str) -> int:
    return math.frexp(LOSS_SCALE)[1] if precision == "fp16" else 0


def sums(
    micro_batches: Sequence[Gradients], units: dict[str, Fraction]
) -> dict[str, list[Fraction]]:
    """By parameter: the exact sum of each element."""
    return {
        name: [
            integer_sum(values, unit)
            for values in zip(*(one[name].view(-1).tolist() for one in micro_batches), strict=True)
        ]
        for name, unit in units.items()
    }


def rounded(exact: dict[str, list[Fraction]]) -> dict[str, list[float]]:
    return {name: [nearest_fp32(value) for value in values] for name, values in exact.items()}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_sum_is_that_of_fractions(alone: Any, precision: str, bits: int) -> None:
    """Two iterations: with the first exponents, and with those that the first step leaves."""
    member = ExactMember(alone, precision=precision, reproducible_bits=bits)
    scaled = exponent_of_scale(precision)
    limits = dict.fromkeys(member.parameters, FIRST_EXPONENT + scaled)
    for seed, lowest, highest in ((1, -20, 5), (2, -24, 7)):
        micro_batches = drawn(member, seed, lowest, highest)
        barrier = member.add_up(micro_batches)
        assert barrier[:2] == (0, 0)
        units = {name: unit_of(limit, bits, MICRO_BATCHES) for name, limit in limits.items()}
        wanted = rounded(sums(micro_batches, units))
        assert member.reduced() == wanted
        member.step(barrier, num_tokens=64)
        limits = {
            name: exponent_after(
                bits,
                max(map(abs, values)),
                max(one[name].abs().max().item() for one in micro_batches),
            )
            for name, values in wanted.items()
        }
        assert member.exponents.tolist() == [limit - scaled for limit in limits.values()]


@pytest.mark.parametrize("optimizer", ["whole", "sharded"])
@pytest.mark.parametrize("exponent", [-110, -60, 100])
def test_any_scale_is_summed_exactly(alone: Any, exponent: int, optimizer: Any) -> None:
    member = ExactMember(alone, parallel=replace(TRAIN.parallel, optimizer=optimizer))
    member.exponents.fill_(exponent)
    micro_batches = drawn(member, 3, exponent - 60, exponent)
    barrier = member.add_up(micro_batches)
    assert barrier[:2] == (0, 0)
    units = dict.fromkeys(member.parameters, unit_of(exponent, 64, MICRO_BATCHES))
    wanted = rounded(sums(micro_batches, units))
    assert member.reduced() == wanted
    assert norm_square_of(barrier.limbs) == pytest.approx(
        norm(chain(*wanted.values())) ** 2, rel=1e-14
    )


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_sum_that_is_allowed_fits(alone: Any, bits: int) -> None:
    member = ExactMember(alone, reproducible_bits=bits)
    most = {name: torch.full_like(param, 2.0**9) for name, param in member.parameters.items()}
    least = {name: -gradient for name, gradient in most.items()}
    for one, sign in ((most, 1), (least, -1)):
        assert member.add_up([one] * MICRO_BATCHES)[:2] == (0, 0)
        for values in member.reduced().values():
            assert set(values) == {sign * MICRO_BATCHES * 2.0**9}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_value_above_the_bound_is_counted_by_parameter(
    alone: Any, precision: str, bits: int
) -> None:
    """Again with room for 2^10 times more, it is summed as fractions are."""
    member = ExactMember(alone, precision=precision, reproducible_bits=bits)
    limit = FIRST_EXPONENT + exponent_of_scale(precision)
    if precision == "fp16":  # 2^18 is above its largest number
        member.exponents.fill_(1)
        limit = 1 + exponent_of_scale(precision)
    micro_batches = drawn(member, 4, limit - 20, limit - 1)
    above = torch.tensor(2.0**limit, dtype=next(iter(micro_batches[0].values())).dtype)
    above = torch.nextafter(above, torch.full_like(above, math.inf))
    for index, name in enumerate(member.parameters):
        value = above if index in (2, 5, 11) else 2.0**limit  # itself is allowed
        micro_batches[index % MICRO_BATCHES][name].view(-1)[-1] = value * (-1) ** index
    assert member.add_up(micro_batches)[:2] == (3, 0)
    barrier = member.add_up(micro_batches, redone=1)
    assert barrier[:2] == (0, 0)
    units = dict.fromkeys(member.parameters, unit_of(limit + 10, bits, MICRO_BATCHES))
    assert member.reduced() == rounded(sums(micro_batches, units))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_by_parameter(alone: Any, value: float) -> None:
    member = ExactMember(alone)
    micro_batches = drawn(member, 5, -20, 5)
    for index, name in enumerate(member.parameters):
        if index in (0, 3):
            micro_batches[2][name].view(-1)[1] = value
    assert member.add_up(micro_batches).num_not_finite == 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_two_uses_of_a_tied_embedding_are_rounded_apart(
    alone: Any, precision: Any, bits: Any
) -> None:
    """In real passes. The gradient of each use comes from autograd, in a model that has two
    matrices with the same values."""
    member = ExactMember(alone, precision=precision, reproducible_bits=bits)
    apart = replace(
        member.trainee.train,
        model=Model(num_layers=1, hidden=8, num_heads=1, sequence=8, tie_embeddings=False),
        reproducible="rounding",
    )
    other = model.build(apart, torch.device("cpu"), alone)
    twins = dict(other.named_parameters())
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    assert twins.keys() == {*member.parameters, output}
    with torch.no_grad():
        for name, param in twins.items():
            param.copy_(member.parameters[embedding if name == output else name])
    random = torch.Generator().manual_seed(6)
    tokens = [torch.randint(1, 256, (2, 9), generator=random) for _ in range(MICRO_BATCHES)]
    member.begin()
    gradients = []
    for one in tokens:
        member.trainee.optimizer.scale_loss(member.trainee.loss(one)).backward()
        other.clear()
        other.optimizer.scale_loss(other.loss(one)).backward()
        gradients.append({name: param.main_grad.clone() for name, param in twins.items()})
    assert member.reduce()[:2] == (0, 0)
    limit = FIRST_EXPONENT + exponent_of_scale(precision)
    exact = sums(gradients, dict.fromkeys(twins, unit_of(limit, bits, MICRO_BATCHES)))
    uses = zip(exact[embedding], exact.pop(output), strict=True)
    exact[embedding] = [one + another for one, another in uses]
    assert any(exact[embedding])
    assert member.reduced() == rounded(exact)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_norm_is_that_of_fractions(alone: Any, precision: str) -> None:
    """That of exact sums, and that of `rounding`; a tied parameter counts once."""
    member = ExactMember(alone, precision=precision)
    barrier = member.add_up(drawn(member, 7, -24, 4))
    exact = norm(chain(*member.reduced().values()))
    assert math.sqrt(norm_square_of(barrier.limbs)) == pytest.approx(exact, rel=1e-15)
    found = megatron_step.norm_square(member.trainee).item()
    assert math.sqrt(found) == pytest.approx(exact, rel=1e-7), "fp32 norms of each parameter"
    assert not megatron_step.has_inf(member.trainee)


def test_members_parts_of_the_norm_add_up(alone: Any) -> None:
    """The integers of three members, as the barrier adds them: the norm of all elements."""
    member = ExactMember(alone)
    totals, elements = [0] * len(member.add_up([]).limbs), []
    for seed, highest in ((8, 3), (9, -40), (10, 8)):
        barrier = member.add_up(drawn(member, seed, highest - 20, highest))
        totals = [one + other for one, other in zip(totals, barrier.limbs, strict=True)]
        elements += list(chain(*member.reduced().values()))
    assert math.sqrt(norm_square_of(totals)) == pytest.approx(norm(elements), rel=1e-15)


@given(st.lists(st.integers(0, 2**680), min_size=1, max_size=9))
def test_limbs_hold_a_large_integer(numbers: list[int]) -> None:
    total = [sum(limbs) for limbs in zip(*map(limbs_of, numbers), strict=True)]
    assert norm_square_of(total) == float(Fraction(sum(numbers), 2**400))


def test_gradients_are_what_the_test_gives(alone: Any) -> None:
    """The harness itself: without exact sums Megatron's buffer has exactly these numbers."""
    plain = model.build(replace(TRAIN, reproducible="rounding"), torch.device("cpu"), alone)
    gradients = drawn(ExactMember(alone), 11, -20, 5)[0]
    plain.clear()
    backward(dict(plain.named_parameters()), gradients)
    for name, param in plain.named_parameters():
        assert param.main_grad.equal(gradients[name])
