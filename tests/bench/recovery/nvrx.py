"""One rank of the bench's loop in NVRx's in-process wrapper: `python -m bench.recovery.nvrx`.

Usual use of NVRx: the wrapped function is called again in the remaining processes. It builds its
groups and its model again and continues from the last checkpoint.
"""

import os

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
from bench.recovery.loop import Loop
from bench.recovery.nvrx_wrapper import join, wrapper
from unicron.workers.training.dependencies import private_megatron

# No `from __future__ import annotations`: the wrapper needs the annotations as classes.

loop = Loop(int(os.environ["RANK"]))


@wrapper()
def main(call_wrapper: inprocess.CallWrapper = None) -> None:
    """Train until killed. The wrapper calls this again when a rank is lost."""
    loop.generation = call_wrapper.iteration
    place = join(call_wrapper.iteration)
    private_megatron.clear_globals()
    loop.iteration = 0
    loop.build()
    loop.load()
    loop.run(place, dist.get_world_size(), call_wrapper.atomic)


if __name__ == "__main__":
    main()
