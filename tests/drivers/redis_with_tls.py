"""Debian's redis-server with TLS only, as a server of one's own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certificates import Pair
from unicron.cli.cluster.local_cluster import free_port
from unicron.events import tls

LIMIT_S = 30.0
PROGRAM = "redis-server"


def why_not() -> str:
    """The reason why it cannot run here, or ""."""
    return "" if shutil.which(PROGRAM) else f"there is no `{PROGRAM}` (apt-get install {PROGRAM})"


@contextmanager
def serving(pair: Pair, folder: Path) -> Iterator[str]:
    """A server at 127.0.0.1 with this certificate; yields its URL."""
    port = free_port()
    process = subprocess.Popen(
        [
            PROGRAM,
            "--port",
            "0",
            "--tls-port",
            str(port),
            "--tls-cert-file",
            str(pair.certificate),
            "--tls-key-file",
            str(pair.key),
            "--tls-ca-cert-file",
            str(pair.ca),
            "--tls-auth-clients",
            "no",
            "--requirepass",
            "hush",
            "--bind",
            "127.0.0.1",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--dir",
            str(folder),
            "--logfile",
            str(folder / "log"),
        ]
    )
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while True:
            try:
                tls.sent_chain("127.0.0.1", port)
                break
            except OSError:
                assert process.poll() is None, "it has ended"
                assert time.monotonic() < deadline_s, "it does not listen"
                time.sleep(0.05)
        yield f"rediss://:hush@127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(LIMIT_S)
