"""The same records in the `eventsourcing` library, in SQLite.

`python peer.py RECORDS FOLDER BATCH`: each line of RECORDS, a record as JSON, is an event of one
aggregate. SQLite has a write-ahead log and syncs each transaction, the library's default. Prints
JSON. It needs the library and nothing of Unicron.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event


class Log(Aggregate):
    """A log; its state is the number of records of each kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}

    @event("Recorded")
    def record(self, record: dict[str, Any]) -> None:
        """Append a record."""
        kind = record["kind"]
        self.kinds[kind] = self.kinds.get(kind, 0) + 1


def main(records: str, folder: str, batch: int) -> None:
    """Append all records in batches, then replay them."""
    plain = [json.loads(line) for line in Path(records).read_text().splitlines()]
    application = Application[Any](
        env={"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": f"{folder}/log.db"}
    )
    log, append_s, cpu_s = Log(), list[float](), time.process_time()
    application.save(log)
    for first in range(0, len(plain), batch):
        began_s = time.perf_counter()
        for one in plain[first : first + batch]:
            log.record(one)
        application.save(log)
        append_s.append(time.perf_counter() - began_s)
    append_cpu_s = time.process_time() - cpu_s
    began_s, cpu_s = time.perf_counter(), time.process_time()
    replayed = application.repository.get(log.id)
    replay_s, replay_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    assert sum(replayed.kinds.values()) == len(plain)
    print(
        json.dumps(
            {
                "num": len(plain),
                "append_s": append_s,
                "append_cpu_s": append_cpu_s,
                "replay_s": replay_s,
                "replay_cpu_s": replay_cpu_s,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
