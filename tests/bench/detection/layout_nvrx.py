"""One rank of a layout in NVRx's in-process wrapper: `python -m bench.detection.layout_nvrx`."""

import os
import time

import nvidia_resiliency_ext.inprocess as inprocess
from bench.detection.layout_loop import LayoutLoop
from bench.recovery.nvrx_wrapper import join, wrapper

# No `from __future__ import annotations`: the wrapper needs the annotations as classes.

WAIT_S = 0.1
loop = LayoutLoop(int(os.environ["RANK"]))


@wrapper()
def main(call_wrapper: inprocess.CallWrapper = None) -> None:
    """Train until a rank is lost. Then the wrapper calls this again, which ends the measurement."""
    loop.generation = call_wrapper.iteration
    loop.note("start")
    while call_wrapper.iteration > 0:
        time.sleep(WAIT_S)
    join(call_wrapper.iteration)
    loop.build()
    loop.train_for_ever()


if __name__ == "__main__":
    main()
