"""`unicron megatron`: becomes the process that runs a script of Megatron-LM."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ...events.errors import UsageError
from ...workers.ipc.pipe_protocol import FD

LAUNCHER = ("-P", "-m", "unicron.workers.training.megatron_lm.launcher")


def megatron(script: Path, words: Sequence[str]) -> NoReturn:
    """Become Python with the script, under an agent in Unicron's launcher. Raises UsageError."""
    launcher = LAUNCHER if FD in os.environ else ()
    if not launcher and not script.is_file():
        raise UsageError(
            f"{script}: {'is a folder' if script.is_dir() else 'no such file'}",
            "give the path of a script in a clone of Megatron-LM",
        )
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, str(script), *words])
