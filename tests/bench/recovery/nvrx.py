"""One rank of the bench's loop in NVRx's in-process wrapper: `python -m bench.recovery.nvrx`.

Usual use of NVRx: the wrapped function is called again in the remaining processes. It builds its
groups and its model again and continues from the last checkpoint. The polling intervals are 0.1 s
(defaults: one to five seconds). The timeouts for a rank without progress are seconds (defaults:
minutes).
"""

import datetime
import os

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
from bench.recovery.loop import BUILD, COLLECTIVE, Loop
from unicron.workers.training.dependencies import private_megatron

# No `from __future__ import annotations`: the wrapper needs the annotations as classes.

PORT = int(os.environ["MASTER_PORT"])


def _seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


loop = Loop(int(os.environ["RANK"]))


@inprocess.Wrapper(
    store_kwargs={"port": PORT + 1},
    **dict.fromkeys(
        (
            "monitor_thread_interval",
            "monitor_process_interval",
            "heartbeat_interval",
            "progress_watchdog_interval",
            "last_call_wait",
            "termination_grace_time",
        ),
        _seconds(0.1),
    ),
    soft_timeout=COLLECTIVE,
    hard_timeout=2 * COLLECTIVE,
    heartbeat_timeout=2 * COLLECTIVE,
)
def main(call_wrapper: inprocess.CallWrapper = None) -> None:
    """Train until killed. The wrapper calls this again when a rank is lost."""
    loop.generation = call_wrapper.iteration
    place, num_members = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        "127.0.0.1",
        PORT + 2 + call_wrapper.iteration,
        world_size=num_members,
        is_master=place == 0,
        multi_tenant=True,
        wait_for_workers=True,
    )
    dist.init_process_group("gloo", store=store, rank=place, world_size=num_members, timeout=BUILD)
    private_megatron.clear_globals()
    loop.iteration = 0
    loop.build()
    loop.load()
    loop.run(place, num_members, call_wrapper.atomic)


if __name__ == "__main__":
    main()
