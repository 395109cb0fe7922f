"""Megatron-LM's own pretrain_gpt.py: alone by its own loop, and under agents with a rank killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from real_cluster import RealCluster
from reference import differing, orders, read, tolerance
from unicron.workers.training.model import cpu_device

ITERATIONS, MICRO_BATCHES, STRUCK, VICTIM = 12, 6, 3, 1
LOADED, SAVED, LONG = 4, 32, 34
"""Of a round trip: the iterations after which the agents' job loads and saves, and all of them."""
MOMENTS = ("forward", "backward", "stats", "gate", "norm", "step", "stepped")
NUM_FAULTS, SLOW_S = 3, 8.0
STOCK_CPU_S_MAX, STOCK_STILL_S_MAX = 600.0, 120.0
"""Of a rank in Megatron-LM's own loop: the CPU time in all, and how long it may take none."""
STANDIN = Path(__file__).parents[1] / "megatron_standin"
INSTALLED_AS = {"exports.py": "__init__.py", "batches.py": "utils.py"}
STOCK = Path(__file__).parent / "stock_megatron.py"
OWN_LOOP = Path(__file__).parent / "own_loop_megatron.py"
CONTINUED = re.compile(r"continues from memory\s.*\biteration=(\d+)")
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
VALUE = re.compile(
    r"(lm loss|lm loss value|grad norm|params norm|learning rate|"
    r"load_balancing_loss): +([\d.E+-]+)"
)
"""Not z_loss: Megatron-LM prints that of the last rank's tokens, Unicron the mean."""
Lines = dict[str, dict[str, float]]


def clones() -> list[Path]:
    """The clones of Megatron-LM that UNICRON_MEGATRON_LM names, with colons between them."""
    return [Path(name) for name in os.environ.get("UNICRON_MEGATRON_LM", "").split(":") if name]


def clones_or_skip() -> list[Any]:
    """The same as parameters of a test; without one, a parameter that skips it with the reason."""
    import pytest  # not needed by `make gpu-check`, which uses this file too

    none = pytest.mark.skip("UNICRON_MEGATRON_LM names no clone of Megatron-LM")
    return list(clones()) or [pytest.param(Path("no clone"), marks=none)]


def stand_in(folder: Path) -> Path:
    """Lay the stand-in for a clone of Megatron-LM out in this folder, which is made."""
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    for file in STANDIN.glob("*.py"):
        to = folder if file.name == "pretrain_gpt.py" else training
        shutil.copy(file, to / INSTALLED_AS.get(file.name, file.name))
    return folder


class Fault(NamedTuple):
    """Rank `victim` is killed when it begins `event` of `iteration`."""

    victim: int = VICTIM
    event: str = "backward"
    iteration: int = STRUCK


class Case(NamedTuple):
    """`words`: arguments beside `model`. In fp32 Megatron-LM's own loop trains without them: they
    change no result. `loop`: further keys of the job's loop."""

    slots: int
    parallel: Mapping[str, Any]
    words: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = (Fault(),)
    model: Sequence[str] = WORDS
    loop: Mapping[str, Any] = {}


USUAL = (
    "--sequence-parallel",
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
    "--overlap-grad-reduce",
)
CASES = {
    "DP 3": Case(3, {}),
    "TP 2 x DP 2": Case(4, {"tensor": [2]}),
    "PP 2 x DP 2": Case(4, {"pipeline": [2]}),
    "TP 2 x DP 2, usual flags": Case(4, {"tensor": [2]}, USUAL),
    "PP 2 x DP 2, interleaved": Case(
        4,
        {"pipeline": [2], "chunks": 2},
        ("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"),
    ),
    "TP 2 x DP 2, experts": Case(
        4,
        {"tensor": [2]},
        (
            "--num-experts",
            "4",
            "--moe-router-topk",
            "2",
            "--moe-router-load-balancing-type",
            "aux_loss",
            "--moe-aux-loss-coeff",
            "1e-2",
            "--moe-z-loss-coeff",
            "1e-3",
            "--moe-token-dispatcher-type",
            "alltoall",
            "--sequence-parallel",
            "--disable-bias-linear",
        ),
    ),
}


