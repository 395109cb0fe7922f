"""`make demo`: two real tasks on three nodes, several faults, and the proof that nothing was lost.

It does what a user does (`up`, `submit`, `kill -9`, `cancel`, `tail`, `export`, `replay`) and
measures the effects. Read it, `acts`, then `stage`, `proof` and `twins`.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from importlib import metadata
from pathlib import Path
from shlex import quote

import msgspec
from unicron import __version__
from unicron.cli.cluster.state_dir import shown
from unicron.cli.commands import up
from unicron.cli.files import job_file
from unicron.cli.terminal import console
from unicron.cli.terminal.format import lost_in_words
from unicron.events.errors import UnicronError, UsageError
from unicron.events.words import install

from . import acts, proof
from .acts import Player
from .stage import BrokenError, Stage
from .twins import ReferenceRuns

FOLDER = Path("build") / "demo"
EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
NUM_SLOTS = {"alpha": 4, "beta": 2, "gamma": 2}
"""The slots of each task in a plan with six slots."""
NUM_CORES = 2
KEPT_ITERATIONS = 100_000
CHECKPOINT_EVERY_NUM = 8
"""Iterations between two checkpoints. After each fault one is compared with the reference runs; no
recovery of the demo reads a checkpoint."""


def demo(*, keep: bool, num_iterations: int, exact: bool = False) -> int:
    """Run the demo, bit for bit with `exact`; 0 if every check passed. Raises UsageError before it
    starts a process."""
    _check()
    players = [_player(name, num_iterations, exact=exact) for name in NUM_SLOTS]
    stage = Stage(FOLDER)
    kept = False
    stage.open()
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        _run(stage, *players)
        kept = keep
    except BrokenError as error:
        stage.promise(False, str(error))
    finally:
        stage.close(keep=kept)
    return _end(stage, players[0], keep=kept)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _check() -> None:
    for package in ("torch", "megatron-core"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            raise UsageError(
                f"{package} is not installed", f"make setup, or {install('train')}"
            ) from None


def _player(name: str, num_iterations: int, *, exact: bool = False) -> Player:
    """The example's task, with its output in the demo's folder and alpha's length as given."""
    spec = job_file.load(EXAMPLES / f"demo-{name}.yaml")
    assert spec.train is not None
    train = msgspec.structs.replace(
        spec.train,
        output=str((FOLDER / name).absolute()),
        checkpoint_every=CHECKPOINT_EVERY_NUM,
        checkpoint_keep="all",  # each is compared
        reproducible="bitwise" if exact else "rounding",
    )
    if name == "alpha":
        train = msgspec.structs.replace(train, iterations=num_iterations)
    return Player(spec=msgspec.structs.replace(spec, train=train), num_slots=NUM_SLOTS[name])


def _run(stage: Stage, alpha: Player, beta: Player, gamma: Player) -> None:
    cores = _take_cores()
    stage.say(
        "setup",
        f"unicron {__version__}, Python {platform.python_version()}, torch "
        f"{metadata.version('torch')}, megatron-core "
        f"{metadata.version('megatron-core')}, {cores}",
    )
    stage.say("expect", f"one to two minutes if {NUM_CORES} cores are idle, up to ten if not")
    stage.start()
    place = quote(shown(stage.state.path))
    stage.say("look", f"second terminal: .venv/bin/unicron status -w --state {place}")
    stage.note(None, f"                 .venv/bin/unicron tail -f --state {place}")
    acts.start(stage, alpha, beta)
    acts.kill_rank(stage, alpha)
    acts.kill_control_plane(stage, [alpha, beta])
    acts.lose_node(stage, alpha, beta)
    acts.return_node(stage, [alpha, beta])
    acts.urgent(stage, gamma, [alpha, beta])
    acts.cancel(stage, beta)
    acts.finish(stage, alpha)
    proof.timeline(stage)
    proof.waf(stage)
    for player in (alpha, beta):
        proof.loss(stage, player.task)
    proof.verify(stage, proof.export(stage, "log.jsonl"))
    runs = ReferenceRuns(stage, [alpha, beta])
    try:
        runs.run()
    finally:
        runs.stop()


def _take_cores() -> str:
    """Run on two cores even if there are more, so that the timing is similar everywhere."""
    if not hasattr(os, "sched_setaffinity"):
        return f"{os.cpu_count()} cores"
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, usable[:NUM_CORES])
    return f"{min(NUM_CORES, len(usable))} of {len(usable)} cores"


def _end(stage: Stage, alpha: Player, *, keep: bool) -> int:
    incidents = stage.history.incidents.values()
    lost = sum(one.lost for one in stage.transitions())
    read = sum(one.incident.ckpt_read for one in incidents)
    promised = "" if not stage.broken else "; NOT as promised"
    stage.say(
        "total",
        f"{stage.elapsed_s:.0f} s, {stage.num_kills} kills, "
        f"{lost_in_words(lost)}, {read} checkpoints read{promised}",
    )
    for what in stage.broken:
        stage.note(None, f"broken: {what}")
    place = quote(shown(stage.state.path))
    if keep:
        _leave(stage, alpha)
    else:
        stage.say("next", "make demo KEEP=1 (break it yourself)")
        stage.note(None, f".venv/bin/unicron model generate {place}/alpha --prompt 'The '")
        newest = max((one.id for one in incidents), default=0)
        if newest:
            stage.note(None, f".venv/bin/unicron replay {place}/log.jsonl --incident {newest}")
    return int(bool(stage.broken))


def _leave(stage: Stage, alpha: Player) -> None:
    """Submit a task that keeps training, and leave `up` running."""
    output = str((FOLDER / "yours").absolute())
    train = msgspec.structs.replace(
        alpha.train, iterations=KEPT_ITERATIONS, output=output, checkpoint_every=0
    )
    spec = msgspec.structs.replace(alpha.spec, name="yours", train=train)
    stage.client.post("/v1/tasks", msgspec.to_builtins(spec, str_keys=True))
    place = quote(shown(stage.state.path))
    up.up(stage.state, up.UpOptions(), detach=True)
    stage.say("yours", f"a task that trains on, {KEPT_ITERATIONS:,} iterations; break it yourself:")
    stage.note(
        None,
        f".venv/bin/unicron status yours --state {place}     then kill -9 any pid that you see",
    )
    stage.note(None, f".venv/bin/unicron incident --state {place}         what it cost, and why")
    console.talk(f"hint: .venv/bin/unicron down --state {place} ends it")


def main() -> int:
    """Run it; 2 if it cannot start, 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="make demo")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    parser.add_argument(
        "--iterations",
        type=int,
        default=128,
        metavar="N",
        help="of the task that finishes, at least 100",
    )
    parser.add_argument(
        "--exact", action="store_true", help="with reproducible: bitwise, where no bit may differ"
    )
    options = parser.parse_args()
    if options.iterations < 100:
        print(
            "error: ITERATIONS must be at least 100: the faults need so many\n"
            "hint: make demo ITERATIONS=128",
            file=sys.stderr,
        )
        return 2
    try:
        return demo(keep=options.keep, num_iterations=options.iterations, exact=options.exact)
    except UnicronError as error:
        console.error(str(error), error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
