"""Processes of a script, started as torchrun would; one alone is told of no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 120.0


def launch(script: Path, words: Sequence[str], num: int, **more: str) -> list[tuple[int, str]]:
    """The exit code of each, and what it said to stderr. `more` goes into their environment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(num):
            many = {"RANK": str(rank), "WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port)} if num > 1 else {}
            started.append(subprocess.Popen(
                [sys.executable, str(script), *words], text=True, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", **many, **more}))
        said = [one.communicate(timeout=LIMIT_S)[1] for one in started]
        return [(one.returncode, text) for one, text in zip(started, said, strict=True)]
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
                one.wait()
