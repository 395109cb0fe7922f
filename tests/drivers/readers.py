"""Readers that ask a control plane again and again, and how fast a killed rank is healed beside.

`python readers.py URL NUM PATH...` with the token on the standard input: NUM threads ask for the
paths in turn, each at once when its last answer is complete, refused or not. It ends with its
standard input, and writes how many answers of each status it had. It runs with the lowest priority:
in practice readers are on other hosts.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from real_cluster import RealCluster

READERS_NUM = 30
SETTLE_S = 1.5
"""From the start of the readers until they all read."""
WEIGHT = 50.0
START = 'echo $$ >> "$1"; exec sleep 100000'
ANSWER_S_MAX = 60.0


# --- the pair: healing with and without readers ---
def pair(cluster: RealCluster, paths: Sequence[str], name: str) -> tuple[float, float]:
    """How long the healing of a killed rank takes without readers, and under READERS_NUM readers of
    these paths (s)."""
    alone = Victim(cluster, f"{name}-alone")
    alone.heal()
    alone_s = alone.healing_s()
    beside = Victim(cluster, f"{name}-beside")
    with reading(cluster, paths):
        time.sleep(SETTLE_S)
        beside.heal()
    return alone_s, beside.healing_s()


class Victim:
    """A command of one slot that runs, to be killed once."""

    def __init__(self, cluster: RealCluster, name: str) -> None:
        self._cluster, self._pids = cluster, cluster.path / f"{name}.pids"
        self.task = cluster.submit(
            {
                "apiVersion": "unicron/v1",
                "name": name,
                "weight": WEIGHT,
                "command": ["sh", "-c", START, "sh", str(self._pids)],
            }
        )
        cluster.wait(self._pid, f"{name} runs")
        cluster.wait_told(0, "RankStarted", task=self.task)

    def _pid(self) -> int | None:
        """Not by the log: readers may hold up our own reads."""
        words = self._pids.read_text().split() if self._pids.exists() else []
        return int(words[-1]) if words else None

    def heal(self) -> None:
        """Kill its process, and wait for the next one."""
        pid = self._pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self._cluster.wait(lambda: self._pid() != pid or None, "it runs again")

    def healing_s(self) -> float:
        """From the end of the one process to the start of the next, by the log; then it ends."""
        ended = self._cluster.wait_told(0, "RankExited", task=self.task)
        again = self._cluster.wait_told(ended.seq, "RankStarted", task=self.task)
        self._cluster.cancel(self.task)
        return again.occurred_s - ended.occurred_s


@contextmanager
def reading(
    cluster: RealCluster, paths: Sequence[str], num: int = READERS_NUM
) -> Iterator[Counter[str]]:
    """`num` threads of one `view` token read these paths meanwhile. At the end the counter has how
    many answers had which status."""
    found = Counter[str]()
    client = cluster.client()
    made = client.post(
        "/v1/tokens", {"name": f"readers-{time.monotonic_ns()}", "role": "view", "reason": "a test"}
    )
    with subprocess.Popen(
        [sys.executable, __file__, client.url, str(num), *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(made["token"] + "\n")
        process.stdin.flush()
        try:
            yield found
        finally:
            process.stdin.close()
            found.update(json.loads(process.stdout.read() or "{}"))


# --- the process of the readers ---
def main() -> None:
    os.nice(19)
    url, num, *paths = sys.argv[1:]
    token, statuses = sys.stdin.readline().strip(), Counter[str]()
    for _ in range(int(num)):
        threading.Thread(
            target=_read, args=(url, token, cycle(paths), statuses), daemon=True
        ).start()
    sys.stdin.read()
    print(json.dumps(statuses))


def _read(url: str, token: str, paths: Iterator[str], statuses: Counter[str]) -> None:
    at = urlsplit(url)
    for path in paths:
        link = http.client.HTTPConnection(at.hostname or "", at.port, timeout=ANSWER_S_MAX)
        try:
            link.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            answer = link.getresponse()
            while answer.read1(1 << 16):
                pass
            statuses[str(answer.status)] += 1
        except (OSError, http.client.HTTPException) as error:
            statuses[type(error).__name__] += 1
        finally:
            link.close()


if __name__ == "__main__":
    main()
