"""Runs simulations on all cores, each seed one cluster's life in virtual time; prints counts."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import structlog
from simulated import virtual_time
from simulated.checks import check
from simulated.world import World
from unicron.events.records.envelope import Record

AnyWorld = TypeVar("AnyWorld", bound=World)
NUM_FAILED_MAX = 5
"""Seeds that are printed with their traceback; the others only by number."""


def quiet() -> None:
    """Suppress log messages: thousands of leaders would each log that they lead."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def simulate(make: Callable[[], AnyWorld], again: str = "") -> tuple[AnyWorld, list[Record]]:
    """Run one world and check its log. On failure, print the faults that happened in it."""

    async def live() -> tuple[AnyWorld, list[Record]]:
        world = make()
        try:
            records = await world.live()
            check(world, records)
        except BaseException:
            print(f"seed {world.seed}:", *world.faults, sep="\n  ")
            print(f"again, alone: {again or f'make simulation ONLY={world.seed}'}")
            raise
        return world, records

    return virtual_time.run(live())


def counts_of(world: World) -> Counter[str]:
    """All counters of one world, by "group: name"."""
    found = Counter({f"fault: {name}": num for name, num in world.counts.items()})
    for name in (
        "records",
        "decisions verified",
        "models exact",
        "virtual s",
        "requests",
        "tasks too large",
    ):
        found[name] = found.pop(f"fault: {name}", 0)
    found += world.witness.counts
    found += Counter({f"row: {row}": num for row, num in world.witness.rows.items()})
    for (row, fault), num in world.witness.hits.items():
        found[f"struck at: {row} by {fault}"] += num
    found["leaders"] = world.num_leaders
    return found


def _one(seed: int) -> tuple[int, Counter[str], str]:
    quiet()
    try:
        return seed, counts_of(simulate(lambda: World(seed))[0]), ""
    except BaseException:  # noqa: BLE001 - the parent process prints every failure with its seed
        return seed, Counter(), traceback.format_exc()


def _told(counts: Counter[str], num_seeds: int, wall_s: float) -> None:
    hours = counts.pop("virtual s", 0) / 3600
    print(f"{num_seeds} seeds in {wall_s:.0f} s, {hours:.1f} virtual hours")
    for name in sorted(counts, key=lambda name: (":" in name, name)):
        print(f"  {counts[name]:>9}  {name}")


def main() -> int:
    """Exit status: 0 when every seed passes."""
    asks = argparse.ArgumentParser(description=__doc__)
    asks.add_argument("--seeds", type=int, default=2000, help="how many seeds")
    asks.add_argument("--first", type=int, default=0, help="the first seed")
    asks.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    asks.add_argument("--only", type=int, help="this seed alone, with all it says")
    options = asks.parse_args()
    if options.only is not None:
        quiet()
        world, records = simulate(lambda: World(options.only))
        print(*world.faults, sep="\n")
        print(f"seed {options.only} holds: {len(records)} records")
        return 0
    begin_s, total, failed = time.monotonic(), Counter[str](), list[int]()
    with multiprocessing.Pool(options.jobs) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for seed, counts, problem in pool.imap_unordered(_one, seeds, chunksize=4):
            total += counts
            if problem:
                failed.append(seed)
                if len(failed) <= NUM_FAILED_MAX:
                    print(f"seed {seed} failed:\n{problem}", flush=True)
    _told(total, options.seeds, time.monotonic() - begin_s)
    print(f"failed: {sorted(failed)}" if failed else "every seed holds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
