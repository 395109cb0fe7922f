"""The virtual environment of the log bench, build/bench-log: the `eventsourcing` library."""

from __future__ import annotations

import json
import subprocess
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bench.environment import ROOT, lay, pip
from bench.log.records import Life
from bench.log.sealed import BATCH_RECORDS_NUM
from unicron.events.records.codec import to_plain

PLACE = ROOT / "build" / "bench-log"
PYTHON = PLACE / "venv" / "bin" / "python"
PINS = (ROOT / "constraints.txt", Path(__file__).with_name("constraints-log.txt"))
PACKAGE = "eventsourcing"
NUM_RECORDS = 100_000
"""It holds a whole aggregate in memory."""
RUN_S_MAX = 3600.0


def ensure() -> None:
    """Build the environment if missing or outdated by its pins. Raises CalledProcessError."""
    lay(PLACE, PINS, PACKAGE, lambda: pip(PLACE, PINS, PACKAGE))


def version() -> str:
    """The version that is measured."""
    return subprocess.run(
        [str(PYTHON), "-c", f"import importlib.metadata as m; print(m.version('{PACKAGE}'))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def measured(folder: Path, num: int = NUM_RECORDS) -> dict[str, Any]:
    """What peer.py prints for the first `num` records of a cluster's life."""
    records = folder / "records.jsonl"
    with records.open("w") as file:
        for one in islice(chain.from_iterable(Life().turns()), num):
            file.write(json.dumps(to_plain(one)) + "\n")
    done = subprocess.run(
        [
            str(PYTHON),
            "-P",
            str(Path(__file__).with_name("peer.py")),
            str(records),
            str(folder),
            str(BATCH_RECORDS_NUM),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S_MAX,
    )
    if done.returncode:
        raise RuntimeError(f"{PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout))
