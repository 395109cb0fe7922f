"""The example loop with experts heals with an equal result, router state included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import stock_loop
from launcher import fork
from loop_driver import changed_example, drive_loop
from msgspec.structs import replace
from nursery import Nursery
from rank_driver import Driver
from struck import PP2DP2, TP2DP2, Case, strike
from unicron.events.errors import UsageError
from unicron.events.spec.model import Axes
from unicron.workers.training.inference import stored_model

ITERATIONS, MICRO_BATCHES = 7, 8
WORDS = ["--experts", "--iterations", str(ITERATIONS), "--micro-batches", str(MICRO_BATCHES)]
State = dict[str, Any]
Stock = Callable[[str, Axes], tuple[State, float]]
CONFIG = "bias_dropout_fusion=False,"
AUX = '"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2,'
BIASED = """"moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,"""
FLOAT_16 = "from megatron.core.transformer.module import Float16Module"
SHARING, OPTIMIZER = "grad_reduce_in_fp32=True", "clip_grad=1.0"
Change = list[tuple[str, str]]
CHANGES: dict[str, Change] = {
    "as it is": [],
    "by sequence": [
        (
            AUX,
            '"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], '
            '"moe_aux_loss_coeff": [1e-2, 1e-2],',
        ),
        ('"alltoall"', '"allgather"'),
    ],
    "sinkhorn": [(AUX, '"moe_router_load_balancing_type": "sinkhorn",'), (BIASED, "")],
    "with a capacity": [(BIASED, '"moe_expert_capacity_factor": 1.0,')],
    "only biases": [
        (AUX, '"moe_router_load_balancing_type": "none",'),
        ('"moe_z_loss_coeff": 1e-3,', ""),
    ],
    "bf16": [
        (
            "pipeline_dtype=torch.float32",
            "pipeline_dtype=torch.bfloat16, bf16=True, params_dtype=torch.bfloat16",
        ),
        (OPTIMIZER, f"{OPTIMIZER}, bf16=True"),
        ("sharing, module,", "sharing, Float16Module(config, module),"),
        ("\nVOCABULARY", f"{FLOAT_16}\n\nVOCABULARY"),
    ],
}
"""By the stock run to compare with: the replacements in both."""
OWN: dict[str, Change] = {
    "overlapped reduction": [(SHARING, f"{SHARING}, overlap_grad_reduce=True, bucket_size=3000")],
    "recomputed": [
        (
            CONFIG,
            f'{CONFIG} recompute_granularity="full", recompute_method="uniform", '
            "recompute_num_layers=1,",
        )
    ],
    "experts recomputed": [
        (CONFIG, f'{CONFIG} recompute_granularity="selective", recompute_modules=["moe"],')
    ],
    "loss per micro-batch": [("adopt(build=build", 'adopt(loss="per_micro_batch", build=build')],
}
"""Replacements with the result of stock without them: micro-batches have equal numbers of tokens.
"""


def order(number: int) -> list[tuple[str, str]]:
    """A change of the example: it sums the micro-batches in another order."""
    items = reference.orders(MICRO_BATCHES)[number]
    return [("asked.micro_batches + micro_batch)", f"asked.micro_batches + {items}[micro_batch])")]


def loop(folder: Path, nursery: Nursery, *changes: tuple[str, str], **options: Any) -> Driver:
    """A driver whose ranks run the example with these changes."""
    script = changed_example(folder, changes)
    words = ["--experts", "--losses", str(folder / "losses")]
    return drive_loop(
        folder,
        nursery,
        words,
        iterations=ITERATIONS,
        micro_batches=MICRO_BATCHES,
        script=script,
        **options,
    )


