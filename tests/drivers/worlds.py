"""Worlds of a few processes over gloo, for tests that need several ranks.

The processes are forked from one that has torch and Megatron loaded. They end with their world.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

TESTS = Path(__file__).parents[1]
WORLD_S_MAX = 120.0
"""From the start of the first process to the answer of the last."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["world_work"])


def run(num_members: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(place, *args)` in `num_members` processes that form a world; their results.

    `work` is a function of world_work.py, so that the caller need not load torch.
    """
    _start()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = []
    for place in range(num_members):
        mine, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_be, daemon=True, args=(theirs, place, num_members, server.port, work, args)
        )
        process.start()
        theirs.close()
        members.append((process, mine))
    try:
        return [_answer(mine, place) for place, (_, mine) in enumerate(members)]
    finally:
        for process, mine in members:
            process.kill()
            process.join()
            mine.close()


def _start() -> None:
    """Start the fork server. It finds the modules of tests/ by PYTHONPATH alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), str(TESTS / "drivers"), *([before] if before else [])]
    )
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _answer(mine: Connection, place: int) -> Any:
    assert wait([mine], WORLD_S_MAX), f"the member at {place} does not answer"
    try:
        is_good, answer = mine.recv()
    except EOFError:
        raise AssertionError(f"the member at {place} has ended") from None
    assert is_good, f"the member at {place}:\n{answer}"
    return answer


def _be(
    theirs: Connection,
    place: int,
    num_members: int,
    port: int,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist
    from unicron.workers.training.model import cpu_device

    try:
        torch.set_num_threads(1)
        cpu_device.prepare_device()
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=place,
            world_size=num_members,
            timeout=datetime.timedelta(seconds=WORLD_S_MAX),
        )
        theirs.send((True, work(place, *args)))
    except BaseException:
        theirs.send((False, traceback.format_exc()))
        raise
    # Other members may still be connecting to this one. It is killed when all have answered.
    time.sleep(WORLD_S_MAX)
    os._exit(0)
