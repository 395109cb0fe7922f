"""The least that a recovery does, in bare torch: `python -m bench.recovery.floor ASKED`.

Four processes with gloo groups reduce a gradient. One is killed while the others wait for it. The
survivors destroy their groups, build the new ones, and reduce once more. ASKED is JSON: `num_bytes`
of the gradient, and the places of each group `before` and `after`, besides the world and a group of
each alone. Prints one line of JSON: the times of the slowest survivor, in seconds.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from bench.recovery.job import NUM_RANKS, VICTIM_NUM

LIMIT = datetime.timedelta(seconds=60)
FLOAT_BYTES = 4
BLOCKED_S = 0.2


def up(port: int, name: str, place: int, num: int, groups: Iterable[list[int]]) -> None:
    """Build the world, a group of this rank alone, and those of the groups that it is in."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=place, world_size=num, timeout=LIMIT
    )
    for places in ([place], *groups):
        if place in places:
            dist.new_group(places, timeout=LIMIT, use_local_synchronization=True)


def rank(place: int, told: Connection, asked: dict[str, Any]) -> None:
    """One of the four. The victim sleeps while the others reduce."""
    port: int = told.recv()
    torch.set_num_threads(1)
    gradients = torch.ones(asked["num_bytes"] // FLOAT_BYTES)
    up(port, "old", place, NUM_RANKS, asked["before"])
    dist.all_reduce(gradients)
    told.send("ready")
    if place == VICTIM_NUM:
        time.sleep(LIMIT.total_seconds())
    failed_s = 0.0
    try:
        dist.all_reduce(gradients)
    except RuntimeError:
        failed_s = time.time()
    dist.destroy_process_group()
    down_s = time.time()
    up(port, "new", place - (place > VICTIM_NUM), NUM_RANKS - 1, asked["after"])
    up_s = time.time()
    dist.all_reduce(gradients)
    told.send({"failed": failed_s, "down": down_s, "up": up_s, "reduced": time.time()})
    told.recv()  # no rank leaves while another still reduces
    os._exit(0)


def heard(pipe: Connection, process: ForkProcess) -> Any:
    """What a rank tells. Raises RuntimeError if it ends or does not within LIMIT."""
    if pipe in wait([pipe, process.sentinel], LIMIT.total_seconds()):
        return pipe.recv()
    raise RuntimeError(f"rank {process.name} ended, or told nothing in {LIMIT.total_seconds():g} s")


def trial(asked: dict[str, Any]) -> dict[str, float]:
    """Kill one of four; return the times of the slowest survivor."""
    context = get_context("fork")
    pipes = [context.Pipe() for _ in range(NUM_RANKS)]
    ranks = [
        context.Process(target=rank, args=(place, pipes[place][1], asked), name=str(place))
        for place in range(NUM_RANKS)
    ]
    try:
        for process in ranks:
            process.start()
        # After the forks: the store's server is a thread, and a fork would not copy it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe, _ in pipes:
            pipe.send(store.port)
        for place in range(NUM_RANKS):
            assert heard(pipes[place][0], ranks[place]) == "ready"
        time.sleep(BLOCKED_S)
        pid = ranks[VICTIM_NUM].pid
        assert pid is not None
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        survivors = [place for place in range(NUM_RANKS) if place != VICTIM_NUM]
        ends = [heard(pipes[place][0], ranks[place]) for place in survivors]
        for place in survivors:
            pipes[place][0].send("leave")
    finally:
        for process in ranks:
            if process.pid is not None:
                process.join(0.5)
                process.kill()
                process.join()
    return {
        "error_s": max(end["failed"] for end in ends) - killed_s,
        "down_s": max(end["down"] - end["failed"] for end in ends),
        "up_s": max(end["up"] - end["down"] for end in ends),
        "fault_to_step_s": max(end["reduced"] for end in ends) - killed_s,
    }


if __name__ == "__main__":
    print(json.dumps(trial(json.loads(sys.argv[1]))), flush=True)
