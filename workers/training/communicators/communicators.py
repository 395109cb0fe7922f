"""Generations of communicators: torch.distributed and Megatron's parallel state, up and down again
in one process.

Rules that hold here, each learnt from a hang or a wrong number:
- gloo never gives up on a silent peer; only closing its own sockets wakes it (`wake`).
- Its sockets close when its last reference is gone: `down` takes every handle out first, and is
  never called inside an `except`, whose traceback would keep them.
- Megatron gives its groups 30 minutes and forgets to forget some of them; both are seen to.
- Whoever is woken may open another connection at once: `wake` is repeated until it is awake.
- Whoever waits to be connected to has no socket to close: `wake` connects to it (sockets.knock).
- A store's driver has sockets too, and they are no generation's (`sparing`).
- A collective counts only if nobody had begun to wake this generation when it came back.
- NCCL is woken by an abort. torch then forgets the groups at once, also under whoever is about to
  use one; what runs on the device is waited for, before what it works on is given away.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ....events.spec.model import Axes
from . import process_groups, sockets
from .group_handles import Handles
from .process_groups import GROUP_S_MAX

COLLECTIVE_S_MAX = 1800.0
"""A collective may wait this long: for the slowest member, or for an order to stop waiting."""
RENDEZVOUS_S_MAX = 25.0
"""All members must have come within this; below the control plane's own limit for it."""
CONNECT_S_MAX = 1.0
"""One attempt to connect to a store."""
REACH_S = 0.05
"""Between two attempts to reach a store."""
ABORTED = (KeyError, ValueError)
"""Beside RuntimeError: what torch raises where it is asked for a group that it has aborted."""


