"""`reproducible: bitwise`: what cannot keep the promise is found at the start, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_driver import changed_example, drive_loop
from nursery import Nursery
from rank_driver import Drive, Driver, Twins
from reference import read
from unicron.events.errors import UsageError
from unicron.events.records import reports as r
from unicron.events.records.statuses import WRONG_INPUT
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel

BITWISE: dict[str, Any] = {"iterations": 3, "reproducible": "bitwise"}
PIPELINE = {"pipeline": [1, 2]}
Loops = Callable[..., Driver]


# --- the self-test ---
NOISY = """
from unicron.workers.training.model import trainee
build, calls = trainee.build, []

def noisy(*given, **options):
    made = build(*given, **options)
    for name, param in made.named_parameters():
        if name == "decoder.layers.1.mlp.linear_fc1.weight":
            param.register_hook(another)
    return made

def another(gradient):
    calls.append(1)
    return gradient * 1.001 if len(calls) == 2 else gradient

trainee.build = noisy
"""
"""A kernel that gives another gradient at its second call."""


@pytest.mark.parametrize(("axes", "rank"), [(Axes(), 0), (Axes(pp=2), 1)], ids=["alone", "stage"])
def test_a_kernel_that_is_not_deterministic_is_named(drive: Drive, axes: Axes, rank: int) -> None:
    driver = drive(**BITWISE, parallel=PIPELINE)
    driver.patch = NOISY
    ranks = list(range(axes.pp))
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    errored = driver.wait(r.RankErrored, rank)
    assert errored.status == WRONG_INPUT
    assert (
        f"rank {rank}: run twice, micro-batch 0 of iteration 0 gives other gradients of "
        "decoder.layers.1.mlp.linear_fc1.weight"
    ) in errored.text
    assert "set reproducible: rounding" in errored.text


DIES = """
import os, signal
from unicron.workers.training.model.exact_sum import ExactSum
ExactSum.negate = lambda self: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_a_fault_in_the_self_test_is_healed(drive: Drive, twin: Twins) -> None:
    driver, axes = drive(**BITWISE, parallel=PIPELINE), Axes(pp=2)
    driver.start(0)
    driver.patch = DIES
    driver.start(1)
    driver.form([0, 1], axes=axes)
    driver.processes[1].popen.wait(60)
    driver.kill(1)
    driver.quiesce([0], "now")
    driver.patch = ""
    driver.start(1, attempt=2)
    driver.form([0, 1], axes=axes)
    driver.finish([0, 1])
    assert twin(**BITWISE).is_equal(driver.final_checkpoint())


# --- what must be equal on all members ---
TWO_THREADS = 'import os\nos.environ["OMP_NUM_THREADS"] = "2"\n'
OTHER_DEVICE = "import torch\ntorch.backends.cpu.get_cpu_capability = lambda: 'another'\n"


@pytest.mark.parametrize(
    ("patch", "usual", "other"),
    [(TWO_THREADS, "1 thread", "2 threads"), (OTHER_DEVICE, "cpu ", "cpu another, 1 thread")],
    ids=["threads", "device"],
)
def test_another_number_of_threads_or_device_is_refused(
    drive: Drive, patch: str, usual: str, other: str
) -> None:
    driver = drive(**BITWISE)
    driver.start(0)
    driver.patch = patch
    driver.start(1)
    driver.reconfigure([0, 1])
    errored = driver.wait(r.RankErrored, 1)
    failed = driver.wait(r.ReconfigureFailed, 0)
    assert errored.status == WRONG_INPUT
    for told in (errored.text, failed.error):
        mine, _, others = told.partition("the other ranks have torch 2")
        assert "rank 1 on" in mine
        assert other in mine
        assert usual in others
        assert other not in others


# --- scripts ---
@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery, closed: Loops) -> Loops:
    """A driver whose rank runs the example: `loops("--experts", reproducible="required")`. Call it
    once. `argument`: the script's own `reproducible`."""

    def make(*words: str, argument: str = "", **options: Any) -> Driver:
        changes = [("sequence=SEQUENCE,", f"sequence=SEQUENCE, reproducible={argument!r},")]
        script = changed_example(tmp_path, changes if argument else [])
        driver = closed(
            drive_loop(
                tmp_path,
                nursery,
                words,
                iterations=2,
                micro_batches=2,
                slots_max=2,
                script=script,
                **options,
            )
        )
        driver.launch(0)
        return driver

    return make


def test_experts_train_with_rounding_and_say_so(loops: Loops) -> None:
    driver = loops("--experts", reproducible="bitwise")
    assert driver.wait(r.RankReady, 0).rounding_why == "a mixture of experts"
    text = driver.processes[0].log.read_text()
    assert text.count("gradients are summed with rounding, not bit for bit") == 1


@pytest.mark.parametrize(
    ("words", "options", "text"),
    [
        (
            ["--experts"],
            {"reproducible": "required"},
            "reproducible: required cannot be kept: a mixture of experts",
        ),
        (
            [],
            {"reproducible": "required", "argument": "bitwise"},
            "loop.reproducible is required in the job file, and bitwise in the script",
        ),
        ([], {"argument": "exact"}, "adopt: reproducible is 'exact'"),
        (
            [],
            {"argument": "bitwise", "tensor": [1, 2]},
            "loop.reproducible: bitwise keeps the tensor-parallel size",
        ),
    ],
    ids=["experts", "disagreement", "unknown", "tensor"],
)
def test_what_cannot_be_is_refused_in_one_line(
    loops: Loops, words: list[str], options: dict[str, Any], text: str
) -> None:
    errored = loops(*words, **options).wait(r.RankErrored, 0)
    assert errored.status == WRONG_INPUT
    assert text in errored.text


@pytest.mark.thorough
def test_a_script_alone_may_ask_for_it(loops: Loops) -> None:
    driver = loops(argument="required")
    driver.processes[0].ready = driver.wait(r.RankReady, 0)
    driver.form([0])
    driver.finish([0])
    assert any(name.startswith("exponent.") for name in read(driver.final_checkpoint()))


@pytest.mark.parametrize(
    ("name", "applies"),
    [
        ("num_moe_experts", "experts"),
        ("gradient_accumulation_fusion", "accumulation_fusion"),
        ("defer_embedding_wgrad_compute", "defer_embedding"),
        ("cross_entropy_loss_fusion", "cross_entropy"),
        ("", ""),
    ],
)
def test_each_reason_is_found_in_the_configuration(name: str, applies: str) -> None:
    from megatron.core.transformer import TransformerConfig
    from unicron.workers.training.adopt.custom_loop import NOT_BITWISE, BuiltLoop

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert not name or hasattr(config, name)
    vars(config).update({"gradient_accumulation_fusion": False, **({name: True} if name else {})})
    loop = BuiltLoop(config, SimpleNamespace(), SimpleNamespace(), Parallel(), [])
    found = [what for what, check in NOT_BITWISE.items() if check(loop)]
    assert len(found) == bool(name)
    assert all(applies in what for what in found)


def test_without_healing_there_is_no_promise() -> None:
    from unicron.workers.training.model import determinism

    determinism.decline("rounding", "why")
    with pytest.raises(UsageError, match="required cannot be kept: why"):
        determinism.decline("required", "why")
