"""NVRx's in-process wrapper as the benches use it: its intervals, its limits, its first group."""

import datetime
import os

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
from bench.recovery.loop import BUILD, COLLECTIVE

PORT = int(os.environ["MASTER_PORT"])
_SHORT = datetime.timedelta(seconds=0.1)
INTERVALS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "last_call_wait",
    "termination_grace_time",
)
"""Their defaults are one to five seconds."""


def wrapper() -> inprocess.Wrapper:
    """A rank without progress is hung after the timeout of a collective, and killed after two."""
    return inprocess.Wrapper(
        store_kwargs={"port": PORT + 1},
        **dict.fromkeys(INTERVALS, _SHORT),
        soft_timeout=COLLECTIVE,
        hard_timeout=2 * COLLECTIVE,
        heartbeat_timeout=2 * COLLECTIVE,
    )


def join(iteration: int) -> int:
    """Build the world of this call of the wrapped function; return the place in it."""
    place, num_members = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        "127.0.0.1",
        PORT + 2 + iteration,
        world_size=num_members,
        is_master=place == 0,
        multi_tenant=True,
        wait_for_workers=True,
    )
    dist.init_process_group("gloo", store=store, rank=place, world_size=num_members, timeout=BUILD)
    return place
