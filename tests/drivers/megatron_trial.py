"""Megatron-LM's own pretrain_gpt.py: alone by its own loop, and under agents with a rank killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from real_cluster import RealCluster

ITERATIONS, MICRO_BATCHES, STRUCK, VICTIM = 12, 6, 3, 1
LOADED, SAVED = 3, 10
"""In a round trip: the iterations after which the agents' job loads and saves."""
STOCK_S_MAX = 600.0
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


class Fault(NamedTuple):
    """Rank `victim` is killed when it begins `event` of `iteration`."""

    victim: int = VICTIM
    event: str = "backward"
    iteration: int = STRUCK


class Case(NamedTuple):
    """`words`: more arguments. In fp32 Megatron-LM's own loop trains without them: they change no
    result."""

    slots: int
    parallel: Mapping[str, Any]
    words: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = (Fault(),)


USUAL = ("--sequence-parallel", "--recompute-granularity", "full", "--recompute-method", "uniform",
         "--recompute-num-layers", "1", "--overlap-grad-reduce")
CASES = {"DP 3": Case(3, {}), "TP 2 x DP 2": Case(4, {"tensor": [2]}),
         "PP 2 x DP 2": Case(4, {"pipeline": [2]}),
         "TP 2 x DP 2, usual flags": Case(4, {"tensor": [2]}, USUAL)}


DEFAULTS = Case(
    8, {"tensor": [2], "pipeline": [2], "optimizer": "sharded"},
    (*USUAL, "--bf16", "--accumulate-allreduce-grads-in-fp32", "--use-distributed-optimizer",
     "--overlap-param-gather"),
    (Fault(1, "forward", 3), Fault(5, "gate", 6), Fault(4, "forward", 9)))
"""The flags of the usual job, over TP 2 x PP 2 x DP 2, with three faults."""
TRIP = Case(4, {"tensor": [2]}, (), (Fault(1, "forward", 4), Fault(3, "backward", 6),
                                     Fault(0, "backward", 8)))
"""Three faults between loading and saving."""
DEFAULTS_TRIP = DEFAULTS._replace(
    faults=(Fault(1, "forward", 4), Fault(5, "gate", 6), Fault(4, "forward", 8)))


class Healed(NamedTuple):
    """What a run with killed ranks printed; its incidents; from each kill to the step."""

    lines: Lines
    incidents: list[Any]
    fault_to_step_s: list[float]

    @property
    def iterations_lost(self) -> int:
        return sum(one.iterations_lost for one in self.incidents)


def printed(text: str) -> Lines:
    """The values of each progress line (by its number) and of each evaluation (by its place)."""
    return {found[1] or found[2]: {name: float(value) for name, value in VALUE.findall(line)}
            for line in text.splitlines() if (found := LINE.search(line))}


def stock(clone: Path, case: Case, *words: str) -> Lines:
    """Train by Megatron-LM's own loop: one replica, as its initial weights depend on the layout.
    `words`: more arguments. Raises CalledProcessError."""
    (tp,), (pp,) = (case.parallel.get(name, [1]) for name in ("tensor", "pipeline"))
    sizes = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-P", str(STOCK), str(clone / "pretrain_gpt.py"), *WORDS,
               *case.words, *sizes, *words]
    ranks = [subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(tp * pp),
             "MASTER_PORT": str(port)}) for rank in range(tp * pp)]
    try:
        texts = [rank.communicate(timeout=STOCK_S_MAX)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, texts, strict=True):
        if rank.returncode:
            raise subprocess.CalledProcessError(rank.returncode, command, text)
    return printed("".join(texts))


def job(clone: Path, case: Case, output: Path, *words: str, iterations: int = ITERATIONS
        ) -> dict[str, Any]:
    """The job of this case."""
    return {"apiVersion": "unicron/v1", "name": "megatron",
            "slots": {"min": 2, "max": case.slots},
            "command": [sys.executable, "-P", "-m", "unicron.cli.main", "megatron",
                        str(clone / "pretrain_gpt.py"), *WORDS, *words],
            "heal": "in-memory",
            "loop": {"micro_batches": MICRO_BATCHES, "iterations": iterations,
                     "output": str(output), "parallel": dict(case.parallel), "copy_every": 2}}


def struck(cluster: RealCluster, clone: Path, case: Case, output: Path, *words: str,
           iterations: int = ITERATIONS) -> Healed:
    """Train under agents, and kill a rank at each fault. `words`: more arguments."""
    after = cluster.seq()
    task = cluster.submit(job(clone, case, output, *case.words, *words, iterations=iterations))
    took_s: list[float] = []
    for victim, event, iteration in case.faults:
        begun_s = time.time()
        cluster.hold(task, victim, event=event, iteration=iteration)
        held = cluster.wait_held(task, victim, begun_s)
        cluster.hold(task, victim, event="forward", iteration=-1)
        killed_s = time.time()
        os.kill(held["pid"], signal.SIGKILL)
        took_s.append(_stepped_s(cluster, task, iteration, killed_s) - killed_s)
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    closed = [record.body for record in cluster.told(after, "IncidentClosed")]
    # A fault before the last one's rank is back belongs to the same incident.
    assert 1 <= len(closed) <= len(case.faults), cluster.tail(after)
    text = "".join(log.read_text() for log in sorted(
        cluster.state.logs.glob(f"{task}-*/*.log"), key=lambda log: log.stat().st_mtime))
    return Healed(printed(text), closed, took_s)


def round_trip(cluster: RealCluster, clone: Path, case: Case, folder: Path) -> Healed:
    """Train by Megatron-LM's own loop, which saves; continue its checkpoint under agents, which
    save; continue theirs by its own loop. The lines are those of all three."""
    before, between = str(folder / "before"), str(folder / "between")
    first = stock(clone, case, "--save", before, "--save-interval", "4",
                  "--exit-interval", str(LOADED))
    healed = struck(cluster, clone, case, folder / "out", "--load", before, "--save", between,
                    "--save-interval", "4", "--exit-interval", str(SAVED), iterations=SAVED)
    last = stock(clone, case, "--load", between)
    assert min(map(int, filter(str.isdecimal, last))) == SAVED + 1, last
    # Its second line is the mean of two iterations: it does not start its sums anew after one.
    second = last[str(SAVED + 2)]
    second["lm loss"] = 2 * second["lm loss"] - last[str(SAVED + 1)]["lm loss"]
    return healed._replace(lines=first | healed.lines | last)


def _stepped_s(cluster: RealCluster, task: int, iteration: int, after_s: float) -> float:
    """When the first rank has stepped this iteration after `after_s`."""
    line = cluster.wait(lambda: next(
        (line for line in cluster.traced(task) if line["event"] == "done"
         and line["iteration"] == iteration and line["t"] > after_s), None),
        f"iteration {iteration} is done")
    return float(line["t"])


def unequal(stock_lines: Lines, lines: Lines) -> list[str]:
    """The lines whose losses differ, or that only one of the two printed."""
    return [place for place in sorted({*stock_lines, *lines})
            if place not in lines or place not in stock_lines
            or loss_rel(stock_lines[place], lines[place]) > REL]


def loss_rel(stock_line: Mapping[str, float], line: Mapping[str, float]) -> float:
    """The relative difference of the losses of two lines."""
    expected, found = (one.get("lm loss", one.get("lm loss value", -1.0))
                       for one in (stock_line, line))
    return abs(found - expected) / expected
