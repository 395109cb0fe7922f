"""A trace of every phase of every micro-batch, for those who want to watch or to strike in one.

Off unless UNICRON_TRACE_DIR names a folder. One line of JSON per event, one write each, in
`<task>-<rank>.jsonl`: `t` (seconds since 1970), task, rank, attempt, pid, generation, iteration,
micro_batch (-1 where it means nothing), event (`forward`, `backward`, `reduce`, `step`), each
written when the phase begins.
"""

from __future__ import annotations

import json
import os
import time


class Trace:
    """Writes nothing when `folder` is empty."""

    def __init__(self, folder: str, task: int, rank: int, attempt: int) -> None:
        self._head = {"task": task, "rank": rank, "attempt": attempt, "pid": os.getpid()}
        self._file = -1
        if folder:
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(os.path.join(folder, f"{task}-{rank}.jsonl"),
                                 os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, generation: int, iteration: int, micro_batch: int = -1) -> None:
        if self._file >= 0:
            line = json.dumps({"t": time.time(), **self._head, "generation": generation,
                               "iteration": iteration, "micro_batch": micro_batch,
                               "event": event})
            os.write(self._file, line.encode() + b"\n")
