"""The example loop with a fault of its own software, for `make chaos-blame`.

`FAULT` says which, `AT` from which iteration on (-1: while it builds), `ONLY` in which rank alone.
"""

import os
import runpy
import sys
import threading
import time
from pathlib import Path

import unicron.workers.training.adopt as package  # before megatron  # isort: skip

import signal

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "loop.py"
FAULT, AT = os.environ["FAULT"], int(os.environ.get("AT", "4"))
RANK = os.environ.get("RANK", "0")
IS_STRUCK = os.environ.get("ONLY", RANK) == RANK
SLEEP_S, OUTPUT_LOST_S = 0.05, 8.0
adopt = package.adopt


def fail(iteration):
    """The fault, if this is its rank and its iteration."""
    if not IS_STRUCK or iteration < AT:
        return
    match FAULT:
        case "bug":
            raise RuntimeError(f"shape mismatch in layer 3: (2, 17) at step {iteration}")
        case "memory":
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        case "data":
            raise IndexError(f"index {iteration} is out of bounds for axis 0")
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "disk":
            raise OSError(28, "No space left on device")
        case "output":
            lose_output()
        case "many":
            raise (ValueError, KeyError, TypeError)[time.time_ns() // 1000 % 3](iteration)


def lose_output():
    """Put a file in place of the output folder, for longer than the loop takes."""
    output = Path(os.environ["OUTPUT"])
    away = output.with_name("away")
    if RANK != "0" or away.exists():
        return
    output.rename(away)
    output.write_text("not a folder")

    def give_back():
        output.unlink()
        away.rename(output)

    threading.Timer(OUTPUT_LOST_S, give_back).start()


def struck(*, sample, build, **others):
    """As `adopt`, with the fault before each micro-batch, or while the model is built."""

    def failing_sample(iteration, micro_batch):
        time.sleep(SLEEP_S)
        fail(iteration)
        return sample(iteration, micro_batch)

    def failing_build(*words):
        if AT < 0:
            fail(0)
        return build(*words)

    return adopt(sample=failing_sample, build=failing_build, **others)


package.adopt = struck
sys.argv[0] = str(EXAMPLE)
runpy.run_path(str(EXAMPLE), run_name="__main__")
