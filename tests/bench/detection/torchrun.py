"""torchrun in the detection bench: default settings; detection is read from the launcher's log."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from bench.detection import faults
from bench.detection.faults import Trial
from bench.recovery.job import NUM_RANKS, VICTIM_NUM
from bench.recovery.peers import Peer
from bench.recovery.trial import STILL_S_MAX, NotStarted
from unicron.workers.host import linux

NODES_NUM = 2
WARM_NUM = 5
TOLD_S_MAX = 30.0
"""Only the timeout of a collective could report later: 30 minutes by default."""
COLLECTIVE_S = 1800.0
"""torch's default timeout for gloo."""
SAID = b"failed (exitcode"
"""The launcher logs this as soon as it has noticed that a worker ended."""


def launcher(number: int, num_ranks: int, address: str, port: int) -> list[str]:
    """The command line of one of NODES_NUM launchers, without the program."""
    return [
        "-m",
        "torch.distributed.run",
        f"--nnodes={NODES_NUM}",
        f"--nproc-per-node={num_ranks // NODES_NUM}",
        f"--node-rank={number}",
        "--max-restarts=0",
        "--rdzv-backend=static",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]


class Torchrun(Peer):
    """Two launchers with two workers each, like two nodes; elastic, with default settings."""

    name = "torchrun"
    address = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self.name)
        self._env["UNICRON_BENCH_COLLECTIVE_S"] = str(COLLECTIVE_S)

    def start(self) -> None:
        """Raises NotStarted."""
        for number in range(NODES_NUM):
            self.launch_node(number)
        for _ in self.watch.while_new(STILL_S_MAX):
            if max((line["iteration"] for line in self.watch.told), default=0) >= WARM_NUM:
                return
            if why := self.tend():
                raise NotStarted(why)
        raise NotStarted(f"hangs: nothing new in its trace for {STILL_S_MAX:g} s")

    def launch_node(self, number: int) -> None:
        launched = launcher(number, NUM_RANKS, self.address, self.port)
        self.spawn(f"torchrun-{number}", *launched, "-m", "bench.recovery.loop")

    def strike(self, case: str) -> Trial:
        """Inject the fault; wait for the launcher of the victim (of a lost node: the other one)."""
        logs = [self.folder / "torchrun-1.log"]
        if case in ("agent_killed", "network_cut"):
            logs = [self.folder / "torchrun-0.log"]
        at_s = self._struck(case)

        def said() -> float | None:
            return time.time() if any(SAID in log.read_bytes() for log in logs) else None

        came_s = faults.wait(said, TOLD_S_MAX)
        if came_s is None:
            return Trial(
                case,
                self.name,
                None,
                f"nothing said within {TOLD_S_MAX:g} s: its only "
                f"limit is the collective's, {COLLECTIVE_S:g} s by default",
            )
        return Trial(case, self.name, came_s - at_s)

    def _struck(self, case: str) -> float:
        if case in faults.HELD:
            return faults.inside(self.watch.folder, 1, VICTIM_NUM, case)
        self.watch.look()
        if case != "agent_killed":
            pid = next(line["pid"] for line in self.watch.lines[::-1] if line["rank"] == VICTIM_NUM)
            return faults.by_signal(pid, case)
        launcher = self.processes["torchrun-1"].pid
        lost = [launcher, *(proc.pid for proc in linux.descendants({launcher}, linux.table()))]
        at_s = time.time()
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        return at_s
