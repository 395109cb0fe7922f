"""Shared by tests of clusters with three nodes: the nodes, declared throughputs, two tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twins import Spec

NODES = ("n1", "n2", "n3")
RATES = {1: 1.0, 2: 1.9, 3: 2.7, 4: 3.2}
"""Declared TFLOP/s by number of slots. Each further slot adds less."""


class Pair:
    """Two tasks on one cluster, shared by a module's tests."""

    def __init__(self, cluster: Any, *specs: Spec) -> None:
        self.cluster = cluster
        self.specs: dict[int, Spec] = {cluster.submit(spec): spec for spec in specs}
        cluster.rest(*self.specs)
        self.wait_whole()

    def wait_whole(self, *nums: int) -> None:
        """Wait until each task steps with this many members; default: its maximum."""
        wanted = nums or tuple(spec["slots"]["max"] for spec in self.specs.values())
        for task, num in zip(self.specs, wanted, strict=True):
            self.cluster.wait_whole(task, num)

    def cancel(self) -> None:
        """Cancel both tasks and wait until they have ended."""
        self.cluster.cancel(*self.specs)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped inside the context."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