@pytest.fixture(scope="module")
def stock(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """`stock("as it is", Axes(tp=2))`: the state after a loop of Megatron's own in this layout, and
    how much it may change: other orders of the sum of micro-batches change it by a third at most.
    """
    known: dict[tuple[str, Axes], tuple[State, float]] = {}

    def run(change: str, axes: Axes, number: int) -> State:
        folder = tmp_path_factory.mktemp("stock")
        script = changed_example(folder, [*CHANGES[change], *order(number)])
        return stock_loop.run(nursery, script, WORDS, axes)

    def find(change: str, axes: Axes) -> tuple[State, float]:
        if (change, axes) not in known:
            first, *others = [run(change, axes, number) for number in range(reference.NUM_ORDERS)]
            gaps = [worst(reference.difference(other, first)) for other in others]
            print("noise", axes, gaps)
            known[change, axes] = first, reference.tolerance(gaps)
        return known[change, axes]

    return find


def worst(gap: reference.Difference) -> float:
    return max(gap.loss_rel, gap.param_rel, gap.optimizer_rel)


def equal(mine: State, calm: State, tolerance: float) -> None:
    """Losses, parameters, moments, biases of experts and auxiliary losses are stock's."""
    gap = reference.difference(mine, calm)
    print(gap, tolerance)
    assert gap.num_losses == ITERATIONS
    assert worst(gap) < tolerance
    biases = [name for name in calm if name.endswith("expert_bias")]
    for name in biases:
        assert calm[name].any()
        assert mine[name].equal(calm[name])
    losses = "numbers.auxiliary_losses"
    assert mine[losses] == pytest.approx(calm[losses], rel=max(tolerance, 1e-6))


DP4 = Case(Axes(dp=4), 2, "backward", (0, 1, 3), Axes(dp=3))
STAGES = Case(PP2DP2, 3, "backward", (0, 2), Axes(pp=2))
CASES = {
    "dp4": ("as it is", "", DP4),
    "dp4, reducing": ("as it is", "", DP4._replace(event="reduced")),
    "dp4, stepping": ("as it is", "", DP4._replace(event="step")),
    "tp2dp2": ("as it is", "", Case(TP2DP2, 3, "backward", (0, 1), Axes(tp=2))),
    "pp2dp2": ("as it is", "", STAGES),
    "pp2dp2 to dp3": ("as it is", "", STAGES._replace(members=(0, 1, 2), after=Axes(dp=3))),
    "tp2dp2 to dp3": ("only biases", "", Case(TP2DP2, 3, "backward", (0, 1, 2), Axes(dp=3))),
    **{
        change: (change, "", DP4)
        for change in ("by sequence", "sinkhorn", "with a capacity", "bf16")
    },
    "overlapped reduction": ("as it is", "overlapped reduction", DP4._replace(event="reduced")),
    "recomputed": ("as it is", "recomputed", STAGES),
    "experts recomputed": ("as it is", "experts recomputed", STAGES),
    "loss per micro-batch": ("as it is", "loss per micro-batch", DP4),
}


USUAL = ("pp2dp2", "tp2dp2 to dp3")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.thorough) for name in CASES],
)
def test_training_continues_after_a_lost_rank(
    tmp_path: Path, nursery: Nursery, stock: Stock, name: str
) -> None:
    change, own, case = CASES[name]
    largest = max(
        replace(case.before, dp=1), replace(case.after, dp=1), key=lambda axes: axes.tp * axes.pp
    )
    calm, tolerance = stock(change, largest)
    driver = loop(
        tmp_path,
        nursery,
        *CHANGES[change],
        *OWN.get(own, ()),
        tensor=sorted({case.before.tp, case.after.tp}),
        pipeline=sorted({case.before.pp, case.after.pp}),
    )
    try:
        strike(driver, case)
        driver.finish(list(case.members))
        equal(reference.read(driver.final_checkpoint()), calm, tolerance)
        with pytest.raises(UsageError, match=r"has no config\.json: .* a job's own script"):
            stored_model.find(str(driver.final_checkpoint()))
    finally:
        driver.close()


def test_the_example_trains_by_a_launcher(tmp_path: Path, nursery: Nursery, stock: Stock) -> None:
    calm, tolerance = stock("as it is", Axes())
    script, file = changed_example(tmp_path, []), tmp_path / "losses"
    found = fork(nursery, script, [*WORDS, "--losses", str(file)], 2)
    assert [code for code, _ in found] == [0, 0], found
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    losses, auxiliary = calm["numbers.losses"], calm["numbers.auxiliary_losses"]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=tolerance)
    assert {name: lines[-1][name] for name in auxiliary} == pytest.approx(auxiliary, rel=1e-6)
