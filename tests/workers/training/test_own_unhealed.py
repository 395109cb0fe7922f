"""Loops without in-memory recovery: they still train, or fail with a one-line error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher import fork
from loop_driver import NOT_A_NUMBER, SAMPLE, changed_example
from nursery import Nursery

SHARDED = "use_distributed_optimizer=asked.sharded"
PER_TOKEN = "calculate_per_token_loss=True"
STEP = "        iteration = job.step()\n"
LOSS = "return out, lambda losses: (losses.float().sum(), losses.numel())"
HINT = (
    "(correct the data or lower the learning rate; without Megatron's check for NaN the step "
    "is taken with it)"
)
Run = Callable[..., list[tuple[int, str]]]
CHANGES = {
    "as it is": [],
    "scaled": [(PER_TOKEN, "calculate_per_token_loss=False")],
    "struck": [
        (PER_TOKEN, "calculate_per_token_loss=False"),
        (
            STEP,
            f"{STEP}        if iteration == 2 and "
            "'STRUCK' in __import__('os').environ:\n            __import__('os')._exit(9)\n",
        ),
    ],
    "apart": [
        (
            "import torch\n",
            "import os\nimport torch\nos.environ['UNICRON_LOOP'] = "
            "os.environ['UNICRON_LOOP'].replace('RANK', os.environ['RANK'])\n",
        )
    ],
    "gathers late": [
        (PER_TOKEN, "calculate_per_token_loss=False"),
        (SHARDED, "use_distributed_optimizer=True, overlap_param_gather=True"),
    ],
    "no minimum": [("lr=LR, min_lr=LR / 10, clip_grad", "lr=LR, clip_grad")],
    "no warm-up": [("samples // 10", "0")],
    "no minimum, no warm-up": [
        ("lr=LR, min_lr=LR / 10, clip_grad", "lr=LR, clip_grad"),
        ("samples // 10", "0"),
    ],
    "sgd": [('optimizer="adam"', 'optimizer="sgd"')],
    "experts": [
        (
            PER_TOKEN,
            "calculate_per_token_loss=True, expert_model_parallel_size=2, num_moe_experts=2",
        )
    ],
    "rows": [(LOSS, "return out")],
    "each": [(LOSS, "return out, lambda losses: (losses.float(), losses.numel())")],
    "named": [(LOSS, "return out, lambda losses: (losses.float().sum(), {'lm loss': losses})")],
    "unknown": [("adopt(build=build", "adopt(epochs=3, build=build")],
    "misspelt": [("adopt(build=build", "adopt(bild=build")],
    "mean": [("adopt(build=build", 'adopt(loss="per_mean", build=build')],
    "number": [("sample=sample", "sample=7")],
    "two": [("return ddps, optimizer, scheduler", "return ddps, optimizer")],
    "early": [(SAMPLE, f"    if iteration == 2:\n        raise StopIteration\n{SAMPLE}")],
    "worker": [
        (
            SAMPLE,
            "    if (iteration, micro_batch) == (2, 1):\n        next(iter(torch.utils."
            f"data.DataLoader(['17', 'x'], num_workers=1, collate_fn=records)))\n"
            f"{SAMPLE}\n\ndef records(found):\n    return [int(one + 'x') for one in "
            "found]\n",
        )
    ],
    **NOT_A_NUMBER,
    "lengths": [(SAMPLE, f"{SAMPLE}[:, :9 if iteration == 2 else None]")],
}


@pytest.fixture(scope="module")
def run(nursery: Nursery) -> Run:
    """`run(folder, change, num)`: (exit code, output) of each process."""

    def run_changed(folder: Path, change: str, num: int, **more: str) -> list[tuple[int, str]]:
        return fork(
            nursery,
            changed_example(folder, CHANGES[change]),
            ["--iterations", "4", "--micro-batches", "3", "--losses", str(folder / "losses")],
            num,
            **more,
        )

    return run_changed


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "losses").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, "as it is", 1)[0][0] == 0
    return losses(folder)


@pytest.mark.parametrize("change", ["scaled", "gathers late"])
def test_loops_without_in_memory_recovery_train_by_a_launcher(
    run: Run, tmp_path: Path, undisturbed: list[float], change: str
) -> None:
    found = run(tmp_path, change, 2)
    assert [code for code, _ in found] == [0, 0], found
    assert losses(tmp_path) == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "same"), [("no minimum", "as it is"), ("no minimum, no warm-up", "no warm-up")]
)
@pytest.mark.thorough
def test_an_optimizer_without_min_lr_has_that_of_the_schedule(
    run: Run, tmp_path: Path, change: str, same: str
) -> None:
    found = []
    for name in (change, same):
        folder = tmp_path / name
        folder.mkdir()
        ((code, output),) = run(folder, name, 1)
        assert code == 0, output
        found.append(losses(folder))
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.thorough
def test_another_optimizer_trains(run: Run, tmp_path: Path, undisturbed: list[float]) -> None:
    assert run(tmp_path, "sgd", 1)[0][0] == 0
    found = losses(tmp_path)
    assert len(found) == len(undisturbed)
    assert found[0] == undisturbed[0]
    assert found[-1] != undisturbed[-1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("misspelt", "adopt: bild is none of its arguments (did you mean build?)"),
        ("unknown", "adopt: epochs is none of its arguments (it takes build, sample"),
        (
            "rows",
            "`forward` must return the sum of the loss of its tokens and their number, or the "
            "output and a function of it that returns these two. It returned a Tensor (docs/",
        ),
        ("each", "It returned losses of shape (2, 16) (docs/guides/scripts.md shows an example)"),
        ("named", "It returned (Tensor, dict) (docs/"),
        ("mean", "adopt: loss is 'per_mean' (give per_token or per_micro_batch)"),
        ("number", "adopt: sample is 7, not a function"),
        ("two", "`build` must return three values"),
        ("experts", "expert parallel: its ranks run in lockstep"),
    ],
)
def test_a_wrong_loop_is_a_one_line_error(run: Run, tmp_path: Path, change: str, line: str) -> None:
    ((code, output),) = run(tmp_path, change, 1)
    assert code == 2, output
    assert "Traceback" not in output
    assert line in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            "early",
            "`sample` raised StopIteration in micro-batch 0 of iteration 2 (the data end before "
            "the last of loop.iterations: begin them again, or lower it)",
        ),
        (
            "worker",
            "`sample` raised ValueError: invalid literal for int() with base 10: '17x' in "
            "micro-batch 1 of iteration 2 (any process raises it for this micro-batch: correct "
            "the data or the script)",
        ),
        (
            "lengths",
            "`forward` raised RuntimeError: The size of tensor a (8) must match the size of "
            "tensor b (16) at non-singleton dimension 1 in micro-batch 0 of iteration 2 (any "
            "process raises it for this micro-batch: correct the data or the script)",
        ),
        (
            "loss",
            "rank 0: found NaN in local forward loss calculation: nan, in micro-batch 1 of "
            f"iteration 2 {HINT}",
        ),
        (
            "gradient",
            "rank 0: found NaN in local grad norm for bucket #0 in backward pass before "
            f"data-parallel communication collective: nan, in micro-batch 1 of iteration 2 "
            f"{HINT}",
        ),
    ],
)
def test_the_last_line_says_what_is_wrong_with_the_data(
    run: Run, tmp_path: Path, change: str, line: str
) -> None:
    ((code, output),) = run(tmp_path, change, 1)
    assert code == 2, output
    assert line in output.splitlines()
    assert len(losses(tmp_path)) == 2


def test_a_task_without_recovery_resumes_from_its_last_checkpoint(
    run: Run, tmp_path: Path, undisturbed: list[float]
) -> None:
    task: dict[str, Any] = {
        "micro_batches": 3,
        "iterations": 4,
        "output": str(tmp_path / "out"),
        "checkpoint_every": 2,
    }

    def begin(**more: str) -> int:
        ((code, _),) = run(
            tmp_path, "struck", 1, UNICRON_TASK="7", UNICRON_LOOP=json.dumps(task), **more
        )
        return code

    assert begin(STRUCK="") == 9
    assert len(losses(tmp_path)) == 2
    assert begin() == 0
    assert losses(tmp_path) == pytest.approx(undisturbed, rel=1e-6)
    assert [one.name for one in (tmp_path / "out" / "task-7").iterdir()] == ["iter-4"]


def test_ranks_that_do_not_see_the_same_checkpoints_do_not_train(run: Run, tmp_path: Path) -> None:
    task = {
        "micro_batches": 3,
        "iterations": 4,
        "output": str(tmp_path / "of-RANK"),
        "checkpoint_every": 4,
    }
    for code, last in ((0, ""), (2, "some ranks resume from iteration 0, others from 4")):
        found = run(tmp_path, "apart", 2, UNICRON_TASK="7", UNICRON_LOOP=json.dumps(task))
        assert [one for one, _ in found] == [code, code], found
        assert all(last in output for _, output in found)
