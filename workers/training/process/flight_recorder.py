"""torch's flight recorder: always on in a rank, written to a file when the agent asks for it.

A temporary thread writes the dump, also of a rank that hangs in a collective. A rank that holds the
GIL or is stopped writes none, which is evidence too. Nothing here waits for a device or a peer.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....events.decoding import from_json
from ....events.process_io import LogStream
from ..dependencies.private_torch import recorded_collectives

DUMP_BYTES_MAX = 8 << 20
"""A longer dump keeps only the unfinished collectives. If it is still longer, none is written."""


class Recorder:
    """Writes this process's dumps, as rank `rank` of task `task`."""

    def __init__(self, task: int, rank: int) -> None:
        self._task = task
        self._rank = rank
        self._began: tuple[int, int, tuple[int, ...]] = (0, 0, ())
        self._changing = threading.Lock()
        self._next_path: str | None = None
        self._is_writing = False

    def begin(self, generation: int, ranks: Sequence[int]) -> None:
        """Begin a generation of these ranks. Dumps ignore earlier entries."""
        self._began = generation, time.time_ns(), tuple(ranks)

    def start_write(self, path: str) -> None:
        """Write a dump to `path` in a temporary thread. If several paths wait, the last is used."""
        with self._changing:
            self._next_path = path
            if self._is_writing:
                return
            self._is_writing = True
        threading.Thread(target=self._write, name="flight recorder", daemon=True).start()

    def _write(self) -> None:
        while (path := self._next()) is not None:
            try:
                if text := self._text():
                    partial = path.with_name(f".{path.name}.partial")
                    partial.write_text(text)
                    os.replace(partial, path)
            except (OSError, RuntimeError, ValueError) as error:
                LogStream(sys.stderr).write(f"flight recorder dump failed: {error}\n")

    def _next(self) -> Path | None:
        with self._changing:
            path, self._next_path = self._next_path, None
            self._is_writing = path is not None
        return Path(path) if path is not None else None

    def _text(self) -> str:
        """The dump; its ranks are those of the task, not of torch.distributed."""
        generation, began_ns, ranks = self._began
        for only_active in (False, True):
            data = recorded_collectives(only_active=only_active)
            if len(data) <= DUMP_BYTES_MAX:
                break
        else:
            return ""
        found: dict[str, Any] = from_json(data)
        found["entries"] = [
            one
            for one in found.get("entries", ())
            if int(one.get("time_created_ns") or 0) >= began_ns
        ]
        world = {"name": "0", "desc": "default_pg", "ranks": str(list(ranks))}
        return json.dumps(
            {
                **found,
                "rank": self._rank,
                "task": self._task,
                "generation": generation,
                "dumped_ns": time.time_ns(),
                "pg_config": {"0": world},
            }
        )
