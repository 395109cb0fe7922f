"""Runs of a simulation, as many at once as there are cores; what comes of them is the same."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from typing import NamedTuple

import typer

from .. import __version__
from ..control_plane.simulation.policy import Policy
from ..control_plane.simulation.run import Ground, Outcome, Run
from ..events import archive


class Stage(NamedTuple):
    """What is played; `log`: into which file, of which cluster."""

    policy: Policy
    ground: Ground
    log: Path | None = None
    cluster: str = ""


class Played(NamedTuple):
    """What came of it."""

    outcome: Outcome
    num_records: int
    took_s: float


_stages: Sequence[Stage] = ()
"""Of the call that goes on: its processes are forks, a policy's functions need not be sent."""


def play(stages: Sequence[Stage]) -> list[Played]:
    """Each of them, in this order. A bar on stderr shows how far it is, on a terminal."""
    global _stages
    num = min(len(os.sched_getaffinity(0)), len(stages))
    with ExitStack() as stack:
        bar = stack.enter_context(typer.progressbar(
            length=len(stages), label="simulating", file=sys.stderr, width=0,
            hidden=not sys.stderr.isatty()))
        found: list[Played] = []
        _stages = stages
        pool = None if num < 2 else stack.enter_context(ProcessPoolExecutor(
            num, mp_context=get_context("fork"), initializer=signal,
            initargs=(SIGINT, SIG_DFL)))
        each = map(_play, range(len(stages))) if pool is None else pool.map(
            _play, range(len(stages)))
        for one in each:
            found.append(one)
            bar.update(1)
        return found


def _play(number: int) -> Played:
    stage = _stages[number]
    began_s = time.perf_counter()
    with ExitStack() as stack:
        writer = None if stage.log is None else stack.enter_context(archive.create(
            stage.log, cluster=stage.cluster, code=__version__))
        run = Run(stage.ground, stage.policy, writer.add if writer else None)
        outcome = run.play()
    return Played(outcome, run.engine.num_records, time.perf_counter() - began_s)
