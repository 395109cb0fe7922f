"""Writes a release's golden log: a seeded simulation, run by the code of the release's commit.

`make golden-log COMMIT=60f2d2b` writes two files into tests/golden. release-VERSION.jsonl is an
exported log whose header names seed and commit. release-VERSION-states.json has some states that
the same code folded, by seq. The commit's own tests/simulated runs, on the present interpreter.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SEEDS = range(30)
NUM_RECORDS_MAX = 400
"""A longer log would only be a larger file."""
NUM_STATES = 5
RUN_S_MAX = 600


def main(commit: str) -> None:
    """Unpack the commit, and run this file with the packages of that tree."""
    commit = _git("rev-parse", "--short=7", f"{commit}^{{commit}}").decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-P", __file__, commit, "here"],
            check=True,
            env=unpack(commit, Path(folder)),
            cwd=folder,
            timeout=RUN_S_MAX,
        )


def unpack(commit: str, folder: Path) -> dict[str, str]:
    """Unpack a commit of the history; the environment of programs that run its code and tests.
    Raises CalledProcessError if the clone does not have it."""
    tree = folder / "unicron"
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as packed:
        packed.extractall(tree, filter="data")
    path = os.pathsep.join(map(str, (folder, tree / "tests", tree / "tests" / "drivers")))
    return {**os.environ, "PYTHONPATH": path}


def write(commit: str) -> None:
    """Write the log of the seed that has the most kinds of records, and its states."""
    import msgspec
    from simulated.seeds import quiet, simulate
    from simulated.world import World
    from unicron import __version__
    from unicron.control_plane.fold.fold import fold
    from unicron.control_plane.state.cluster import ClusterState
    from unicron.events.log import archive

    quiet()
    logs = {seed: simulate(partial(World, seed))[1] for seed in SEEDS}
    seed = max(
        (seed for seed in SEEDS if len(logs[seed]) <= NUM_RECORDS_MAX),
        key=lambda seed: len({record.kind for record in logs[seed]}),
    )
    records, state, states = logs[seed], ClusterState(), dict[str, object]()
    every = len(records) // NUM_STATES
    for record in records:
        fold(state, record)
        if record.seq % every == 0:
            states[str(record.seq)] = msgspec.json.decode(msgspec.json.encode(state))
    name = f"release-{__version__}"
    (GOLDEN / f"{name}-states.json").write_bytes(msgspec.json.encode(states) + b"\n")
    archive.write(
        GOLDEN / f"{name}.jsonl", records, cluster=f"seed {seed} at {commit}", code=__version__
    )
    print(f"{name}.jsonl  {len(records)} records, {len(states)} states, seed {seed} at {commit}")


def _git(*words: str) -> bytes:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=RUN_S_MAX
    ).stdout


if __name__ == "__main__":
    (write if len(sys.argv) > 2 else main)(sys.argv[1])
