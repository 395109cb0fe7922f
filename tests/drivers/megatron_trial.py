"""Megatron-LM's own pretrain_gpt.py: alone by its own loop, and under agents with a rank killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from real_cluster import RealCluster

ITERATIONS, MICRO_BATCHES, STRUCK, VICTIM = 12, 6, 3, 1
STOCK_S_MAX = 300.0
STOCK = Path(__file__).parent / "stock_megatron.py"
REL = 2e-6
"""Printed losses have seven digits, and layouts sum in different orders."""
WORDS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 12 --train-iters 12
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer
    --vocab-size 127 --make-vocab-size-divisible-by 64 --split 90,10,0 --transformer-impl local
    --distributed-backend gloo --eval-interval 5 --eval-iters 2 --log-interval 1
    --hidden-dropout 0 --attention-dropout 0 --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
    --log-params-norm --log-throughput""".split()  # noqa: SIM905
LINE = re.compile(r"(?:iteration +(\d+)/ +\d+ \||(?:validation loss at ([\w ]+) \|))")
VALUE = re.compile(r"(lm loss|lm loss value|grad norm|params norm|learning rate): +([\d.E+-]+)")
Lines = dict[str, dict[str, float]]


class Case(NamedTuple):
    """`words`: more arguments. The stock loop trains without them: they change no result."""

    slots: int
    parallel: Mapping[str, list[int]]
    words: tuple[str, ...] = ()


USUAL = ("--sequence-parallel", "--recompute-granularity", "full", "--recompute-method", "uniform",
         "--recompute-num-layers", "1", "--overlap-grad-reduce")
CASES = {"DP 3": Case(3, {}), "TP 2 x DP 2": Case(4, {"tensor": [2]}),
         "PP 2 x DP 2": Case(4, {"pipeline": [2]}),
         "TP 2 x DP 2, usual flags": Case(4, {"tensor": [2]}, USUAL)}


class Healed(NamedTuple):
    """What a run with a killed rank printed; its incident; from the kill to the step."""

    lines: Lines
    incident: Any
    fault_to_step_s: float


def printed(text: str) -> Lines:
    """The values of each progress line (by its number) and of each evaluation (by its place)."""
    return {found[1] or found[2]: {name: float(value) for name, value in VALUE.findall(line)}
            for line in text.splitlines() if (found := LINE.search(line))}


def stock(clone: Path) -> Lines:
    """Train by Megatron-LM's own loop, in one process. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-P", str(STOCK), str(clone / "pretrain_gpt.py"), *WORDS],
        check=True, capture_output=True, text=True, timeout=STOCK_S_MAX,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    return printed(done.stdout)


def job(clone: Path, case: Case, output: Path, *words: str) -> dict[str, Any]:
    return {"apiVersion": "unicron/v1", "name": "megatron",
            "slots": {"min": 2, "max": case.slots},
            "command": [sys.executable, "-P", "-m", "unicron.cli.main", "megatron",
                        str(clone / "pretrain_gpt.py"), *WORDS, *words],
            "heal": "in-memory",
            "loop": {"micro_batches": MICRO_BATCHES, "iterations": ITERATIONS,
                     "output": str(output), "parallel": dict(case.parallel)}}


def struck(cluster: RealCluster, clone: Path, case: Case, output: Path) -> Healed:
    """Train under agents, with a rank killed in its backward pass."""
    after = cluster.seq()
    task = cluster.submit(job(clone, case, output, *case.words))
    cluster.hold(task, VICTIM, event="backward", iteration=STRUCK)
    held = cluster.wait_held(task, VICTIM, 0.0)
    cluster.hold(task, VICTIM, event="forward", iteration=-1)
    killed_s = time.time()
    os.kill(held["pid"], signal.SIGKILL)
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    stepped_s = min(line["t"] for line in cluster.traced(task) if line["event"] == "done"
                    and line["iteration"] == STRUCK)
    closed = [record.body for record in cluster.told(after, "IncidentClosed")]
    assert len(closed) == 1, cluster.tail(after)
    text = "".join(log.read_text() for log in cluster.state.logs.glob(f"{task}-*/*.log"))
    return Healed(printed(text), closed[0], stepped_s - killed_s)


def unequal(stock_lines: Lines, lines: Lines) -> list[str]:
    """The lines whose losses differ, or that only one of the two printed."""
    def loss(line: Mapping[str, float]) -> float:
        return line.get("lm loss", line.get("lm loss value", -1.0))

    return [place for place in sorted({*stock_lines, *lines})
            if place not in lines or place not in stock_lines
            or abs(loss(lines[place]) - loss(stock_lines[place])) > REL * loss(stock_lines[place])]
