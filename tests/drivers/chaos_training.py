"""One long training run with random faults, compared with an undisturbed reference run.

`make chaos-training ROUNDS=100 SEED=4`: real processes, three nodes of two slots, a GPT on four
ranks, ten iterations per fault. The exit code is 1 if losses or parameters differ from the
reference run, an iteration was lost, or a checkpoint was read. PICTURE=docs writes the figure of
README; then `make figures` writes its caption.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import chaos_picture
from bench.recovery.rows import stamp
from chaos_faults import Striker, draw
from nursery import Nursery
from rank_twin import Twin
from real_cluster import RealCluster, running
from reference import NOISE_TIMES_MAX, read, tolerance
from unicron.control_plane.history.history import History, history
from unicron.events.records.codec import from_plain
from unicron.events.spec.job import parse

FOLDER = Path("build/chaos-training")
FIGURES = Path("build/bench/chaos-training.json")
EXACT_FIGURES = FIGURES.with_stem("chaos-training-bitwise")
ITERATIONS_PER_FAULT = 10
NODES_NUM, RANKS_NUM = 3, 4
POLICY = {"silence_s_max": 2.0, "stopped_s_max": 1.0, "replace_after_s": 10.0, "restarts_max": 1000}
"""Limits high enough that this many faults do not disable a slot."""
TWIN_S_MAX = 7200.0
STALLED_S_MAX = 300.0
TOLD_ITERATIONS = 100


class Struck(NamedTuple):
    """A fault that was injected, and when (seconds since 1970)."""

    kind: str
    iteration: int
    at_s: float


class Run:
    """The training run and its faults."""

    def __init__(self, cluster: RealCluster, seed: int, rounds: int, *, is_exact: bool) -> None:
        self.cluster = cluster
        self.iterations = rounds * ITERATIONS_PER_FAULT
        self.spec = _spec(cluster.path / "out", self.iterations)
        if is_exact:
            self.spec["train"]["reproducible"] = "bitwise"
        self.script = draw(seed, rounds, self.iterations)
        self.faults: list[Struck] = []
        self.load = 0.0
        """Load average of the machine over five minutes, at the end of the training."""
        self.began_s = time.monotonic()
        self.task = cluster.submit(self.spec)
        self.striker = Striker(cluster, self.task)

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began_s:7.1f} s  {what}", flush=True)

    def train(self) -> None:
        """Train to the last iteration, through all faults."""
        self.cluster.wait_whole(self.task, RANKS_NUM)
        for number, fault in enumerate(self.script, 1):
            self._until(fault.iteration)
            time.sleep(fault.delay_s)
            done = self.striker.strike(fault)
            self.faults.append(Struck(fault.kind, self.striker.iteration(), time.time()))
            self.say(
                f"fault {number}/{len(self.script)}, iteration {self.faults[-1].iteration}: "
                f"{fault.kind}, {done}"
            )
        self._until(self.iterations)
        self.load = os.getloadavg()[1]
        self.say("all iterations done")

    def _until(self, iteration: int) -> None:
        """Wait until the task reaches this iteration; for the last one, until it has finished."""
        newest, changed_s = -1, time.monotonic()
        while self.striker.look().get("state") not in ("failed", "cancelled"):
            self.striker.bring_back()
            now = self.striker.iteration()
            if iteration == self.iterations:
                if self.striker.view["state"] == "finished":
                    return
            elif now >= iteration:
                return
            if now > newest:
                if now // TOLD_ITERATIONS > newest // TOLD_ITERATIONS:
                    self.say(f"iteration {now} of {self.iterations}")
                newest, changed_s = now, time.monotonic()
            assert time.monotonic() - changed_s < STALLED_S_MAX, self._tail()
            time.sleep(0.02)
        raise AssertionError(self._tail())

    def recoveries(self) -> dict[str, list[float]]:
        """By kind of fault, seconds until the first step in a generation after the fault's.

        Recomputed work is included. A fault of the control plane starts no generation and is left
        out.
        """
        steps = [
            (float(line["t"]), int(line["generation"]))
            for line in self.cluster.traced(self.task)
            if line["event"] == "done"
        ]
        found: dict[str, list[float]] = {}
        for fault in self.faults:
            last = max((generation for at_s, generation in steps if at_s < fault.at_s), default=0)
            after = [at_s for at_s, generation in steps if generation > last]
            if fault.kind != "control plane killed" and after:
                found.setdefault(fault.kind, []).append(after[0] - fault.at_s)
        return found

    def _tail(self) -> str:
        self.cluster.records()
        return f"{self.striker.view}\n{self.cluster.tail(max(0, self.cluster.seq() - 60))}"


def main() -> None:
    """Train, inject faults, compare, draw."""
    options = _asked()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(
        f"seed {options.seed}: {options.rounds} faults in "
        f"{options.rounds * ITERATIONS_PER_FAULT} iterations"
    )
    with running(FOLDER.resolve(), NODES_NUM, POLICY) as cluster:
        run = Run(cluster, options.seed, options.rounds, is_exact=options.exact)
        run.train()
        losses = cluster.losses(run.task)
        past = history(map(from_plain, cluster.client().records(0, follow=False)))
        cluster.verify()
        run.say("every decision made again from the log: VERIFIED")
    lasted_s = time.monotonic() - run.began_s
    run.say("the twin trains undisturbed, in several orders of summing")
    nursery = Nursery(FOLDER / "zygote.log")
    try:
        twin = Twin(parse(run.spec), FOLDER / "twin", nursery, TWIN_S_MAX)
    finally:
        nursery.close()
    sys.exit(_judge(run, losses, past, twin, lasted_s, options.picture))


def _judge(
    run: Run, losses: list[float], past: History, twin: Twin, lasted_s: float, picture: Path
) -> int:
    """Print the result, write numbers and figure; return the exit code."""
    final = (Path(run.spec["train"]["output"]) / "latest").resolve()
    gap = twin.difference(final)
    calm = [
        list(read(twin.path.parents[1] / str(order) / "final")["numbers.losses"])
        for order in (0, 1)
    ]
    loss_rel = max(abs(one - two) / two for one, two in zip(losses, calm[0], strict=True))
    closed = [one for one in past.incidents.values() if one.closed_s is not None]
    recoveries = run.recoveries()
    lasted = [took_s for kind in recoveries.values() for took_s in kind] or [math.nan]
    figures: dict[str, tuple[float, str]] = {
        "iterations": (len(losses), ""),
        "faults": (len(run.faults), ""),
        "incidents": (len(past.incidents), ""),
        "iterations_lost": (sum(one.incident.iterations_lost or 0 for one in closed), ""),
        "checkpoints_read": (sum(one.incident.ckpt_read for one in closed), ""),
        "loss_gap": (max(loss_rel, gap.loss_rel), "relative"),
        "loss_noise": (twin.noise[0], "relative"),
        "parameter_gap": (gap.param_rel, "relative"),
        "parameter_noise": (twin.noise[1], "relative"),
        "fault_to_step_median": (statistics.median(lasted), "s"),
        "fault_to_step_max": (max(lasted), "s"),
        "lasted": (lasted_s, "s"),
        "load": (run.load, f"on {os.cpu_count()} cores"),
    }
    loss_rel_max = 0.0 if twin.is_exact else tolerance([twin.noise[0]])
    equal = (
        twin.allows(gap)
        and loss_rel <= loss_rel_max
        and len(losses) == run.iterations
        and not figures["iterations_lost"][0]
        and not figures["checkpoints_read"][0]
    )
    print()
    for kind, num in Counter(fault.kind for fault in run.faults).items():
        took = recoveries.get(kind, [])
        print(
            f"  {kind:24} {num:4}"
            + (
                f"  fault to step: median {statistics.median(took):.2f} s, max {max(took):.2f} s"
                if took
                else ""
            )
        )
    for name, (value, unit) in figures.items():
        print(f"  {name.replace('_', ' '):24} {value:.4g} {unit}".rstrip())
    print(
        "  tolerance                "
        + (
            "none: bit for bit"
            if twin.is_exact
            else f"{NOISE_TIMES_MAX} x the noise of summing in another order"
        )
    )
    print("EQUAL" if equal else "NOT EQUAL")
    _write(run, EXACT_FIGURES if twin.is_exact else FIGURES, figures, equal, picture)
    picture.mkdir(parents=True, exist_ok=True)
    files = [picture / f"chaos-training.{ending}" for ending in ("svg", "png")]
    chaos_picture.draw(
        chaos_picture.Curves(
            losses, calm[0], calm[1], [(fault.kind, fault.iteration) for fault in run.faults]
        ),
        f"{len(losses)} iterations through {len(run.faults)} faults",
        files,
    )
    print("picture:", *files)
    return 0 if equal else 1


def _write(
    run: Run, file: Path, figures: dict[str, tuple[float, str]], equal: bool, picture: Path
) -> None:
    """Write the rows. For README's figure, also write the caption for `make figures`."""
    case = f"chaos, {len(run.faults)} faults"
    rows: list[dict[str, Any]] = [
        {"case": case, "system": "unicron", "metric": name, "value": value, "unit": unit, "n": 1}
        for name, (value, unit) in {**figures, "equal": (int(equal), "")}.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")
    stamp(file, {"text": _caption(run, figures, equal)} if picture == Path("docs") else {})


def _caption(run: Run, figures: dict[str, tuple[float, str]], equal: bool) -> str:
    """A description of the run in words."""
    kinds = Counter(fault.kind for fault in run.faults)
    number = {name: f"{value:.2g}" for name, (value, _) in figures.items()}
    return (
        f"One training of {run.iterations} iterations on four ranks, and the same without a fault: "
        f"{len(run.faults)} faults drawn at random "
        f"({', '.join(f'{num} x {kind}' for kind, num in kinds.items())}), "
        f"{number['iterations_lost']} iterations lost, {number['checkpoints_read']} checkpoints "
        f"read. Largest relative difference of a loss {number['loss_gap']}, of the parameters "
        f"{number['parameter_gap']}; summing the same micro-batches in another order changes them "
        f"by {number['loss_noise']} and {number['parameter_noise']} (at least one rounding of "
        f"fp32): {'equal' if equal else 'NOT EQUAL'} within {NOISE_TIMES_MAX} times that. From "
        "fault to "
        f"next step: median {number['fault_to_step_median']} s, longest "
        f"{number['fault_to_step_max']} s, with all that it waits for (a stopped rank is given "
        f"{POLICY['stopped_s_max']:g} s, a silent node {POLICY['silence_s_max']:g} s) and all that "
        f"is done again, on {os.cpu_count()} cores under a load of {run.load:.0f}. "
        "`make chaos-training`"
    )


def _spec(output: Path, iterations: int) -> dict[str, Any]:
    return {
        "apiVersion": "unicron/v1",
        "name": "chaos",
        "slots": {"min": 1, "max": RANKS_NUM},
        "train": {
            "model": {
                "num_layers": 2,
                "hidden": 128,
                "num_heads": 4,
                "sequence": 64,
                "dropout": 0.1,
            },
            "batch": {"global": 24, "micro": 2},
            "iterations": iterations,
            "seed": 7,
            "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_iterations": 20},
            "checkpoint_every": 100,
            "output": str(output),
        },
    }


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos-training")
    parser.add_argument("--rounds", type=int, default=100, help="how many faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--picture", type=Path, default=FOLDER, help="the folder for the picture")
    parser.add_argument(
        "--exact", action="store_true", help="with reproducible: bitwise, where no bit may differ"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        options.picture.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--picture {options.picture}: {error.strerror}")
    return options


if __name__ == "__main__":
    main()
