"""The jobs of 7 B and 70 B: predicted memory, one rank's part, and small runs in their axes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from rank_driver import Driver
from reference import compare
from source_changes import changed
from unicron.cli.files import job_file
from unicron.control_plane.throughput.layout_choices import choices
from unicron.control_plane.throughput.memory import in_gib, rank_parameters
from unicron.control_plane.throughput.training_layouts import described, layout_of, layout_on
from unicron.events.spec.job import Loop, parse
from unicron.events.spec.model import Axes, MegatronModel

EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"
JOBS = ("megatron-7b", "megatron-70b")
STATED = re.compile(
    r"^#   ([\d.]+ GiB) on (\d+) slots \((.+)\), ([\d.]+ GiB) of it the kept sum$", re.MULTILINE
)
PARAMETERS_REL = 1e-3
"""The memory model divides norms among tensor-parallel ranks, counts a bias for each of them, and
leaves out the last one."""
ITERATIONS, MICRO_BATCHES = 5, 8
RELATIVE_MAX = 1e-5
FLAGS = {
    "num_layers": "--num-layers",
    "hidden": "--hidden-size",
    "ffn_hidden": "--ffn-hidden-size",
    "num_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "sequence": "--seq-length",
    "global_batch": "--global-batch-size",
}


def loop_of(name: str) -> tuple[Loop, MegatronModel]:
    loop = job_file.load(EXAMPLES / f"{name}.yaml").loop
    assert loop is not None
    assert loop.model is not None
    return loop, loop.model


@pytest.mark.parametrize("name", JOBS)
def test_the_stated_memory_is_the_predicted_one(name: str) -> None:
    file = EXAMPLES / f"{name}.yaml"
    found = choices(job_file.load(file))
    predicted = {one.slots: one for one in found.choices}
    stated = STATED.findall(file.read_text(encoding="utf-8"))
    assert stated
    for memory, slots, layout, kept in stated:
        one = predicted[int(slots)]
        assert one.memory_bytes is not None
        assert one.kept_bytes
        assert (in_gib(one.memory_bytes), one.layout, in_gib(one.kept_bytes)) == (
            memory,
            layout,
            kept,
        )
    assert f"of the GPU's {in_gib(found.capacity_bytes)}" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", JOBS)
def test_the_arguments_are_those_of_the_described_model(name: str) -> None:
    loop, model = loop_of(name)
    words = job_file.load(EXAMPLES / f"{name}.yaml").command
    given = dict(pairwise(words))
    for key, flag in FLAGS.items():
        assert given.get(flag, "0") == str(getattr(model, key)), flag
    assert given["--train-iters"] == str(loop.iterations)
    assert int(given["--global-batch-size"]) // int(given["--micro-batch-size"]) == (
        loop.micro_batches
    )
    assert ("--swiglu" in words) == model.swiglu
    assert ("--untie-embeddings-and-output-weights" in words) != model.tie_embeddings
    assert ("--use-distributed-optimizer" in words) == (loop.parallel.optimizer == "sharded")


@pytest.fixture
def fake_groups() -> Iterator[Any]:
    """Megatron's groups of any world, which know sizes and ranks and send nothing."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from unicron.workers.training.dependencies import private_megatron

    def of(axes: Axes, rank: int) -> None:
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=axes.tp * axes.pp * axes.dp
        )
        parallel_state.initialize_model_parallel(axes.tp, axes.pp, create_gloo_process_groups=False)

    yield of
    private_megatron.clear_globals()
    dist.destroy_process_group()


