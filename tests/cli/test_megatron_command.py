"""The arguments of a `unicron megatron` command against its job file, at submit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cli_process import refused, unicron
from unicron.cli.files import job_file, megatron_command
from unicron.workers.training.megatron_lm.arguments import DECLINES

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "megatron-70b.yaml"
SEVERAL = [
    ("micro_batches: 1024 ", "micro_batches: 512 "),
    ('--micro-batch-size, "1"', '--micro-batch-size, "2"'),
]


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def added(*words: str) -> tuple[str, str]:
    """The change that appends arguments to the command."""
    return ("/data/tokens_text_document]", ", ".join(["/data/tokens_text_document", *words]) + "]")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [added("--tensor-model-parallel-size", '"4"')],
            "loop.parallel.tensor: is [8], but --tensor-model-parallel-size of the command is 4",
        ),
        (
            [added("--pipeline-model-parallel-size=2")],
            "loop.parallel.pipeline: is [4], "
            "but --pipeline-model-parallel-size of the command is 2",
        ),
        (
            [('--train-iters, "100000"', '--train-iters, "5"')],
            "loop.iterations: is 100000, but --train-iters of the command is 5",
        ),
        (
            [added("--optimizer", "adam"), ('--train-iters, "100000"', '--train-iters, "5"')],
            "loop.iterations: is 100000, but --train-iters of the command is 5",
        ),
        ([added("--exit-interval", '"50"')], "loop.iterations: is 100000, but --exit-interval of"),
        (
            [('--train-iters, "100000"', '--train-samples, "2048"')],
            "--train-samples and --global-batch-size of the command make 2",
        ),
        (
            [('--global-batch-size, "1024"', '--global-batch-size, "512"')],
            "loop.micro_batches: is 1024, but --global-batch-size and --micro-batch-size of the "
            "command "
            "make 512",
        ),
        (
            [('--num-layers, "80"', '--num-layers, "60"')],
            "loop.model.num_layers: is 80, but --num-layers of the command is 60",
        ),
        ([('--hidden-size, "8192"', "--hidden-size=4096")], "loop.model.hidden: is 8192, but"),
        (
            [('--num-attention-heads, "64"', '--num-attention-heads, "32"')],
            "loop.model.num_heads: ",
        ),
        (
            [('--num-query-groups, "8"', '--num-query-groups, "16"')],
            "loop.model.num_query_groups: ",
        ),
        ([('--ffn-hidden-size, "28672"', '--ffn-hidden-size, "1024"')], "loop.model.ffn_hidden: "),
        ([('--seq-length, "4096"', '--seq-length, "2048"')], "loop.model.sequence: is 4096, but"),
        ([added("--recompute-granularity", "full")], "loop.model.recompute: is none, but"),
        (
            [*SEVERAL, ("global_batch: 1024", "global_batch: 512")],
            "loop.model.global_batch: is 512, but --global-batch-size of the command is 1024",
        ),
    ],
)
def test_a_contradiction_is_refused_at_submit(
    tmp_path: Path, changes: list[tuple[str, str]], words: str
) -> None:
    path = written(tmp_path, *changes)
    refused(unicron("submit", str(path), "--dry-run", folder=tmp_path), words)
    refused(unicron("submit", str(path), folder=tmp_path), words)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        SEVERAL,
        [added("--tensor-model-parallel-size", '"8"', "--pipeline-model-parallel-size", '"4"')],
        # Megatron-LM's default, which the start does not count as given
        [added("--tensor-model-parallel-size", '"1"')],
        [added("--num-layers", '"60"', "--num-layers", '"80"')],  # argparse takes the last
        [added("--train-iters", "many")],  # the start reports it
        [added("--exit-interval", '"100000"')],
        # Megatron-LM's own loop trains, which does not read the job file
        [
            added("--rampup-batch-size", '"64"', '"64"', '"1000000"'),
            ('--train-iters, "100000"', '--train-iters, "5"'),
        ],
        [added("--yaml-cfg", "a.yaml", "--tensor-model-parallel-size", '"4"')],
        [
            added("--heterogeneous-layers-config-path", "a.json"),
            ('--num-layers, "80"', '--num-layers, "60"'),
        ],
        # another script may build another model of the same arguments
        [("pretrain_gpt.py,", "mine.py,"), ('--num-layers, "80"', '--num-layers, "60"')],
        [
            ("[unicron, megatron,", "[python3, megatron,"),
            ('--train-iters, "100000"', '--train-iters, "5"'),
        ],
        [('  --micro-batch-size, "1", --global-batch-size', "  --global-batch-size")],
    ],
)
def test_what_the_start_may_accept_is_accepted(
    tmp_path: Path, changes: list[tuple[str, str]]
) -> None:
    assert job_file.load(written(tmp_path, *changes)).name == "llama-70b"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--rampup-batch-size", '"64"', '"64"', '"1000000"'],
            "the batch grows (--rampup-batch-size)",
        ),
        (["--fp8-format", "hybrid"], "FP8 scales are not part of the known state (--fp8-format)"),
        (["--ckpt-format", "torch"], "its checkpoints have another format than torch_dist"),
        (
            ["--use-torch-fsdp2", "--sft"],
            "FSDP shards the parameters (--use-torch-fsdp2); its samples",
        ),
        (
            [
                "--ckpt-format",
                "torch_dist",
                "--context-parallel-size",
                '"1"',
                "--dataloader-type=single",
            ],
            "",
        ),
    ],
)
def test_the_dry_run_says_what_will_not_heal(tmp_path: Path, words: list[str], why: str) -> None:
    path = written(tmp_path, added(*words))
    assert megatron_command.why_not(job_file.load(path)).startswith(why)
    shown = unicron("submit", str(path), "--dry-run", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    page = " ".join(shown.stdout.split())
    assert (f"does not heal in place, restarts from memory: {why}" in page) == bool(why)
    assert ("heals in memory unless the command finds" in page) != bool(why)


def test_names_are_those_of_the_table_of_arguments() -> None:
    assert {*megatron_command.DEFAULTS, *megatron_command.NAMES.values()} <= DECLINES.keys()
    assert megatron_command.option("fp8") == "--fp8-format"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fsdp", "heals in memory unless the command finds at its start that it cannot"),
        ("own-text", "parameters; heals in memory"),
        ("command", "restarts as a whole"),
    ],
)
def test_the_dry_run_does_not_promise_what_a_start_decides(
    tmp_path: Path, name: str, words: str
) -> None:
    shown = unicron("submit", str(EXAMPLE.parent / f"{name}.yaml"), "--dry-run", folder=tmp_path)
    page = " ".join(shown.stdout.split())
    assert words in page
    assert ("unless the command" in page) == (name == "fsdp")


def test_a_command_without_arguments_is_left_to_its_start(tmp_path: Path) -> None:
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["command"] = spec["command"][:3]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    assert job_file.load(path).command == ("unicron", "megatron", spec["command"][2])