class Communicators:
    """This process's place in one generation at a time, and the store that it hosts for others.

    `wake`, `spare` and `sparing` may be called from any thread; everything else from the one that
    trains.
    """

    def __init__(self, host: str, device: torch.device) -> None:
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._listener = socket.create_server((host, 0), backlog=128)
        port: int = self._listener.getsockname()[1]
        self._server = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False,
            master_listen_fd=os.dup(self._listener.fileno()), use_libuv=True,
        )
        self.endpoint = f"{host}:{port}"
        self._server_port = port
        self._mine = sockets.inodes()
        self._drivers: set[sockets.Inode] = set()
        self._trainer = threading.get_ident()
        self._sparing: list[int] = []
        """Threads that use a store's driver now."""
        self._is_watching = False
        self._handles = Handles()
        self.groups: Any = None
        self.generation = 0
        self.place = 0
        self.num_members = 0
        self.axes = Axes()
        self.replica: frozenset[int] = frozenset()
        """The ranks that are one replica with this one, itself too."""
        self.store: Any = None
        self.woken = False
        self._is_building = False
        self.down_s = 0.0
        self.on_groups: Callable[[Any], None] = _nothing
        """Told of every generation's groups once they are up, and of None before they go down:
        whoever has made groups of its own has to drop them then."""

    @property
    def is_up(self) -> bool:
        return dist.is_initialized()

    def meet(self, generation: int, place: int, num_members: int, endpoint: str,
             news: bytes) -> list[bytes]:
        """Connect to the generation's store, say `news`, return everybody's, in order of place.

        Raises RuntimeError when a member does not come within RENDEZVOUS_S_MAX, or when woken.
        """
        assert not self.is_up
        self.generation, self.place, self.num_members = generation, place, num_members
        host, _, port = endpoint.rpartition(":")
        client = self._reach(host, int(port))
        self.store = dist.PrefixStore(f"generation/{generation}", client)
        self.store.set(f"news/{place}", news)
        keys = [f"news/{other}" for other in range(num_members)]
        self.store.wait(keys, datetime.timedelta(seconds=RENDEZVOUS_S_MAX))
        return [self.store.get(key) for key in keys]

    def up(self, axes: Axes | None = None, replica: frozenset[int] = frozenset()) -> None:
        """Build a layout's groups; `bind` puts them into a trainee. Raises RuntimeError.

        `axes` None: all members are data-parallel. `replica`: the ranks of this one's replica.
        """
        assert self.store is not None, "meet first"
        last_words = sys.excepthook
        self._is_building = True
        try:
            dist.init_process_group(
                self.backend, store=self.store, rank=self.place, world_size=self.num_members,
                timeout=datetime.timedelta(seconds=GROUP_S_MAX),
            )
            self.groups = process_groups.build(axes, COLLECTIVE_S_MAX)
        finally:
            self._is_building = False
            # torch puts a hook around this one, once per generation, that holds stderr back until
            # it returns: ours ends the process, and the traceback would never be written.
            sys.excepthook = last_words
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=COLLECTIVE_S_MAX))
        self.axes = axes or Axes(dp=self.num_members)
        self.replica = replica
        self.on_groups(self.groups)

    def bind(self) -> None:
        """Put the groups where `down` took the last ones out: into a trainee that is for the same
        sizes but dp's, at the same place of a replica."""
        self._handles.put(process_groups.by_role(self.groups))

    def lent(self) -> AbstractContextManager[None]:
        """Groups to be held, and never to be used, by the trainee that `down` took them out of."""
        return self._handles.lent(process_groups.by_role(self.groups))

    def rebound(self) -> None:
        """Another trainee is in force: where the last ones were taken out of is of no use."""
        self._handles = Handles()

    def unbind(self, roots: Iterable[Any]) -> None:
        """Take the groups out of what is not, or no more, to be trained."""
        if self.groups is not None:
            Handles().take(roots, process_groups.by_role(self.groups))

    def alone(self) -> Any:
        """Groups of this member alone, in every role."""
        return process_groups.alone(self.groups)

    def _reach(self, host: str, port: int) -> dist.TCPStore:
        """A client of the store. torch's own attempts cannot be woken, so they are kept short."""
        last_s = time.monotonic() + RENDEZVOUS_S_MAX
        while True:
            why = ""
            try:
                socket.create_connection((host, port), timeout=CONNECT_S_MAX).close()
                client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False,
                                       timeout=datetime.timedelta(seconds=CONNECT_S_MAX))
                client.set_timeout(datetime.timedelta(seconds=RENDEZVOUS_S_MAX))
                return client
            except (OSError, RuntimeError) as error:
                why = str(error).splitlines()[0]
            if self.woken or time.monotonic() > last_s:
                raise RuntimeError(f"the store at {host}:{port} cannot be reached: {why}")
            time.sleep(REACH_S)

    def down(self, roots: Iterable[Any]) -> None:
        """Leave the generation, whatever state it is in. Peers that wait for us wake up."""
        began_s = time.monotonic()
        self.wake()
        if self.backend == "nccl":
            torch.cuda.synchronize()
        self.on_groups(None)
        if self.groups is not None:
            self._handles.take(roots, process_groups.by_role(self.groups))
            vars(self.groups).clear()
            self.groups = None
        process_groups.forget()
        if self.is_up:
            dist.destroy_process_group()
        # A group's name, and so its keys in the store, counts the groups made before it: a member
        # whose last attempt failed half-way must count from the same number as the others.
        dist.distributed_c10d._world.group_count = 0
        self.store = None
        self.woken = False
        self.down_s = time.monotonic() - began_s

    @contextmanager
    def of_one(self) -> Generator[list[Any]]:
        """A generation of this member alone; what is put into the list gives its handles up."""
        roots: list[Any] = []
        self.meet(0, 0, 1, self.endpoint, b"")
        self.up()
        try:
            yield roots
        finally:
            self.down(roots)

    @contextmanager
    def spare(self, descriptor: int) -> Generator[None]:
        """Meanwhile this socket is none of a generation's: `wake` leaves it alone."""
        inode = os.fstat(descriptor).st_ino
        self._mine[inode] = descriptor
        try:
            yield
        finally:
            del self._mine[inode]

    @contextmanager
    def sparing(self) -> Generator[None]:
        """What Python connects in here is none of a generation's, for as long as it is open.

        A driver of a store connects from threads of its own too, and keeps a connection for the
        next call. All threads count, but for the one that trains where it is elsewhere.
        """
        if not self._is_watching:
            self._is_watching = True
            sockets.watch(self._connects)
        self._forget_closed()
        self._sparing.append(threading.get_ident())
        try:
            yield
        finally:
            self._sparing.remove(threading.get_ident())

    def _connects(self, inode: sockets.Inode) -> None:
        me = threading.get_ident()
        if self._sparing and (me != self._trainer or me in self._sparing):
            self._drivers.add(inode)

    def _forget_closed(self) -> None:
        """Listed before it is looked which are open: what connects meanwhile is not forgotten."""
        known = tuple(self._drivers)
        for inode in frozenset(known).difference(sockets.inodes()):
            self._drivers.discard(inode)

    def wake(self) -> None:
        """End every wait of this generation in this process, with an error. From any thread."""
        self.woken = True
        if self.backend == "nccl" and self.is_up:
            dist.distributed_c10d._abort_process_group()  # type: ignore[attr-defined, unused-ignore]
        mine = (*self._mine, *self._drivers)
        if self._is_building and self.backend == "gloo":
            sockets.knock(mine, self._server_port, self.num_members)
        sockets.shut_down(mine, self._server_port)


def _nothing(groups: Any) -> None:
    """Nobody has groups of its own."""
