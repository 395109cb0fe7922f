"""Aborts NCCL groups without waiting until NCCL has ended its own threads.

An abort then waits for threads of NCCL, measured 1.0 s for each communicator (NCCL 2.28, H200). So
a thread of its own aborts each group. The memory of a communicator is free only after its abort.
"""

from __future__ import annotations

import threading

import torch

from ..dependencies import private_torch

COMMUNICATOR_BYTES = 512 << 20
"""GPU memory of a communicator, rounded up: 388 MiB measured with NCCL 2.28 on an H200."""


class NcclAborts:
    """The aborts of this process. Any thread may call `begin`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Take all groups out of torch, and abort each. Returns at once."""
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            for group in private_torch.take_groups():
                thread = threading.Thread(target=group.abort, name="abort", daemon=True)
                thread.start()
                self._threads.append(thread)

    def make_room(self) -> None:
        """Wait for the aborts if the GPU has no memory for as many communicators beside theirs."""
        with self._lock:
            num = sum(one.is_alive() for one in self._threads)
        if num and torch.cuda.mem_get_info()[0] < num * COMMUNICATOR_BYTES:
            self.wait()

    def wait(self) -> None:
        with self._lock:
            threads = list(self._threads)
        for one in threads:
            one.join()
