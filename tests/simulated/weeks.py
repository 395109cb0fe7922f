"""Weeks of a cluster whose links, hosts and switches go bad for minutes: `make sick-weeks`.

Each seed is a week of the log's time with four things that go bad. No task may fail while healthy
free slots exist, and no host without a fault may be taken out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from typing import NamedTuple

from sick_network import SickNetwork

NUM_BAD = 4
INNOCENT_SHARE_MAX = 1e-3
"""Hosts without a fault that may be taken out in a week."""


class Week(NamedTuple):
    """What a seed came to. `stopped`: tasks that have failed, or do not train at the end."""

    seed: int
    stopped: int
    innocent: tuple[str, ...]
    num_experiments: int


def week(seed: int) -> Week:
    """Play one."""
    world = SickNetwork(seed)
    world.draw(NUM_BAD)
    world.week()
    stopped = sum(bool(it.outcome) or it.phase != "training" for it in world.state.tasks.values())
    return Week(seed, stopped, tuple(world.innocent()), world.num_experiments)


def main() -> None:
    """Play all seeds on all cores, print what they came to; 1: a task failed, or too many hosts."""
    parser = argparse.ArgumentParser(prog="make sick-weeks")
    parser.add_argument("--seeds", type=int, default=1000)
    seeds = parser.parse_args().seeds
    began_s, weeks = time.monotonic(), list[Week]()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for played in pool.imap_unordered(week, range(seeds), chunksize=10):
            weeks.append(played)
            if played.stopped or played.innocent:
                print(f"seed {played.seed}: {played.stopped} stopped, {played.innocent} taken out")
            if len(weeks) % 500 == 0:
                print(f"{len(weeks)} of {seeds} weeks", flush=True)
    num_stopped = sum(played.stopped for played in weeks)
    num_innocent = sum(len(played.innocent) for played in weeks)
    print(
        f"{seeds} weeks in {time.monotonic() - began_s:.0f} s: {num_stopped} tasks stopped, "
        f"{num_innocent} hosts without a fault taken out, "
        f"{sum(played.num_experiments for played in weeks)} experiments"
    )
    sys.exit(bool(num_stopped) or num_innocent > INNOCENT_SHARE_MAX * seeds)


if __name__ == "__main__":
    main()
