"""A reduction in flight: launched in order, and left behind where nothing ends it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from unicron.workers.training.step.overlapped_reduction import END_S_MAX, OverlappedReduction

PEER = """
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=1, world_size=2)
print("met", flush=True)
time.sleep(60)
"""
FREED_S_MAX = 10.0


@pytest.fixture
def peer(tmp_path: Path) -> Any:
    """Another member, that has come and then does nothing."""
    made = subprocess.Popen([sys.executable, "-c", PEER, str(tmp_path / "store")],
                            stdout=subprocess.PIPE)
    store = dist.FileStore(str(tmp_path / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    assert made.stdout is not None
    assert made.stdout.readline() == b"met\n"
    yield made
    made.kill()
    made.wait(10)
    if dist.is_initialized():
        dist.destroy_process_group()


def left_behind() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "abandoned"]


def test_what_nothing_ends_holds_nobody_up(peer: subprocess.Popen[bytes]) -> None:
    flight = OverlappedReduction(torch.zeros(3), 0, lambda: False)
    began_s, woken = time.monotonic(), list[int]()
    flight.end(lambda: woken.append(1))
    assert woken, "it is tried"
    assert END_S_MAX <= time.monotonic() - began_s < FREED_S_MAX
    (thread,) = left_behind()
    del flight
    began_s = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began_s < FREED_S_MAX, "it would wait for its works for half an hour"
    assert thread.is_alive()
    peer.kill()
    thread.join(FREED_S_MAX)
    assert not thread.is_alive()


def test_a_bucket_waits_for_its_turn_and_for_the_wish_to_go_on(peer: Any) -> None:
    launched, over = list[int](), list[int]()
    flight = OverlappedReduction(torch.zeros(3), 5, lambda: bool(over))

    def launch(bucket: int) -> list[Any]:
        launched.append(bucket)
        if bucket == 3:
            raise RuntimeError("cut")
        return []

    for bucket, wanted in ((1, []), (2, []), (0, [0, 1, 2]), (0, [0, 1, 2])):
        flight.ready(bucket, launch)
        assert launched == wanted
    over.append(1)
    flight.ready(3, launch)
    assert launched == [0, 1, 2]
    over.clear()
    flight.ready(3, launch)
    flight.ready(4, launch)
    assert launched == [0, 1, 2, 3], "nothing more after one that failed"
    with pytest.raises(RuntimeError, match="cut"):
        flight.wait_all(lambda event, bucket=-1: None, lambda: None)
    peer.kill()
    peer.wait(10)
    flight.end(lambda: None)
    assert not left_behind()