TRIP = Case(4, {"tensor": [2]}, ("--train-iters", str(LONG)), ())
MANDATORY = Case(
    8,
    {"tensor": [2], "pipeline": [2], "optimizer": "sharded"},
    (
        *TRIP.words,
        *USUAL,
        "--bf16",
        "--accumulate-allreduce-grads-in-fp32",
        "--use-distributed-optimizer",
        "--overlap-param-gather",
    ),
    (),
)
"""The flags of the usual job, over TP 2 x PP 2 x DP 2."""
EXACT = {"reproducible": "required"}
BITWISE = {
    "DP 3": Case(3, {}, loop=EXACT),
    "TP 2 x DP 2, usual job": Case(
        4,
        {"tensor": [2], "optimizer": "sharded"},
        (
            *USUAL,
            "--bf16",
            "--accumulate-allreduce-grads-in-fp32",
            "--use-distributed-optimizer",
            "--overlap-param-gather",
        ),
        loop=EXACT,
    ),
}
"""Trained bit for bit, with a killed rank and on the fewest ranks without a fault."""
EXACT_TRIP = TRIP._replace(loop=EXACT)


DECLINED = {
    "sgd": Case(2, {}, (*TRIP.words, "--optimizer", "sgd")),
    "sgd, TP 2 x DP 2": Case(4, {"tensor": [2]}, (*TRIP.words, "--optimizer", "sgd")),
    "sharded": Case(
        2,
        {"optimizer": "sharded"},
        (
            *TRIP.words,
            "--use-tp-pp-dp-mapping",
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
        ),
    ),
}
"""With these arguments its own loop trains, and restarts from memory."""


class Healed(NamedTuple):
    """What a run with killed ranks printed; its incidents; from each kill to the step; where its
    last state is, of a round trip."""

    lines: Lines
    incidents: list[Any]
    fault_to_step_s: list[float]
    state: Path = Path()

    @property
    def iterations_lost(self) -> int:
        return sum(one.iterations_lost for one in self.incidents)


def printed(text: str) -> Lines:
    """The values of each progress line (by its number) and of each evaluation (by its place)."""
    return {
        found[1] or found[2]: {name: float(value) for name, value in VALUE.findall(line)}
        for line in text.splitlines()
        if (found := LINE.search(line))
    }


def stock(
    clone: Path, case: Case, *words: str, order: Sequence[int] = range(MICRO_BATCHES)
) -> Lines:
    """Train by Megatron-LM's own loop: one replica, as its initial weights depend on the layout.
    `words`: more arguments. Raises CalledProcessError."""
    (tp,), (pp,) = (case.parallel.get(name, [1]) for name in ("tensor", "pipeline"))
    sizes = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable,
        "-P",
        str(STOCK),
        str(clone / "pretrain_gpt.py"),
        *case.model,
        *case.words,
        *sizes,
        *words,
    ]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(tp * pp),
                "MASTER_PORT": str(port),
                "MICRO_BATCHES": " ".join(map(str, order)),
            },
        )
        for rank in range(tp * pp)
    ]
    texts = _texts(ranks)
    for rank, text in zip(ranks, texts, strict=True):
        if rank.returncode:
            raise subprocess.CalledProcessError(rank.returncode, command, text)
    return printed("".join(texts))


