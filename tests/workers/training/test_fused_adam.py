"""FusedAdam and layers of Transformer Engine or Apex, by classes with their interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_stores import LocalKeeper, named, whole_steps
from fused_classes import ApexAdam, EngineLinear, FusedAdam, engine_spec
from loop_driver import changed_example, drive_loop, finish_as
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from nursery import Nursery
from rank_driver import Driver
from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.spec.model import Axes
from unicron.workers.training.model import optimizers
from unicron.workers.training.recovery import state_shards

ITERATIONS, MICRO_BATCHES, STRUCK, EVERY = 6, 6, 3, 2
RELATIVE_MAX = 1e-5
BEGIN = "VOCABULARY, SEQUENCE, ROWS"
SPEC = "config, get_gpt_layer_local_spec(config.num_moe_experts),"
Loops = Callable[..., Driver]


def loop(folder: Path, nursery: Nursery, package: str, **options: Any) -> Driver:
    """A driver whose ranks run the example with the classes of `package`; "": with torch's."""
    drivers = Path(__file__).parents[2] / "drivers"
    changes = (
        []
        if not package
        else [
            (
                BEGIN,
                f"import sys\nsys.path.append({str(drivers)!r})\nimport fused_classes\n"
                f"fused_classes.install({package!r})\n{BEGIN}",
            ),
            (SPEC, "config, fused_classes.engine_spec(),"),
        ]
    )
    words = ["--sharded"] * (options.get("optimizer") == "sharded")
    return drive_loop(
        folder,
        nursery,
        words,
        iterations=ITERATIONS,
        micro_batches=MICRO_BATCHES,
        script=changed_example(folder, changes),
        **options,
    )


@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery, closed: Loops) -> Loops:
    """Factory of drivers: `loops("apex", tensor=[2])`."""

    def make(package: str, **options: Any) -> Driver:
        return closed(loop(tmp_path, nursery, package, **options))

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Path]:
    """The final checkpoint of one rank that trains with torch's AdamW, without a fault."""
    driver = loop(tmp_path_factory.mktemp("undisturbed"), nursery, "")
    try:
        driver.start(0)
        driver.form([0])
        driver.finish([0])
        yield driver.final_checkpoint()
    finally:
        driver.close()


def finish(driver: Driver, ranks: list[int], undisturbed: Path) -> None:
    finish_as(driver, ranks, undisturbed, ITERATIONS, RELATIVE_MAX)


@pytest.mark.parametrize("package", ["transformer_engine", "apex"])
def test_a_newcomer_receives_its_state(loops: Loops, undisturbed: Path, package: str) -> None:
    """Rank 0, which alone has trained from the beginning, is lost after the newcomer has joined."""
    driver = loops(package)
    driver.start(0, 1)
    hold = driver.hold(0, "backward", STRUCK)
    driver.form([0, 1])
    driver.held(0, STRUCK)
    driver.kill(1)
    driver.quiesce([0], "now", hold)
    hold = driver.hold(0, "backward", STRUCK + 1)
    driver.form([0])
    driver.start(1, attempt=2)
    driver.held(0, STRUCK + 1)
    driver.quiesce([0], "boundary", hold)
    found = driver.form([0, 1])[1]
    assert (found.origin, found.source) == ("peer", 0)
    driver.kill(0)
    driver.quiesce([1], "now")
    driver.form([1])
    finish(driver, [1], undisturbed)


@pytest.mark.thorough
def test_a_lost_shard_comes_from_memory(loops: Loops, undisturbed: Path) -> None:
    driver = loops("transformer_engine", tensor=[1, 2], optimizer="sharded", copy_every=EVERY)
    driver.keepers = [LocalKeeper("n1")]
    driver.start(0, 1, 2, 3)
    driver.hold(1, "backward", STRUCK)
    driver.form([0, 1, 2, 3], axes=Axes(tp=2, dp=2))
    driver.held(1, STRUCK)
    driver.until(lambda: EVERY in whole_steps(driver.keepers), "all ranks have stored their shares")
    copies = (named(driver.keepers, driver.wait(MemoryCheckpointStored, 0)),)
    driver.kill(1)
    driver.quiesce([0, 2, 3], "now")
    first = driver.form([0, 2, 3], copies=copies, axes=Axes(tp=1, dp=3))[0]
    assert (first.origin, first.step_version) == ("copy", EVERY)
    finish(driver, [0, 2, 3], undisturbed)


# --- which optimizers are known -------------------------------------------------------------------
def part(kind: type, **options: Any) -> Any:
    return kind([torch.nn.Parameter(torch.ones(2))], lr=1e-3, **options)


def unknown(optimizer: Any) -> list[str]:
    return optimizers.not_adam(SimpleNamespace(optimizer=optimizer))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.AdamW, {}, ""),
        (torch.optim.Adam, {}, ""),
        (FusedAdam, {}, ""),
        (ApexAdam, {}, ""),
        (FusedAdam, {"capturable": True}, ""),
        (torch.optim.Adam, {"amsgrad": True}, "with amsgrad"),
        (torch.optim.SGD, {}, "torch.optim.sgd.SGD"),
        (FusedAdam, {"master_weights": True}, "FusedAdam with masters of its own"),
        (FusedAdam, {"exp_avg_dtype": torch.bfloat16}, "FusedAdam with moments in less than fp32"),
    ],
)
def test_an_optimizer_of_unknown_state_is_named(
    kind: type, options: dict[str, Any], words: str
) -> None:
    found = unknown(part(kind, **options))
    assert found == [] if not words else words in found[0]


def test_masters_of_apex_are_unknown() -> None:
    made = part(ApexAdam)
    made.use_master = True
    assert unknown(made) == ["apex.optimizers.fused_adam.FusedAdam with masters of its own"]


@pytest.mark.parametrize("capturable", [False, True])
def test_the_steps_of_a_group_are_set(capturable: bool) -> None:
    made = part(FusedAdam, capturable=capturable)
    assert optimizers.num_steps(made) == {0.0}
    optimizers.set_num_steps(made, 3.0)
    made.step()
    assert optimizers.num_steps(made) == {4.0}
    assert isinstance(made.param_groups[0]["step"], torch.Tensor if capturable else int)


class Scaled(EngineLinear):
    """A layer with a state that is no tensor of the model, as with FP8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3, dtype=torch.uint8)


@pytest.mark.parametrize("kind", [EngineLinear, Scaled])
def test_only_an_empty_extra_state_is_left_out(alone: Any, kind: type) -> None:
    spec = engine_spec()
    spec.submodules.self_attention.submodules.linear_proj = kind
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
    )
    model = GPTModel(config, spec, vocab_size=16, max_sequence_length=4, pg_collection=alone)
    assert "decoder.layers.0.self_attention.linear_proj._extra_state" in model.state_dict()
    if kind is EngineLinear:
        listed = list(state_shards._sharded(model, state_shards.UNSTACKED))
        assert len(listed) == len(list(model.parameters()))
    else:
        with pytest.raises(ValueError, match="state that is not a tensor is not supported"):
            list(state_shards._sharded(model, state_shards.UNSTACKED))
