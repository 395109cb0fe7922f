"""torch's flight recorder: always on in a rank, written to a file when the agent asks for it.

torch records each collective as it is entered in a ring in memory, gloo's too (measured in a world
of one: 31 us per all-reduce of one number, with and without it). The control thread receives the
request and a temporary thread writes the dump. A rank that hangs in a collective therefore writes
one; a rank that holds the GIL or is stopped does not, which is evidence too. Nothing here waits for
a device, a peer or the main thread; errors are logged.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d

from ....events.process_io import LogStream

DUMP_BYTES_MAX = 8 << 20
"""A longer dump is reduced to the unfinished collectives; if still longer, it is not written."""


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
        """A generation of these ranks begins: earlier entries are ignored."""
        self._began = generation, time.time_ns(), tuple(ranks)

    def start_write(self, path: str) -> None:
        """Write to `path` in a temporary thread. Of several pending paths, the last is used."""
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
        """The dump, with the task's ranks in place of the generation's."""
        generation, began_ns, ranks = self._began
        for only_active in (False, True):
            data = _dump(only_active)
            if len(data) <= DUMP_BYTES_MAX:
                break
        else:
            return ""
        found: dict[str, Any] = json.loads(data)
        found["entries"] = [one for one in found.get("entries", ())
                            if int(one.get("time_created_ns") or 0) >= began_ns]
        world = {"name": "0", "desc": "default_pg", "ranks": str(list(ranks))}
        return json.dumps({
            **found, "rank": self._rank, "task": self._task, "generation": generation,
            "dumped_ns": time.time_ns(), "pg_config": {"0": world}})


def _dump(only_active: bool) -> bytes:
    """torch's own JSON: of NCCL if this torch has it and used it, else of gloo."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        data: bytes = (dump(includeCollectives=True, onlyActive=only_active)
                       if dump is not None else b"")
        if b'"record_id"' in data:
            break
    return data or b"{}"
