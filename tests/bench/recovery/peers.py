"""The peers. Each is launched as its users launch it; its processes are found by a mark."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.recovery import environment
from bench.recovery import watch as eyes
from bench.recovery.job import NUM_MICRO_BATCHES, NUM_RANKS, VICTIM_NUM, spec
from bench.recovery.trial import System
from bench.recovery.unicron import Unicron
from unicron.cli.cluster.local_cluster import free_port
from unicron.workers.host import linux

MARK = "UNICRON_BENCH_RUN"
RESTARTS_NUM = 5
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
heartbeat_ms, tick_ms, port = map(int, sys.argv[1:])
server = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=60_000,
                          quorum_tick_ms=tick_ms, heartbeat_timeout_ms=heartbeat_ms)
time.sleep(1e6)
"""
HEARTBEATS_MS = {"torchft_stable": (5000, 100), "torchft_fast": (500, 50)}
"""Heartbeat timeout of a replica and polling interval. torchft_stable has the defaults of the
lighthouse's own command, like the join timeout."""


class Peer:
    """What all peers share: a folder, a trace, and a mark in the environment of every process."""

    name = ""
    within: Sequence[str] = ()
    """A command prefix, for example to start the processes in a network namespace."""

    def __init__(
        self, folder: Path, name: str = "", *, size: str = "1M", traced: bool = True
    ) -> None:
        self.name = name or self.name
        self.python = environment.python(self.name)
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(
            json.dumps(spec(self.name.replace("_", "-"), folder / "out", size=size))
        )
        self.watch = eyes.Watch(folder / "trace")
        self._mark = f"{os.getpid()}-{folder}"
        self.port = free_port()
        self._env = {
            **environment.environment(self.name),
            MARK: self._mark,
            "UNICRON_BENCH_SPEC": str(folder / "spec.json"),
            "UNICRON_BENCH_FOLDER": str(folder),
            "MASTER_ADDR": "127.0.0.1",
            "UNICRON_BENCH_TRACE": str(int(traced)),
            "MASTER_PORT": str(self.port),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for rank in range(NUM_RANKS):
            self.launch(rank)

    def launch(self, rank: int) -> None:
        raise NotImplementedError

    def comes_back(self, case: str) -> bool:
        return True

    def spawn(self, name: str, *command: str, **env: str) -> None:
        """Start `python -P COMMAND` in a new session."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.within, str(self.python), "-P", *command],
                env={**self._env, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def rank(self, rank: int, module: str, **env: str) -> None:
        self.spawn(
            f"rank-{rank}",
            "-m",
            module,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(NUM_RANKS),
            **env,
        )

    def tend(self) -> str:
        ended = {name: process.poll() for name, process in self.processes.items()}
        if all(code is not None for code in ended.values()):
            return f"all ended: {ended}: {self.last_words()}"
        return ""

    def last_words(self) -> str:
        """The last error line of the newest log."""
        logs = sorted(self.folder.glob("*.log"), key=lambda file: file.stat().st_mtime)
        said = [
            line
            for line in (logs[-1].read_text(errors="replace").splitlines() if logs else [])
            if "Error" in line
        ]
        return " ".join((said or ["nothing said"])[-1].split())[:160]

    def losses(self) -> dict[int, float]:
        return self.watch.losses()

    def whole_batch(self, step: eyes.Line) -> bool | None:
        told = [
            line
            for line in self.watch.told
            if line["iteration"] == step["iteration"] and line["generation"] == step["generation"]
        ]
        return bool(told[-1]["num_done"] == NUM_MICRO_BATCHES) if told else None

    def stop(self) -> None:
        """Kill every process that has this peer's mark, whatever its parent is."""
        while linux.kill_marked(f"{MARK}={self._mark}".encode()):
            for process in self.processes.values():
                process.poll()
        for process in self.processes.values():
            process.wait()


class Bare(Peer):
    """The loop in bare Megatron: the reference run, and the baseline of overhead."""

    name = "bare"

    def launch(self, rank: int) -> None:
        self.rank(rank, "bench.recovery.loop")


class Torchrun(Peer):
    """One launcher for all ranks; after a failure it restarts all of them."""

    launcher = "torch.distributed.run"
    more: Sequence[str] = ()
    """Arguments besides those of torchrun."""

    def start(self) -> None:
        works_around = self.name == "torchrun_workaround"
        self.spawn(
            "launcher",
            "-m",
            self.launcher,
            "--nnodes=1",
            f"--nproc-per-node={NUM_RANKS}",
            f"--max-restarts={RESTARTS_NUM}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            *self.more,
            "-m",
            "bench.recovery.loop",
            **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if works_around else {}),
        )


class NvrxLauncher(Torchrun):
    """NVRx's launcher, which began as torchrun; it looks as often as torchrun does by default."""

    launcher = "nvidia_resiliency_ext.fault_tolerance.launcher"
    more = ("--monitor-interval=0.1",)


class Torchft(Peer):
    """A lighthouse and four replicas of one rank each. `tend` restarts a replica that dies."""

    def start(self) -> None:
        self._lighthouse = free_port()
        self.spawn(
            "lighthouse",
            "-c",
            LIGHTHOUSE,
            *map(str, HEARTBEATS_MS[self.name]),
            str(self._lighthouse),
        )
        super().start()

    def launch(self, rank: int) -> None:
        self.rank(
            rank,
            "bench.recovery.torchft",
            REPLICA_GROUP_ID=str(rank),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self._lighthouse}",
        )

    def comes_back(self, case: str) -> bool:
        """A stopped replica never exits, so `tend` does not restart it."""
        return case != "dp4_sigstop"

    def tend(self) -> str:
        victim = self.processes[f"rank-{VICTIM_NUM}"]
        if victim.poll() is not None and victim.returncode < 0:
            self.launch(VICTIM_NUM)
        others = [
            process.poll()
            for name, process in self.processes.items()
            if name not in ("lighthouse", f"rank-{VICTIM_NUM}")
        ]
        if all(code is not None for code in others):
            return f"the survivors ended: {self.last_words()}"
        return ""


class Nvrx(Peer):
    """Four processes. After a fault, the remaining ones call the training function again."""

    name = "nvrx"

    def comes_back(self, case: str) -> bool:
        return False

    def launch(self, rank: int) -> None:
        self.rank(rank, "bench.recovery.nvrx")


KINDS: dict[str, type[Peer]] = {
    "bare": Bare,
    "torchrun": Torchrun,
    "torchrun_workaround": Torchrun,
    "torchft_stable": Torchft,
    "torchft_fast": Torchft,
    "nvrx": Nvrx,
    environment.LAUNCHER: NvrxLauncher,
}


def made(name: str, folder: Path) -> System:
    """The system of this name, in a new folder."""
    return Unicron(folder) if name == "unicron" else KINDS[name](folder, name)
