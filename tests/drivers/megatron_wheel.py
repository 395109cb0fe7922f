"""Other versions of megatron-core, each unpacked in build/wheels, for the PYTHONPATH of ranks.

`python tests/drivers/megatron_wheel.py 0.15.3` prints the folder of this version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "wheels"
FETCH_S_MAX = 120.0


class NotFetched(Exception):
    """The wheel is not there and cannot be fetched; `str()` says why."""


def unpacked(version: str) -> Path:
    """The folder with this version of megatron-core. It is fetched once. Raises NotFetched."""
    folder = FOLDER / version
    if folder.is_dir():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as made:
        download = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            made,
            f"megatron-core=={version}",
        ]
        try:
            done = subprocess.run(
                download, capture_output=True, text=True, check=False, timeout=FETCH_S_MAX
            )
        except subprocess.TimeoutExpired:
            raise NotFetched(f"megatron-core {version}: pip took {FETCH_S_MAX:.0f} s") from None
        wheels = list(Path(made).glob("*.whl"))
        if done.returncode or not wheels:
            raise NotFetched(f"megatron-core {version}: {done.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(made) / "unpacked")
        try:
            os.rename(Path(made) / "unpacked", folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


if __name__ == "__main__":
    print(unpacked(sys.argv[1]))
