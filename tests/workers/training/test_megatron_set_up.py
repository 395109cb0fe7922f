"""What `unicron megatron` has set up before its first step is what Megatron-LM has: each field.

It compares all clones of Megatron-LM that UNICRON_MEGATRON_LM names, else the stand-in beside the
installed megatron-core, and says which. No field is named but those that must differ.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megatron_set_up import SECTIONS
from megatron_trial import ITERATIONS, MICRO_BATCHES, USUAL, WORDS, clones, stand_in
from nursery import Nursery
from rank_driver import START_S, Driver
from unicron.events.spec.job import parse
from unicron.events.spec.model import Axes

SET_UP = Path(__file__).parents[2] / "drivers" / "megatron_set_up.py"
STOCK_S_MAX = 300.0
OWN = {"--train-iters", "--lr-decay-style"}
"""The arguments of WORDS that each case gives itself."""


class Case(NamedTuple):
    """`words`: of the schedule. `more`: of Megatron-LM, which the stand-in lacks."""

    words: str
    num_ranks: int = 1
    tensor: Sequence[int] = (1,)
    differ: Mapping[str, str] = {}
    more: Sequence[str] = ()

    def argv(self, clone: Path | None) -> list[str]:
        """None: of the stand-in, whose defaults are WORDS."""
        if clone is None:
            return self.words.split()
        return [*_without(WORDS, OWN), *self.words.split(), *self.more]


LOW = "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear"
CASES = {
    "iterations": Case(f"--train-iters 12 --lr-warmup-iters 2 --lr-decay-iters 10 {LOW}"),
    "samples": Case(f"--train-samples 150 --lr-warmup-samples 16 --lr-decay-samples 120 {LOW}"),
    "fraction of iterations": Case("--train-iters 12 --lr-warmup-fraction 0.3"),
    "fraction of samples": Case("--train-samples 150 --lr-warmup-fraction 0.3"),
    "WSD, iterations": Case(
        "--train-iters 12 --lr-wsd-decay-iters 4 --lr-decay-style WSD --lr-wsd-decay-style linear"
    ),
    "WSD, samples": Case(
        "--train-samples 150 --lr-wsd-decay-samples 44 --lr-decay-style WSD "
        "--lr-wsd-decay-style linear"
    ),
    "the schedule ends before the data": Case("--train-samples 150 --lr-decay-samples 30"),
    "samples, built in two layouts": Case(
        "--train-samples 150 --lr-warmup-samples 16 --lr-decay-samples 120",
        tensor=(1, 2),
        differ={"parameter groups: 0.params": "the first weights are those of the largest layout"},
    ),
    "samples, two replicas": Case(
        "--train-samples 150 --lr-warmup-samples 16 --lr-decay-samples 120",
        num_ranks=2,
        more=(
            *USUAL[1:],
            "--bf16",
            "--accumulate-allreduce-grads-in-fp32",
            "--use-distributed-optimizer",
            "--overlap-param-gather",
            "--async-save",
            "--exit-signal-handler",
        ),
    ),
}
QUICK = ("iterations", "samples", "fraction of samples")
"""What `make test` runs on the stand-in."""
DIFFER: Mapping[str, str] = {
    "arguments: curr_iteration": "its loop sets it before the first step",
    "arguments: do_train": "its loop asks its data loaders whether there is data",
    "arguments: do_valid": "the same",
    "arguments: do_test": "the same",
    "arguments: inprocess_active_world_size": "of its in-process restart, which declines",
    "model: calculate_per_token_loss": "Unicron's step divides the sum of the gradients",
    "data loader: _iterator": "it has begun to read",
    "data loader: persistent_workers": "there is one pass over the data",
    "data loader: worker_init_fn": "it installs --exit-signal-handler, which has a line of its "
    "own, and closes files of GPUs, which no worker opens here",
}
"""The fields that differ, and why."""


@pytest.fixture(params=[*clones(), None], ids=lambda one: one.name if one else "stand-in")
def clone(request: pytest.FixtureRequest) -> Path | None:
    if request.param is None and clones():
        pytest.skip("the stand-in is for a machine without a clone")
    found: Path | None = request.param
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK and not clones()))
        for name in CASES
    ],
)
def test_each_field_is_that_of_megatron_lm(
    clone: Path | None, tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = CASES[name]
    script = (clone or stand_in(tmp_path / "stand-in")) / "pretrain_gpt.py"
    argv = [str(script), *case.argv(clone)]
    expected = stock(tmp_path, argv, case.num_ranks)
    found = unicron(tmp_path, argv, case, nursery, monkeypatch)
    differing: list[str] = []
    counts = []
    for section in SECTIONS:
        fields = {*expected[section], *found[section]}
        wrong = {
            f"{section}: {field}": (
                expected[section].get(field, "absent"),
                found[section].get(field, "absent"),
            )
            for field in sorted(fields)
            if expected[section].get(field, "absent") != found[section].get(field, "absent")
        }
        told = [field for field in wrong if field not in DIFFER and field not in case.differ]
        differing += [f"{field}: {wrong[field]}"[:300] for field in told]
        counts.append(
            f"{section} {len(fields)} ({len(told)} differ, {len(wrong) - len(told)} must)"
        )
        assert fields
    by = clone.name if clone else "the stand-in (no clone is named)"
    print(f"{by}, {name}: {', '.join(counts)}")
    assert not differing, "\n".join(differing)


def stock(folder: Path, argv: Sequence[str], num_ranks: int) -> dict[str, Any]:
    """What rank 0 of Megatron-LM's own `pretrain` has set up, with the data of all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    files = [folder / f"stock-{rank}" for rank in range(num_ranks)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SET_UP), "stock", str(file), *argv],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(num_ranks),
            },
        )
        for rank, file in enumerate(files)
    ]
    try:
        texts = [rank.communicate(timeout=STOCK_S_MAX)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(file.exists() for file in files), texts[0][-3000:]
    first, *_ = whole = [json.loads(file.read_text()) for file in files]
    shares = [one["order of data"]["batches"] for one in whole]
    first["order of data"]["batches"] = [
        batch for step in zip(*shares, strict=False) for batch in step
    ][: ITERATIONS * MICRO_BATCHES]
    return first  # type: ignore[no-any-return]


def unicron(
    folder: Path, argv: list[str], case: Case, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What rank 0 of the same script has set up as a rank of an agent."""
    loop = {
        "micro_batches": MICRO_BATCHES,
        "iterations": ITERATIONS,
        "output": str(folder / "out"),
        "parallel": {
            "tensor": list(case.tensor),
            "optimizer": ("sharded" if "--use-distributed-optimizer" in argv else "whole"),
        },
    }
    monkeypatch.setenv("UNICRON_LOOP", json.dumps(loop))
    driver = Driver(
        parse(
            {
                "apiVersion": "unicron/v1",
                "name": "set-up",
                "command": argv,
                "heal": "in-memory",
                "slots": {"min": 1, "max": max(case.num_ranks, *case.tensor)},
                "loop": loop,
            }
        ),
        folder,
        nursery,
    )
    file = folder / "unicron"
    driver.by = [sys.executable, str(SET_UP), "unicron", str(file), *argv]
    ranks = list(range(case.num_ranks))
    try:
        axes = Axes(dp=case.num_ranks)
        driver.start(*ranks, axes=axes)
        driver.form(ranks, axes=axes)
        driver.processes[0].popen.wait(START_S)
        assert file.exists(), driver.story()
    finally:
        driver.close()
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def _without(words: Sequence[str], names: set[str]) -> list[str]:
    """The words without these arguments and their values."""
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if word not in names and before not in names
    ]
