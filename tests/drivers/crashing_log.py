"""A control plane that kills itself at a given record: `install`, or `PROGRAM` in place of unicron.

Four environment variables each end the process with SIGKILL around one append:

- `UNICRON_CRASH_AFTER_SEQ=N`: right after the append that holds record N is acknowledged;
- `UNICRON_CRASH_BEFORE_SEQ=N`: right before that append;
- `UNICRON_CRASH_AFTER_KIND=Kind[:n]`: after the append that holds the n-th record (default the
  first) of that kind which this process writes;
- `UNICRON_CRASH_BEFORE_KIND=Kind[:n]`: right before it.

An append is atomic, so no kill is possible between its records.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unicron.control_plane import server
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records.envelope import KINDS, Record

PROGRAM = (
    sys.executable,
    "-P",
    "-c",
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    "import crashing_log; crashing_log.install()\n"
    "from unicron.cli import main; main.main()",
)


class CrashingLog(RedisLog):
    """The log with these SIGKILLs."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._seqs: dict[str, int] = {}
        self._kinds: dict[str, tuple[str, int]] = {}
        self._written: dict[str, int] = {}
        for when in ("BEFORE", "AFTER"):
            if seq := os.environ.get(f"UNICRON_CRASH_{when}_SEQ", ""):
                self._seqs[when] = int(seq)
            kind, _, number = os.environ.get(f"UNICRON_CRASH_{when}_KIND", "").partition(":")
            if kind:
                assert kind in KINDS
                self._kinds[when] = kind, int(number or 1)

    async def append(
        self,
        records: Sequence[Record],
        *,
        epoch: int,
        expect: int,
        cursor: str,
        acked: Mapping[str, int],
    ) -> None:
        """Append as RedisLog does, with a SIGKILL before or after it if requested."""
        for record in records:
            self._written[record.kind] = self._written.get(record.kind, 0) + 1
        self._crash("BEFORE", records)
        await super().append(records, epoch=epoch, expect=expect, cursor=cursor, acked=acked)
        self._crash("AFTER", records)

    def _crash(self, when: str, records: Sequence[Record]) -> None:
        kind, number = self._kinds.get(when, ("", 0))
        seq = self._seqs.get(when)
        if any(r.seq == seq for r in records) or (
            kind in {r.kind for r in records} and self._written[kind] >= number
        ):
            os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """From now on, a control plane of this process uses this log."""
    vars(server)["RedisLog"] = CrashingLog
