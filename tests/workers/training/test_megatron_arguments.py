"""The table of Megatron-LM's arguments: its words, against a clone's (UNICRON_MEGATRON_LM)."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unicron.workers.training.megatron_lm import arguments

ROOT = Path(__file__).parents[3]
TABLES = (arguments.HONOURED, arguments.NAMED, arguments.DECLINES, arguments.NEEDS)
RUN_UNCHANGED = frozenset((
    "get_model", "build_model", "setup_model_and_optimizer", "get_optimizer_param_scheduler",
    "get_megatron_optimizer_config", "num_floating_point_operations", "calculate_layer_counts",
    "transformer_flops", "hybrid_flops", "update_train_iters", "get_train_valid_test_num_samples",
    "preprocess_common_state_dict", "get_start_time_from_progress_log",
    "compute_throughputs_and_append_to_progress_log"))
"""Functions of training.py that pretrain.py calls, or that only a save calls."""
OF_THE_MODEL = frozenset((
    "bf16", "fp16", "pipeline_model_parallel_size", "swiglu", "tensor_model_parallel_size",
    "vocab_file"))
"""Read by checkpointing.py beside the arguments that say how to load and save."""
PARSER = """
import argparse, json
from unicron.workers.training.rank import preload
preload()
from megatron.training.arguments import add_megatron_arguments
print(json.dumps([x.dest for x in add_megatron_arguments(argparse.ArgumentParser())._actions]))
"""


def clone() -> Path:
    folder = os.environ.get("UNICRON_MEGATRON_LM", "")
    if not folder:
        pytest.skip("UNICRON_MEGATRON_LM names no clone of Megatron-LM")
    return Path(folder)


def read_by_loops(file: Path) -> set[str]:
    """The names in `args.NAME` and `getattr(args, "NAME")`, in functions that Unicron replaces."""
    found: set[str] = set()
    for function in ast.parse(file.read_text()).body:
        if not isinstance(function, ast.FunctionDef) or function.name in RUN_UNCHANGED:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args":
                found.add(node.attr)
            elif (isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
                  and ast.unparse(node.args[0]) == "args"
                  and isinstance(node.args[1], ast.Constant)):
                found.add(str(node.args[1].value))
    return found


def test_each_argument_of_the_loops_is_in_one_table() -> None:
    folder = clone()
    done = subprocess.run([sys.executable, "-P", "-c", PARSER], capture_output=True, text=True,
                          check=True, env={**os.environ, "PYTHONPATH": str(folder)})
    parsed = set(json.loads(done.stdout.splitlines()[-1]))
    files = [folder / "megatron" / "training" / f"{name}.py" for name in (
        "training", "checkpointing")]
    read = set().union(*map(read_by_loops, files)) & parsed - OF_THE_MODEL
    assert {"train_iters", "exit_interval", "log_interval", "save"} <= read
    missing = sorted(name for name in read if not any(name in table for table in TABLES))
    assert missing == []


def test_an_argument_is_in_one_table_and_what_it_needs_has_a_word() -> None:
    names = [name for table in TABLES for name in table]
    assert sorted(names) == sorted(set(names))
    assert {*arguments.NEEDS.values()} <= {*arguments.NAMED, *arguments.DECLINES}


def parsed_of(*words: str) -> list[arguments.Given]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--save")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--fp8-format", dest="fp8")
    parser.add_argument("--dataloader-type")
    parser.add_argument("--no-persist-layer-norm", action="store_false", dest="persist_layer_norm")
    return arguments.given(parser.parse_args(list(words)), parser, words)


def test_only_given_arguments_have_a_word() -> None:
    assert parsed_of() == []
    assert arguments.why_not(parsed_of("--save", "x", "--dataloader-type", "single")) == ""
    assert arguments.why_not(parsed_of("--fp8-format=e4m3", "--dataloader-type", "cyclic")) == (
        "FP8 scales are not part of the known state (--fp8-format); its data has no random access "
        "(--dataloader-type)")
    (line,) = arguments.named(parsed_of("--save", "x", "--num-workers=4",
                                        "--no-persist-layer-norm"))
    assert line == "--num-workers: no workers: the step reads its samples itself"
