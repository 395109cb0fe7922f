"""Removes outputs of former attempts of a rank: many restarts take no more disk than a few."""

import re
from contextlib import suppress
from pathlib import Path

from ....events.bounded_file import ASIDE, allowed_bytes
from . import torch_files

NUM_MAX = 100
"""At most so many outputs of former attempts stay."""
_BLOCK_BYTES = 512
_ATTEMPT = re.compile(r"(rank-[0-9]+\.attempt-)([0-9]+)\.log")


def remove(log_path: Path, folder: Path, bytes_max: int) -> None:
    """Before an attempt starts whose output this will be: remove the oldest of former ones, with
    their error files in `folder`, until the rest takes `bytes_max` at most. The newest stays, for
    it may not have been read yet."""
    own = _ATTEMPT.fullmatch(log_path.name)
    with suppress(OSError):
        found = [
            (int(name[2]), path)
            for path in (log_path.parent.iterdir() if own else ())
            if (name := _ATTEMPT.fullmatch(path.name)) and own and name[1] == own[1]
            if int(name[2]) < int(own[2])
        ]
        taken, allowed = 0, allowed_bytes(log_path.parent, bytes_max)
        for num, (_, path) in enumerate(sorted(found, reverse=True)):
            aside = path.with_name(path.name + ASIDE)
            taken += sum(
                file.stat().st_blocks * _BLOCK_BYTES for file in (path, aside) if file.exists()
            )
            if num and (num >= NUM_MAX or taken > allowed):
                for file in (torch_files.error_file_of(path, folder), aside, path):
                    file.unlink(missing_ok=True)
