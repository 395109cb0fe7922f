"""A custom loop of the examples, run by real ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nursery import Nursery
from rank_driver import Driver
from reference import compare
from source_changes import changed
from unicron.events.spec.job import parse

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "loop.py"
SCRIPT = """
import os, runpy, sys
os.environ["UNICRON_FD"], sys.argv = str(fd), {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit()
"""


CONFIG = "bias_dropout_fusion=False,"
SHARED = "grad_reduce_in_fp32=True"
FLOAT_16 = "from megatron.core.transformer.module import Float16Module"
OPTIMIZER = "clip_grad=1.0,"
LAST = 'file.write(json.dumps(line) + "\\n")'
Changes = list[tuple[str, str]]


def _in_16_bits(dtype: str, *optimizer: str) -> Changes:
    """The replacements for a precision; `optimizer`: its arguments of OptimizerConfig."""
    return [
        (
            "pipeline_dtype=torch.float32",
            f"pipeline_dtype=torch.{dtype}, {optimizer[0]}, params_dtype=torch.{dtype}",
        ),
        (OPTIMIZER, f"{OPTIMIZER} {', '.join(optimizer)},"),
        ("sharing, module,", "sharing, Float16Module(config, module),"),
        ("\nVOCABULARY", f"{FLOAT_16}\n\nVOCABULARY"),
    ]


FLAGS: dict[str, Changes] = {
    "sequence parallel": [
        ("sequence_parallel=asked.experts and axes.tp > 1", "sequence_parallel=axes.tp > 1")
    ],
    "recompute": [
        (
            CONFIG,
            f'{CONFIG} recompute_granularity="full", recompute_method="uniform", '
            "recompute_num_layers=1,",
        )
    ],
    "recompute selectively": [(CONFIG, f'{CONFIG} recompute_granularity="selective",')],
    "overlapped reduction": [(SHARED, f"{SHARED}, overlap_grad_reduce=True, bucket_size=3000")],
    "overlapped gather": [
        (
            SHARED,
            f"{SHARED}, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=3000",
        ),
        (OPTIMIZER, f"{OPTIMIZER} overlap_param_gather=True,"),
    ],
    "held evaluation": [
        (
            "    began_s = time.monotonic()\n",
            "    import sys\n\n"
            '    sys.rank_trace.note("evaluate", 0, 0)\n'
            "    began_s = time.monotonic()\n",
        )
    ],
    "evaluation at the end": [(LAST, f"{LAST}\n    job.evaluate(lambda: validate(job))\n")],
    "bf16": _in_16_bits("bfloat16", "bf16=True"),
    # Measured: the gradients are finite at 2,048, but not at 4,096. So every third iteration is
    # skipped, the third of all first, and the scale moves.
    "fp16": _in_16_bits(
        "float16", "fp16=True", "initial_loss_scale=2048.0", "loss_scale_window=2", "hysteresis=1"
    ),
    "clipping": [(OPTIMIZER, "clip_grad=0.05,")],
    "no clipping": [(OPTIMIZER, "clip_grad=0.0,")],
    "per micro-batch": [("sequence=SEQUENCE,", 'sequence=SEQUENCE, loss="per_micro_batch",')],
    "dropout": [
        ("hidden_dropout=0.0", "hidden_dropout=0.1"),
        ("attention_dropout=0.0", "attention_dropout=0.1"),
    ],
    "tied embeddings": [
        (
            "max_sequence_length=SEQUENCE,",
            "max_sequence_length=SEQUENCE, share_embeddings_and_output_weights=True,",
        )
    ],
}
"""By flag: the replacements in the example."""
OTHER_RESULT = (
    "bf16",
    "fp16",
    "clipping",
    "no clipping",
    "per micro-batch",
    "dropout",
    "tied embeddings",
)
"""The flags with which another result is right. The others only train in another way."""

SAMPLE = "    return tokens(iteration * asked.micro_batches + micro_batch)"
_FACTOR: Changes = [
    (
        SAMPLE,
        "    global FACTOR\n    FACTOR = float('nan') if (iteration, micro_batch) == (2, 1) "
        f"else 1.0\n{SAMPLE}",
    ),
    ("losses.float().sum()", "losses.float().sum() * FACTOR"),
]
_CHECKED = """    from megatron.core.rerun_state_machine import get_rerun_state_machine
    get_rerun_state_machine().validate_result(
        out.sum() * FACTOR, torch.isnan, "found NaN in local forward loss calculation")
    return out, lambda"""
NOT_A_NUMBER: dict[str, Changes] = {
    "loss": [*_FACTOR, ("    return out, lambda", _CHECKED)],
    "gradient": [*_FACTOR, (SHARED, f"{SHARED}, check_for_nan_in_grad=True")],
}
"""By what Megatron checks: micro-batch 1 of iteration 2 is not a number."""


def flagged_example(folder: Path, flags: Iterable[str]) -> Path:
    """Write the example with these flags; return its path."""
    return changed_example(folder, [change for flag in flags for change in FLAGS[flag]])


def finish_as(
    driver: Driver, ranks: list[int], undisturbed: Path, iterations: int, relative_max: float
) -> None:
    """Train to the end; the result must equal a checkpoint of an undisturbed run."""
    driver.finish(ranks)
    gap = compare(driver.final_checkpoint(), undisturbed)
    print(gap)
    assert gap.num_losses == iterations
    assert gap.loss_rel < relative_max
    assert gap.param_rel < relative_max


def changed_example(
    folder: Path, changes: Iterable[tuple[str, str]], example: Path = EXAMPLE
) -> Path:
    """Write the example with these replacements, each of which must apply; return its path."""
    script = folder / "train.py"
    script.write_text(changed(example.read_text(), changes))
    return script


def drive_loop(
    folder: Path,
    nursery: Nursery,
    words: Sequence[str],
    *,
    iterations: int,
    micro_batches: int,
    slots_max: int = 4,
    script: Path = EXAMPLE,
    copy_every: int = 0,
    checkpoint_every: int = 0,
    reproducible: str = "rounding",
    reproducible_bits: int = 64,
    skip_not_finite: bool = False,
    **parallel: Any,
) -> Driver:
    """A driver whose ranks run the example, or `script`, with these arguments."""
    if parallel.get("optimizer", "whole") != "whole" and "--sharded" not in words:
        words = [*words, "--sharded"]
    argv = [
        str(script),
        "--iterations",
        str(iterations),
        "--micro-batches",
        str(micro_batches),
        *words,
    ]
    spec = parse(
        {
            "apiVersion": "unicron/v1",
            "name": "own",
            "slots": {"min": 1, "max": slots_max},
            "command": argv,
            "heal": "in-memory",
            "loop": {
                "micro_batches": micro_batches,
                "iterations": iterations,
                "parallel": parallel,
                "copy_every": copy_every,
                "checkpoint_every": checkpoint_every,
                "reproducible": reproducible,
                "reproducible_bits": reproducible_bits,
                "skip_not_finite": skip_not_finite,
                "output": str(folder / "out"),
            },
        }
    )
    driver = Driver(spec, folder, nursery)
    driver.patch = SCRIPT.format(argv=argv)
    return driver
