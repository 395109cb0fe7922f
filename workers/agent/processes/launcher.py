"""What a rank is started with, and how: out of the zygote where that can be, else by exec."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, json, structs

from ....events.records.orders import StartRank
from ....events.records.types import Labels
from ...checkpoint_store import protocol
from ...host import linux
from ...ipc.pipe_protocol import FD, LOOP, PULSE
from ...ipc.progress_page import Page
from . import torch_files
from .pipe import Pipe
from .process import Process
from .zygote import Zygote

MARK = "UNICRON_PROCESS"
"""In the environment of everything that an agent starts: whose it is."""
IN_ENVIRONMENT = {"--fd": FD, "--pulse": PULSE}
"""Of what a rank is told by words, a command's variables."""
RANK_ARGV = (sys.executable, "-P", "-m", "unicron.workers.training.rank")


class Node(Struct, frozen=True, kw_only=True):
    """What ranks need to know of their node. `devices` has one entry per slot, or none (CPU)."""

    name: str
    incarnation: int
    cluster: str
    host: str
    num_slots: int
    state_dir: Path
    labels: Labels = Labels()
    devices: tuple[str, ...] = ()
    trace: bool = False
    rank_argv: tuple[str, ...] = RANK_ARGV
    watch: bool = True
    """Whether its ranks' pulse is watched."""
    secret: str = ""
    """What keepers and ranks of the cluster know each other by
    (workers/checkpoint_store/protocol.py)."""

    @property
    def source(self) -> str:
        return f"{self.name}/{self.incarnation}"

    @property
    def mark(self) -> str:
        return mark(self.state_dir, self.name)


def mark(state_dir: Path, node: str) -> str:
    """Begins the MARK of everything that any incarnation of this node starts."""
    return f"{state_dir}:{node}/"


class Starter:
    """Starts the processes of one node's ranks."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._zygote: Zygote | None = None
        if node.rank_argv == RANK_ARGV and linux.adopts_orphans():
            self._zygote = Zygote(os.environ, (MARK, f"{node.mark}{node.incarnation}:zygote"),
                                  node.state_dir / "logs" / f"zygote-{node.name}.log")

    async def prepare(self, order: StartRank) -> None:
        """Before `start`: wait for the zygote, if it is wanted. Takes seconds the first time."""
        if self._zygote is not None and order.spec.train is not None:
            await self._zygote.is_ready()

    def start(self, order: StartRank, pipe: Pipe | None, page: Page | None) -> Process:
        """Start the rank, `pipe` being its way to the agent, `page` what its pulse is read from.

        Raises OSError, ValueError.
        """
        node = self._node
        log_path = (node.state_dir / "logs" / f"{order.task}-{order.spec.name}"
                    / f"rank-{order.rank}.attempt-{order.attempt}.log")
        marker = (MARK, f"{node.mark}{node.incarnation}:{order.task}.{order.rank}.{order.attempt}")
        errors = torch_files.beside(log_path)
        with suppress(OSError):  # of a task that had this number before the log was begun anew
            errors.unlink()
        env = {**environment(order, node, os.environ), torch_files.NAME: str(errors)}
        files = {"--fd": pipe.theirs.fileno()} if pipe is not None else {}
        if page is not None:
            files["--pulse"] = page.fd
        fds = tuple(files.values())
        if order.spec.command:
            told = {IN_ENVIRONMENT[word]: str(fd) for word, fd in files.items()}
            return Process.start(order.spec.command, env=env | told, marker=marker,
                                 log_path=log_path, pass_fds=fds)
        if self._zygote is not None and self._zygote.takes(env):
            return Process.fork(self._zygote, env=env, marker=marker, log_path=log_path,
                                pass_fds=fds)
        words = [word for name, fd in files.items() for word in (name, str(fd))]
        return Process.start((*node.rank_argv, *words), env=env, marker=marker,
                             log_path=log_path, pass_fds=fds)

    def close(self) -> None:
        """End the zygote; what it has forked lives on."""
        if self._zygote is not None:
            self._zygote.close()


def environment(order: StartRank, node: Node, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a rank is started with: all that the agent has, and what its tier asks for."""
    env = {"PYTHONUNBUFFERED": "1", **inherited}
    env |= {"UNICRON_HOST": node.host, "UNICRON_NODE": node.name,
            "UNICRON_TASK": str(order.task), "UNICRON_RANK": str(order.rank),
            "UNICRON_ATTEMPT": str(order.attempt)}
    if node.trace:
        env.setdefault("UNICRON_TRACE_DIR", str(node.state_dir / "trace"))
    if order.spec.training is not None:
        env[protocol.SECRET] = node.secret
    if order.spec.command:
        env |= {"RANK": str(order.rank), "WORLD_SIZE": str(order.num_seats),
                "LOCAL_RANK": str(order.slot.index), "MASTER_ADDR": order.host,
                "MASTER_PORT": str(order.port)}
        if order.axes is not None:
            env |= {f"UNICRON_{name.upper()}": str(value)
                    for name, value in structs.asdict(order.axes).items()}
        if order.spec.loop is not None:
            if not node.devices:
                env.setdefault("OMP_NUM_THREADS", "1")
            if order.spec.training is None:
                env[LOOP] = json.encode(order.spec.loop).decode()
    elif node.devices:
        env["CUDA_VISIBLE_DEVICES"] = node.devices[order.slot.index]
    else:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("OMP_NUM_THREADS", "1")
    return env
