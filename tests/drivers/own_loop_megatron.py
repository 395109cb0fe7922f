"""`unicron megatron` under an agent on the CPU, for arguments with which Megatron-LM's own loop
trains: python own_loop_megatron.py SCRIPT ARGS...

The stand-ins are those of stock_megatron.py. A GPU needs none. Each iteration waits a little, so
that a rank can be killed after a certain one.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import stock_megatron
from unicron.workers.training.megatron_lm import launcher

STEP_S = 0.2


def main() -> None:
    stock_megatron.stand_in(Path(sys.argv[1]))
    training: Any = import_module("megatron.training.training")
    step = training.train_step

    def slow_step(*given: Any, **named: Any) -> Any:
        time.sleep(STEP_S)
        return step(*given, **named)

    training.train_step = slow_step
    launcher.main()


if __name__ == "__main__":
    main()
