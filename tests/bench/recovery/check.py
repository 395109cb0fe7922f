"""`make bench-peers-check`: each system of the recovery bench is started once, until it trains.

Prints a line for each, alive or why not; the exit code is 1 if one that was asked for is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.recovery import bare_torch, environment
from bench.recovery.bare_torch import Floor
from bench.recovery.job import NUM_RANKS
from bench.recovery.main import NOT_ASKED, asked_for, interrupt
from bench.recovery.peers import made
from bench.recovery.trial import STILL_S_MAX, NotStarted, System

STEPS_NUM = 2
"""Iterations that every rank makes."""


def main() -> None:
    """Start the systems one after the other."""
    parser = argparse.ArgumentParser(prog="make bench-peers-check")
    options = asked_for(parser)
    os.environ.update(environment.environment(""))
    signal.signal(signal.SIGTERM, interrupt)
    absent = environment.ensure(options.systems, options.nvrx)
    folder = Path(tempfile.mkdtemp(prefix="unicron-bench-"))
    dead = 0
    try:
        for name in options.systems:
            began_s = time.monotonic()
            if name == environment.LAUNCHER and options.nvrx is None:
                word, why = "", NOT_ASKED
            else:
                why = absent.get(name) or why_dead(folder, name)
                word = "DEAD" if why else "alive"
                dead += bool(why)
            took_s = time.monotonic() - began_s
            more = why or ", ".join(
                filter(None, (f"{took_s:.0f} s", environment.told(name, options.nvrx)))
            )
            print(f"{word:5}  {name:20} {more}", flush=True)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(dead))


def why_dead(folder: Path, name: str, still_s: float = STILL_S_MAX) -> str:
    """Start a system, end it as soon as all ranks train; empty if they did."""
    try:
        if name == bare_torch.NAME:
            floor = Floor(folder, "dp4_sigkill", lambda text: None)
            floor.measure()
            return "" if floor.times else floor.rows()[0].note
        trains(made(name, folder / name), still_s)
    except NotStarted as error:
        return str(error)
    return ""


def trains(system: System, still_s: float) -> None:
    """Wait until every rank has made STEPS_NUM iterations, then stop the system by its pids.
    Raises NotStarted if it ends, or if nothing new is in its trace for `still_s`."""
    steps: dict[int, int] = {}
    try:
        system.start()
        for new in system.watch.while_new(still_s):
            for line in new:
                steps[line["rank"]] = steps.get(line["rank"], 0) + (line["event"] == "done")
            if sum(num >= STEPS_NUM for num in steps.values()) == NUM_RANKS:
                return
            if why := system.tend():
                raise NotStarted(why)
        trained = sum(num >= STEPS_NUM for num in steps.values())
        raise NotStarted(
            f"hangs: nothing new in its trace for {still_s:g} s, "
            f"{trained} of {NUM_RANKS} ranks trained; killed"
        )
    finally:
        system.stop()


if __name__ == "__main__":
    main()
