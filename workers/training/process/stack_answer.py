"""Has this process write the Python stacks of all its threads when its agent sends a signal.

Python's faulthandler writes them from the C handler of the signal: also while C code holds the GIL,
or a thread waits for a device. It is for machines on which the agent may not read the memory of its
ranks (agent/monitoring/python_stacks.py). A stopped process writes none.
"""

import faulthandler
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ....events.regular_files import open_to_write
from ...ipc import stack_signal

_files: list[BinaryIO] = []
"""They must stay open."""


def answer(environment: Mapping[str, str]) -> None:
    """Answer the signal from now on. Without a path in the environment, or if the file cannot be
    opened, nothing changes."""
    path = environment.get(stack_signal.VARIABLE, "")
    with suppress(OSError):
        if path:
            _files.append(file := open_to_write(Path(path), appends=True))
            faulthandler.register(stack_signal.SIGNAL, file=file, all_threads=True)
            os.set_inheritable(file.fileno(), False)