def _texts(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each printed, when all have ended. Raises TimeoutExpired if they take more CPU time than
    STOCK_CPU_S_MAX each, or next to none for STOCK_STILL_S_MAX: a loaded machine ends no run."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        told = [pool.submit(lambda rank=rank: rank.communicate()[0]) for rank in ranks]
        each_s, used_s, moved_s = [0.0] * len(ranks), 0.0, time.monotonic()
        try:
            while wait(told, 1.0).not_done:
                each_s = [max(*pair) for pair in zip(each_s, map(_cpu_s, ranks), strict=True)]
                if sum(each_s) > used_s + 1.0:
                    used_s, moved_s = sum(each_s), time.monotonic()
                still_s = time.monotonic() - moved_s
                if max(each_s) > STOCK_CPU_S_MAX or still_s > STOCK_STILL_S_MAX:
                    raise subprocess.TimeoutExpired(ranks[0].args, still_s)
        finally:
            for rank in ranks:
                rank.kill()
        return [text.result() for text in told]


def _cpu_s(rank: subprocess.Popen[str]) -> float:
    """The CPU time that the process has taken; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def job(
    clone: Path, case: Case, output: Path, *words: str, iterations: int = ITERATIONS
) -> dict[str, Any]:
    """The job of this case."""
    return {
        "apiVersion": "unicron/v1",
        "name": "megatron",
        "slots": {"min": min(2, case.slots), "max": case.slots},
        "command": [
            sys.executable,
            "-P",
            "-m",
            "unicron.cli.main",
            "megatron",
            str(clone / "pretrain_gpt.py"),
            *case.model,
            *words,
        ],
        "heal": "in-memory",
        "loop": {
            "micro_batches": MICRO_BATCHES,
            "iterations": iterations,
            "output": str(output),
            "parallel": dict(case.parallel),
            "copy_every": 2,
            **case.loop,
        },
    }


def struck(cluster: RealCluster, clone: Path, case: Case, output: Path) -> Healed:
    """Train under agents, and kill a rank at each fault of the case."""
    after = cluster.seq()
    task = cluster.submit(job(clone, case, output, *case.words))
    return _ended(cluster, task, after, [_strike(cluster, task, fault) for fault in case.faults])


def struck_at_random(
    cluster: RealCluster,
    clone: Path,
    case: Case,
    output: Path,
    draw: random.Random,
    *words: str,
    iterations: int,
) -> Healed:
    """Train under agents, and kill a rank three times at a random moment, each time when all ranks
    are there again. Until then the other ranks train slowly: the run is short. `words`: more
    arguments."""
    after = cluster.seq()
    task = cluster.submit(job(clone, case, output, *case.words, *words, iterations=iterations))
    cluster.wait_traced(task, event="copied")
    took_s: list[float] = []
    slow = _slow(cluster, task, range(case.slots))
    for _ in range(NUM_FAULTS):
        newest = max(line["iteration"] for line in cluster.traced(task) if line["event"] == "done")
        fault = Fault(draw.randrange(case.slots), draw.choice(MOMENTS), newest + draw.randint(2, 3))
        print(fault, flush=True)
        took_s.append(_strike(cluster, task, fault, slow))
        slow = _slow(cluster, task, {*range(case.slots)} - {fault.victim})
        cluster.wait_whole(task, case.slots)
    for hold in slow.values():
        hold.unlink()
    return _ended(cluster, task, after, took_s)


def _slow(cluster: RealCluster, task: int, ranks: Iterable[int]) -> dict[int, Path]:
    """Let these ranks train slowly. Returns the requests, by rank: deleting one ends it."""
    return {
        rank: cluster.hold(task, rank, event="gate", then="slow", slow_s=SLOW_S) for rank in ranks
    }


def _strike(
    cluster: RealCluster, task: int, fault: Fault, slow: Mapping[int, Path] = MappingProxyType({})
) -> float:
    """Kill a rank; returns the seconds from then to the end of the next step: of the iteration that
    it struck, or of the one after if another replica had done that step. `slow`: ranks that train
    slowly until the victim is to be held, so that the iteration is still to come."""
    begun_s = time.time()
    cluster.hold(task, fault.victim, event=fault.event, iteration=fault.iteration)
    for rank, hold in slow.items():
        if rank != fault.victim:  # its request is another one now
            hold.unlink()
    held = cluster.wait_held(task, fault.victim, begun_s)
    cluster.hold(task, fault.victim, event="forward", iteration=-1)
    killed_s = time.time()
    os.kill(held["pid"], signal.SIGKILL)
    line = cluster.wait(
        lambda: next(
            (
                line
                for line in cluster.traced(task)
                if line["event"] == "done"
                and line["iteration"] >= fault.iteration
                and line["generation"] > held["generation"]
            ),
            None,
        ),
        f"a step follows {fault}",
    )
    return float(line["t"]) - killed_s


def _ended(cluster: RealCluster, task: int, after: int, took_s: list[float]) -> Healed:
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    closed = [record.body for record in cluster.told(after, "IncidentClosed")]
    assert len(closed) == len(took_s), cluster.tail(after)
    text = "".join(
        log.read_text()
        for log in sorted(
            cluster.state.logs.glob(f"{task}-*/*.log"), key=lambda log: log.stat().st_mtime
        )
    )
    return Healed(printed(text), closed, took_s)


class Restarted(NamedTuple):
    """A run whose processes started again together: what was printed, and by the second processes;
    the report that it declined; its incidents; the iterations with which each continued."""

    lines: Lines
    again: Lines
    declined: Any
    incidents: list[Any]
    continued: list[int]


def restarted(
    cluster: RealCluster, clone: Path, case: Case, output: Path, *words: str
) -> Restarted:
    """Train under agents by Megatron-LM's own loop, and kill a rank two iterations after its state
    was stored."""
    after = cluster.seq()
    spec = job(clone, case, output, *case.words, *words, iterations=LONG)
    spec["command"][1:5] = [str(OWN_LOOP)]
    spec["slots"]["min"] = case.slots
    task = cluster.submit(spec)
    declined = cluster.wait_told(after, "InMemoryRecoveryDeclined", task=task).body
    stored: Any = cluster.wait_told(after, "MemoryCheckpointStored", task=task).body
    cluster.wait(
        lambda: str(stored.step_version + 2) in _printed_by(cluster, task, 1) or None,
        "the loop trains",
    )
    started: Any = cluster.wait_told(after, "RankStarted", task=task, rank=VICTIM).body
    os.kill(started.pid, signal.SIGKILL)
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    again = _printed_by(cluster, task, 2)
    _unsum(again)
    return Restarted(
        _printed_by(cluster, task, 1) | again,
        again,
        declined,
        [record.body for record in cluster.told(after, "IncidentClosed")],
        [int(found[1]) for found in CONTINUED.finditer(_logs(cluster, task, 2))],
    )


def _printed_by(cluster: RealCluster, task: int, attempt: int) -> Lines:
    return printed(_logs(cluster, task, attempt))


def _logs(cluster: RealCluster, task: int, attempt: int) -> str:
    return "".join(
        log.read_text() for log in cluster.state.logs.glob(f"{task}-*/*.attempt-{attempt}.log")
    )


def _unsum(lines: Lines) -> None:
    """Megatron-LM's second line after a start is the mean of two iterations: it does not start its
    sums anew after one."""
    first = min(int(place) for place in lines if place.isdecimal())
    second = lines[str(first + 1)]
    second["lm loss"] = 2 * second["lm loss"] - lines[str(first)]["lm loss"]


def round_trip(
    cluster: RealCluster, clone: Path, case: Case, folder: Path, draw: random.Random
) -> Healed:
    """Train by Megatron-LM's own loop, which saves; continue its checkpoint under agents, which
    heal three faults and save; continue theirs by its own loop, which saves. The lines are those of
    all three."""
    before, between = str(folder / "before"), str(folder / "between")
    first = stock(
        clone, case, "--save", before, "--save-interval", str(LONG), "--exit-interval", str(LOADED)
    )
    healed = struck_at_random(
        cluster,
        clone,
        case,
        folder / "out",
        draw,
        "--load",
        before,
        "--save",
        between,
        "--save-interval",
        "8",
        "--exit-interval",
        str(SAVED),
        iterations=SAVED,
    )
    last = stock(clone, case, "--load", between, *saving(folder / "last"))
    assert min(map(int, filter(str.isdecimal, last))) == SAVED + 1, last
    _unsum(last)
    return healed._replace(lines=first | healed.lines | last, state=folder / "last")


def bits_of(
    cluster: RealCluster, clone: Path, case: Case, folder: Path
) -> tuple[Healed, list[str]]:
    """Train a case of BITWISE through its faults, and without any on the fewest ranks. Returns the
    first run, and the tensors of the two last states that are not equal bit for bit."""
    healed = struck(cluster, clone, case, folder / "struck")
    struck(cluster, clone, _calm(case), folder / "calm")
    return healed, _differing(folder)


def bits_of_round_trip(
    cluster: RealCluster, clone: Path, case: Case, folder: Path, draw: random.Random
) -> tuple[Healed, list[str]]:
    """The same from a checkpoint that Megatron-LM's own loop saves, with three random faults."""
    before = str(folder / "before")
    stock(
        clone, case, "--save", before, "--save-interval", str(LONG), "--exit-interval", str(LOADED)
    )
    words = ("--load", before, "--exit-interval", str(SAVED))
    healed = struck_at_random(
        cluster, clone, case, folder / "struck", draw, *words, iterations=SAVED
    )
    calm, after = _calm(case), cluster.seq()
    _ended(
        cluster,
        cluster.submit(job(clone, calm, folder / "calm", *calm.words, *words, iterations=SAVED)),
        after,
        [],
    )
    return healed, _differing(folder)


def _calm(case: Case) -> Case:
    return case._replace(slots=max(case.parallel.get("tensor", [1])), faults=())


def _differing(folder: Path) -> list[str]:
    return differing(*(read(folder / run / "latest") for run in ("struck", "calm")))


def saving(folder: Path) -> list[str]:
    """Arguments of Megatron-LM's own loop to save its last state in `folder`, by parameter."""
    return [
        "--save",
        str(folder),
        "--save-interval",
        str(LONG),
        "--dist-ckpt-optim-fully-reshardable",
    ]


class Compared(NamedTuple):
    """The losses of one run of Megatron-LM's own loop and of another run. The noise is the worst
    relative difference between three orders of summing, for losses, masters and moments."""

    expected: Lines
    found: Lines
    noise: tuple[float, float, float]
    gaps: tuple[float, float, float]
    """The largest relative differences of the other run."""

    @property
    def equal(self) -> bool:
        return {*self.expected} == {*self.found} and all(
            gap <= tolerance([noise]) for gap, noise in zip(self.gaps, self.noise, strict=True)
        )

    def table(self) -> str:
        """A line for each printed loss, then what counts as equal."""
        lines = [f"{'':36} {'Megatron-LM':>12} {'Unicron':>12} {'difference':>11}"]
        for place, line in self.expected.items():
            found = self.found[place]
            lines.append(
                f"{place:36} {_loss(line):12.6f} {_loss(found):12.6f} {loss_rel(line, found):11.1e}"
            )
        lines.append(f"{'':36} {'three orders':>12} {'tolerance':>12} {'difference':>11}")
        for name, noise, gap in zip(
            ("losses", "masters", "moments"), self.noise, self.gaps, strict=True
        ):
            lines.append(f"{name:36} {noise:12.1e} {tolerance([noise]):12.1e} {gap:11.1e}")
        return "\n".join(lines)


def compared(clone: Path, case: Case, folder: Path, trip: Healed) -> Compared:
    """Compare the losses and the last state of a round trip with Megatron-LM's own loop."""
    runs, states = [], []
    for number, order in enumerate(orders(MICRO_BATCHES)):
        runs.append(stock(clone, case, *saving(folder / f"{number}"), order=order))
        states.append(_state(folder / f"{number}"))
    noises = [
        _gaps(runs[0], lines, states[0], other)
        for lines, other in zip(runs[1:], states[1:], strict=True)
    ]
    losses, masters, moments = (max(values) for values in zip(*noises, strict=True))
    return Compared(
        runs[0],
        trip.lines,
        (losses, masters, moments),
        _gaps(runs[0], trip.lines, states[0], _state(trip.state)),
    )


def _state(folder: Path) -> dict[str, Any]:
    """The optimizer's tensors of the newest checkpoint of Megatron-LM in `folder`."""
    with cpu_device.uncompiled():
        from stored_tensors import whole_tensor
        from unicron.workers.training.checkpoint.stored_state import StoredState
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    stored = StoredState(str(folder / f"iter_{iteration:07d}"))
    return {
        key: whole_tensor(stored, key).double()
        for key in sorted(stored.kinds)
        if key.startswith("optimizer.state.")
    }


def _gaps(
    expected: Lines, lines: Lines, state: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[float, float, float]:
    assert {*state} == {*other}
    masters, *moments = (
        [key for key in state if key.startswith(f"optimizer.state.{kind}.")]
        for kind in ("param", "exp_avg", "exp_avg_sq")
    )
    return (
        max(loss_rel(line, lines[place]) for place, line in expected.items()),
        _norm_rel(masters, state, other),
        max(_norm_rel(keys, state, other) for keys in moments),
    )


def _norm_rel(keys: Sequence[str], state: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """|a - b| / |b| of these tensors as one vector."""
    assert keys
    above, below = (
        sum(float(tensor.square().sum()) for tensor in tensors)
        for tensors in ([other[key] - state[key] for key in keys], [state[key] for key in keys])
    )
    return float((above / below) ** 0.5)


def unequal(stock_lines: Lines, lines: Lines) -> list[str]:
    """The lines whose losses differ, or that only one of the two printed."""
    return [
        place
        for place in sorted({*stock_lines, *lines})
        if place not in lines
        or place not in stock_lines
        or loss_rel(stock_lines[place], lines[place]) > REL
    ]


def loss_rel(stock_line: Mapping[str, float], line: Mapping[str, float]) -> float:
    """The relative difference of the losses of two lines."""
    return abs(_loss(line) - _loss(stock_line)) / _loss(stock_line)


def _loss(line: Mapping[str, float]) -> float:
    return line.get("lm loss", line.get("lm loss value", -1.0))
