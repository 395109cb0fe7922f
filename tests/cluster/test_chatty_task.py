"""A task that prints without end, on a small disk for the state folder: others are healed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_cluster import running

MIB = 1 << 20
CHATTY = """
import sys
print("the first words")
while True:
    sys.stdout.write("x" * 1_000_000)
"""


def job(name: str, code: str) -> dict[str, Any]:
    command = [sys.executable, "-c", code]
    return {"apiVersion": "unicron/v1", "name": name, "slots": {"max": 1}, "command": command}


def test_a_chatty_task_fills_no_disk_and_others_are_healed(
    mounted: Callable[[str, str], Path],
) -> None:
    disk = mounted("tmpfs", "120m")
    with running(disk, 1) as cluster:
        least, ended = 120 * MIB, threading.Event()

        def watch() -> None:
            nonlocal least
            while not ended.wait(0.005):
                least = min(least, os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        quiet = cluster.submit(job("quiet", "import time; time.sleep(600)"))
        chatty = cluster.submit(job("chatty", CHATTY))
        one = cluster.wait_told(0, "RankStarted", task=quiet).body
        other = cluster.wait_told(0, "RankStarted", task=chatty).body
        output = Path(other.log_path)
        cluster.wait(lambda: output.stat().st_size > 1000 * MIB or None, "1 GiB is printed")
        seq = cluster.seq()
        os.kill(one.pid, signal.SIGKILL)
        begun_s = time.monotonic()
        cluster.wait_told(seq, "RankStarted", task=quiet)
        healed_s = time.monotonic() - begun_s
        assert cluster.kept(chatty, {0: other.pid}) == {0}
        cluster.cancel(chatty)
        ended.set()
        watcher.join()
        assert least > 5 * MIB, "the disk was never full"
        assert healed_s < 20
        assert output.stat().st_blocks * 512 < 61 * MIB, "less than half of the disk"
        shown = cluster.unicron("logs", "chatty").stdout
        head, _, rest = shown.partition("[unicron: ")
        assert head.splitlines()[0] == "0.1 the first words"
        assert " bytes were dropped here, see output_bytes_max]\n" in rest
        assert len(shown) < 61 * MIB
        cluster.verify()
