"""Starts the processes of a script like torchrun. A single process gets no rendezvous variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nursery import PATCH, Forked, Nursery

LIMIT_S = 120.0


def launch(script: Path, words: Sequence[str], num: int, **more: str) -> list[tuple[int, str]]:
    """The exit code and stderr of each process. `more` is added to their environment."""
    started: list[subprocess.Popen[str]] = []
    try:
        for environment in _environments(num, more):
            started.append(
                subprocess.Popen(
                    [sys.executable, str(script), *words],
                    text=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment,
                )
            )
        errors = [one.communicate(timeout=LIMIT_S)[1] for one in started]
        return [(one.returncode, text) for one, text in zip(started, errors, strict=True)]
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
                one.wait()


def fork(
    nursery: Nursery, script: Path, words: Sequence[str], num: int, **more: str
) -> list[tuple[int, str]]:
    """As `launch`, but by fork: the processes need not load torch and Megatron."""
    argv = [str(script), *words]
    code = (
        f"import os, runpy, sys\nsys.argv = {argv!r}\ndel os.environ['UNICRON_RANK']\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\nsys.exit()\n"
    )
    logs = [script.parent / f"{rank}.log" for rank in range(num)]
    started: list[Forked] = []
    try:
        for log, environment in zip(logs, _environments(num, more), strict=True):
            with log.open("wb") as output, open(os.devnull, "rb") as nothing:
                started.append(
                    nursery.fork(
                        {**environment, "UNICRON_RANK": "script", PATCH: code},
                        output.fileno(),
                        nothing.fileno(),
                    )
                )
        return [
            (one.wait(LIMIT_S), log.read_text()) for one, log in zip(started, logs, strict=True)
        ]
    finally:
        for one in started:
            one.kill()


def _environments(num: int, more: dict[str, str]) -> Iterator[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(num):
        many = (
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(num),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if num > 1
            else {}
        )
        yield {**os.environ, "OMP_NUM_THREADS": "1", **many, **more}
