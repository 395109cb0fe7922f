"""The table of Megatron-LM's arguments, against those of clones (UNICRON_MEGATRON_LM)."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_arguments import HONOURED, NEEDS
from megatron_trial import clones_or_skip
from unicron.workers.training.megatron_lm import arguments, checkpoints

ROOT = Path(__file__).parents[3]
TABLES = (HONOURED, arguments.NAMED, arguments.DECLINES, NEEDS)
RUN_UNCHANGED = frozenset(
    (
        "get_model",
        "build_model",
        "setup_model_and_optimizer",
        "get_optimizer_param_scheduler",
        "get_megatron_optimizer_config",
        "get_megatron_ddp_config",
        "num_floating_point_operations",
        "calculate_layer_counts",
        "transformer_flops",
        "hybrid_flops",
        "update_train_iters",
        "get_train_valid_test_num_samples",
        "preprocess_common_state_dict",
        "get_start_time_from_progress_log",
        "compute_throughputs_and_append_to_progress_log",
        "_warmup_jit_function",
    )
)
"""Functions that pretrain.py calls, or that only a save calls, or that read only shapes."""
REPLACED = (
    "training",
    "checkpointing",
    "initialize",
    "async_utils",
    "ft_integration",
    "inprocess_restart",
    "one_logger_utils",
    "datasets/data_samplers",
)
"""Modules of megatron.training of which Unicron replaces functions, or calls none."""
OF_THE_MODEL = frozenset(
    (
        "bf16",
        "first_last_layers_bf16",
        "fp16",
        "hidden_size",
        "masked_softmax_fusion",
        "num_attention_heads",
        "num_layers_at_end_in_bf16",
        "num_layers_at_start_in_bf16",
        "pipeline_model_parallel_size",
        "swiglu",
        "tensor_model_parallel_size",
        "vocab_file",
    )
)
"""Read there beside the arguments that say what to do."""
BY_FIELD = ("fault_injector_", "one_logger_")
"""Arguments that the loops read by the fields of a config, or not by name."""
PARSER = """
import argparse, json
from unicron.workers.training.megatron_lm import versions
from unicron.workers.training.rank import preload
preload()
versions.complete_typing()
from megatron.training.arguments import add_megatron_arguments
print(json.dumps([x.dest for x in add_megatron_arguments(argparse.ArgumentParser())._actions]))
"""


def read_by_loops(file: Path) -> set[str]:
    """The names in `args.NAME`, `getattr(args, "NAME")` and `cfg_container.SECTION.NAME`, in
    functions that Unicron replaces."""
    found: set[str] = set()
    for function in ast.parse(file.read_text()).body:
        if not isinstance(function, ast.FunctionDef) or function.name in RUN_UNCHANGED:
            continue
        for node in ast.walk(function):
            match node:
                case (
                    ast.Attribute(value=ast.Name(id="args"))
                    | ast.Attribute(value=ast.Attribute(value=ast.Name(id="cfg" | "cfg_container")))
                ):
                    found.add(node.attr)
                case ast.Call(
                    func=ast.Name(id="getattr"),
                    args=[ast.Name(id="args"), ast.Constant(value=str(name)), *_],
                ):
                    found.add(name)
                case _:
                    pass
    return found


@pytest.mark.parametrize("folder", clones_or_skip(), ids=lambda folder: folder.name)
def test_each_argument_of_the_loops_is_in_one_table(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PARSER],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                (str(folder), *filter(None, (os.environ.get("PYTHONPATH"),)))
            ),
        },
    )
    parsed = set(json.loads(done.stdout.splitlines()[-1]))
    files = [folder / "megatron" / "training" / f"{name}.py" for name in REPLACED]
    read = set().union(*map(read_by_loops, files)) & parsed - OF_THE_MODEL
    assert {"train_iters", "exit_interval", "log_interval", "save", "use_sharp"} <= read
    read |= {name for name in parsed if name.startswith(BY_FIELD)}
    missing = sorted(name for name in read if not any(name in table for table in TABLES))
    assert missing == []


def test_an_argument_is_in_one_table_and_what_it_needs_has_a_word() -> None:
    names = [name for table in TABLES for name in table]
    assert sorted(names) == sorted(set(names))
    assert {*NEEDS.values()} <= {*arguments.NAMED, *arguments.DECLINES}


def parsed_of(*words: str) -> list[arguments.Given]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--save")
    parser.add_argument("--log-memory-interval", type=int)
    parser.add_argument("--fp8-format", dest="fp8")
    parser.add_argument("--dataloader-type")
    parser.add_argument("--no-persist-layer-norm", action="store_false", dest="persist_layer_norm")
    return arguments.given(parser.parse_args(list(words)), parser, words)


def test_only_given_arguments_have_a_word() -> None:
    assert parsed_of() == []
    assert arguments.why_not(parsed_of("--save", "x", "--dataloader-type", "single")) == ""
    assert arguments.why_not(parsed_of("--fp8-format=e4m3", "--dataloader-type", "cyclic")) == (
        "FP8 scales are not part of the known state (--fp8-format); its data has no random access "
        "(--dataloader-type)"
    )
    (line,) = arguments.named(
        parsed_of("--save", "x", "--log-memory-interval=4", "--no-persist-layer-norm")
    )
    assert line == "--log-memory-interval: not printed"


def test_evaluations_are_counted_from_the_first_that_is_made() -> None:
    def num_after(iteration: int, **given: int) -> int:
        args = argparse.Namespace(eval_interval=5, **given)
        return checkpoints.num_evaluations(args, iteration)

    assert [num_after(at) for at in (0, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]
    assert [num_after(at, start_eval_at_iter=10) for at in (5, 9, 10, 14, 15)] == [0, 0, 1, 1, 2]
    assert [num_after(at, start_eval_at_iter=7) for at in (5, 9, 10, 15)] == [0, 0, 1, 2]
    assert checkpoints.num_evaluations(argparse.Namespace(eval_interval=0), 9) == 0
    assert checkpoints.eval_batch(argparse.Namespace(global_batch_size=12)) == 12
    assert (
        checkpoints.eval_batch(argparse.Namespace(global_batch_size=12, eval_global_batch_size=6))
        == 6
    )