def built(model: MegatronModel, axes: Axes, stage: int) -> int:
    """The number of parameters of one rank's part of megatron-core's GPT, on the meta device."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_groups,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=model.swiglu,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        tensor_model_parallel_size=axes.tp,
        pipeline_model_parallel_size=axes.pp,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    with torch.device("meta"):
        gpt = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=model.vocabulary,
            max_sequence_length=model.sequence,
            pre_process=stage == 0,
            post_process=stage == axes.pp - 1,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type="rope",
        )
    parameters = list(gpt.parameters())
    assert {parameter.device.type for parameter in parameters} == {"meta"}
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize(
    ("name", "slots", "stage"),
    [
        ("megatron-7b", 8, 0),
        ("megatron-70b", 64, 0),
        ("megatron-70b", 64, 1),
        ("megatron-70b", 64, 3),
    ],
)
def test_a_rank_has_the_parameters_that_its_memory_is_predicted_from(
    fake_groups: Any, name: str, slots: int, stage: int
) -> None:
    loop, model = loop_of(name)
    axes = layout_of(loop, slots)
    assert axes is not None
    fake_groups(axes, stage * axes.tp * axes.dp)
    num_embeddings = (stage == 0) + (stage == axes.pp - 1)
    predicted, _ = rank_parameters(
        model, layout_on(loop, described(loop) or model, axes), num_embeddings
    )
    assert built(model, axes, stage) == pytest.approx(predicted, rel=PARAMETERS_REL)


# --- small runs of the same axes: eight real ranks, and one rank alone ---
LLAMA = (
    (
        "num_attention_heads=4,",
        "num_attention_heads=4, num_query_groups=2, ffn_hidden_size=96, "
        "gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, "
        "normalization='RMSNorm',",
    ),
    ("local_spec(config.num_moe_experts)", "local_spec(normalization='RMSNorm')"),
    (
        "pg_collection=groups,\n            vp_stage",
        "pg_collection=groups, "
        "share_embeddings_and_output_weights=False, position_embedding_type='rope',\n"
        "            vp_stage",
    ),
)
"""Changes of deploy/examples/loop.py: its GPT has the parts of a Llama."""
SCRIPT = """
import os, runpy, sys
os.environ["UNICRON_FD"], sys.argv = str(fd), {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit()
"""
SMALL = {"megatron-7b": Axes(tp=2, dp=4), "megatron-70b": Axes(tp=2, pp=4)}
"""The axes of each job, in eight ranks."""


def trained(folder: Path, nursery: Nursery, axes: Axes, optimizer: str) -> Path:
    """Train in these axes; return the final checkpoint."""
    text = changed((EXAMPLES / "loop.py").read_text(encoding="utf-8"), LLAMA)
    folder.mkdir()
    (folder / "llama.py").write_text(text, encoding="utf-8")
    argv = [
        str(folder / "llama.py"),
        "--iterations",
        str(ITERATIONS),
        "--micro-batches",
        str(MICRO_BATCHES),
        *["--sharded"] * (optimizer == "sharded"),
    ]
    driver = Driver(
        parse(
            {
                "apiVersion": "unicron/v1",
                "name": "small",
                "slots": {"min": 1, "max": 8},
                "command": argv,
                "heal": "in-memory",
                "loop": {
                    "micro_batches": MICRO_BATCHES,
                    "iterations": ITERATIONS,
                    "copy_every": 0,
                    "output": str(folder / "out"),
                    "parallel": {"tensor": [1, 2], "pipeline": [1, 4], "optimizer": optimizer},
                },
            }
        ),
        folder,
        nursery,
    )
    driver.patch = SCRIPT.format(argv=argv)
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    try:
        driver.start(*ranks)
        driver.form(ranks, axes=axes)
        driver.finish(ranks)
        return driver.final_checkpoint()
    finally:
        driver.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name == "megatron-7b")) for name in JOBS],
)  # the other job has pipelines, too
@pytest.mark.thorough
def test_a_small_run_in_the_same_axes_equals_one_rank(
    tmp_path: Path, nursery: Nursery, name: str
) -> None:
    optimizer = loop_of(name)[0].parallel.optimizer
    alone = trained(tmp_path / "alone", nursery, Axes(), optimizer)
    gap = compare(trained(tmp_path / "small", nursery, SMALL[name], optimizer), alone)
    assert gap.num_losses == ITERATIONS
    assert gap.loss_rel < RELATIVE_MAX
    assert gap.param_rel < RELATIVE_MAX
