"""The state of Megatron's optimizer and of Transformer Engine's layers is all that Unicron moves.

A loop trains under Megatron's own schedule. Its state is copied, by Unicron's list of it, into
another that was built anew. Both must then train alike.
"""

from __future__ import annotations

from importlib import util
from pathlib import Path

import torch
from bench.recovery.rows import Row
from gpu.result import NotPossible, of
from loop_driver import changed_example
from loop_twin import StockLoop, given_by, one_member
from unicron.events.spec.job import Loop
from unicron.workers.training.adopt.custom_loop import NotRecoverable
from unicron.workers.training.model import optimizers, training_state

ITERATIONS, COPIED, MICRO_BATCHES = 6, 3, 4
RELATIVE_MAX = 1e-6
"""A larger difference of a loss: the state is incomplete. On a GPU, sums may differ in order."""
LOCAL = "get_gpt_layer_local_spec"
TE_LAYERS = [(LOCAL, "get_gpt_layer_with_transformer_engine_spec")]
BF16 = [
    (
        "pipeline_dtype=torch.float32",
        "pipeline_dtype=torch.bfloat16, bf16=True, params_dtype=torch.bfloat16",
    ),
    ("clip_grad=1.0,", "clip_grad=1.0, bf16=True,"),
    ("sharing, module,", "sharing, Float16Module(config, module),"),
    ("\nVOCABULARY", "from megatron.core.transformer.module import Float16Module\n\nVOCABULARY"),
]


def check(folder: Path, device: str) -> list[Row]:
    """The optimizer that Megatron chooses: FusedAdam of Transformer Engine or Apex if installed,
    else torch's AdamW."""
    return _check("optimizer_state", folder, [])


def check_te(folder: Path, device: str) -> list[Row]:
    """Layers of Transformer Engine."""
    if util.find_spec("transformer_engine") is None:
        raise NotPossible("Transformer Engine is not installed")
    # Its attention needs 16 bits.
    return _check("te_layers", folder, [*TE_LAYERS, *BF16])


def _check(case: str, folder: Path, changes: list[tuple[str, str]]) -> list[Row]:
    script = changed_example(folder, changes)
    given = given_by(
        [str(script), "--iterations", str(ITERATIONS), "--micro-batches", str(MICRO_BATCHES)]
    )
    loop = Loop(iterations=ITERATIONS, micro_batches=MICRO_BATCHES, output=str(folder))
    with one_member() as (device, communicators):
        try:
            ours, other = (StockLoop(loop, device, communicators, given) for _ in range(2))
        except NotRecoverable as error:
            raise NotPossible(f"Unicron restarts such a loop as a whole: {error}") from None
        kinds = sorted(
            {
                type(part.optimizer).__module__ + "." + type(part.optimizer).__name__
                for part in optimizers.chained(ours.trainee.optimizer)
            }
        )
        _moments_are_listed(ours)
        for iteration in range(COPIED):
            ours.run(iteration, range(MICRO_BATCHES))
        gap_before = _gap(ours.loss(COPIED), other.loss(COPIED))
        assert gap_before > 100 * RELATIVE_MAX, "the loops do not differ before the copy"
        copy(ours, other)
        gaps = [
            _gap(
                ours.run(iteration, range(MICRO_BATCHES)),
                other.run(iteration, range(MICRO_BATCHES)),
            )
            for iteration in range(COPIED, ITERATIONS)
        ]
    assert max(gaps) <= RELATIVE_MAX, f"after the copy of the state, losses differ by {gaps}"
    return [of(case, "loss_gap", gaps, "relative", ", ".join(kinds))]


def _moments_are_listed(loop: StockLoop) -> None:
    """Each parameter has both moments of its own shape."""
    found = training_state.tensors(loop.trainee)
    for name, param in loop.trainee.named_parameters():
        for moment in training_state.MOMENTS:
            assert found[f"optimizer.{moment}.{name}"].shape == param.shape, name


def copy(ours: StockLoop, other: StockLoop) -> None:
    """Copy the whole state, as a new member receives it."""
    theirs = training_state.tensors(other.trainee)
    for name, tensor in training_state.tensors(ours.trainee).items():
        theirs[name].copy_(tensor)
    training_state.load(
        other.trainee,
        training_state.numbers(ours.trainee, ours.history.end, ours.history),
        other.history,
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _gap(one: float, other: float) -> float:
    return abs(one - other) / abs(other)
