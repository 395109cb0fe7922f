"""The minimum recovery time: bare torch, no control plane. `python -m bench.recovery.floor N`.

Four processes with a gloo group reduce a small model's gradients. One is killed while the others
wait for it. Each survivor measures the time to its error, to the end of its groups, and to the new
groups of three. Prints a line of JSON for each trial: the slowest survivor, in seconds.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from bench.recovery.job import NUM_RANKS, VICTIM_NUM

NUM_FLOATS = 1_000_000
LIMIT = datetime.timedelta(seconds=20)
BLOCKED_S = 0.2


def up(port: int, name: str, place: int, num: int) -> None:
    """Build a world group and a group of one rank, as each of Unicron's generations has."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=place, world_size=num, timeout=LIMIT
    )
    dist.new_group([place], timeout=LIMIT, use_local_synchronization=True)


def rank(place: int, told: Connection) -> None:
    """One of the four. The victim sleeps while the others reduce."""
    port: int = told.recv()
    torch.set_num_threads(1)
    gradients = torch.ones(NUM_FLOATS)
    up(port, "old", place, NUM_RANKS)
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
    up(port, "new", place - (place > VICTIM_NUM), NUM_RANKS - 1)
    up_s = time.time()
    dist.all_reduce(gradients)
    told.send(
        {
            "failed": failed_s,
            "down_s": down_s - failed_s,
            "up_s": up_s - down_s,
            "reduce_s": time.time() - up_s,
        }
    )
    told.recv()  # no rank leaves while another still reduces
    os._exit(0)


def trial() -> dict[str, float]:
    """Kill one of four; return the times of the slowest survivor."""
    context = get_context("fork")
    pipes = [context.Pipe() for _ in range(NUM_RANKS)]
    ranks = [
        context.Process(target=rank, args=(place, pipes[place][1])) for place in range(NUM_RANKS)
    ]
    try:
        for one in ranks:
            one.start()
        # After the forks: the store's server is a thread, and a fork would not copy it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for mine, _ in pipes:
            mine.send(store.port)
        for mine, _ in pipes:
            assert mine.poll(LIMIT.total_seconds())
            assert mine.recv() == "ready"
        time.sleep(BLOCKED_S)
        pid = ranks[VICTIM_NUM].pid
        assert pid is not None
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        mine = [pipe for place, (pipe, _) in enumerate(pipes) if place != VICTIM_NUM]
        assert all(pipe.poll(LIMIT.total_seconds()) for pipe in mine)
        found = [pipe.recv() for pipe in mine]
        for pipe in mine:
            pipe.send("leave")
    finally:
        for one in ranks:
            if one.pid is not None:
                one.join(0.5)
                one.kill()
                one.join()
    return {
        "error_s": max(one["failed"] for one in found) - killed_s,
        **{name: max(one[name] for one in found) for name in ("down_s", "up_s", "reduce_s")},
    }


def main() -> None:
    """Run as many trials as the argument says."""
    for _ in range(int(sys.argv[1])):
        print(json.dumps(trial()), flush=True)


if __name__ == "__main__":
    main()
