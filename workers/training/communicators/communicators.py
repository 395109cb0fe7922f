"""Generations of communicators: builds and destroys torch.distributed and Megatron's parallel
state within one process.

docs/decisions/recovery-traps.md has the hangs and wrong results that the rules avoid. A thread may
open another connection: callers repeat `interrupt` until its wait returns. Never call `down` inside
an `except`: tracebacks keep references to groups. The result of a collective is valid only if it
returned before `interrupt` began.
"""

import datetime
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from ....events import network_address
from ....events.decoding import from_msgpack
from ....events.spec.model import Axes
from ....events.spec.parallelism import num_positions
from ....events.timing import RENDEZVOUS_S_MAX
from ..dependencies import private_megatron, private_torch
from . import counting, messages, process_groups, sockets
from .group_handles import Handles
from .nccl_errors import NcclError, NcclErrors
from .operations import Operations
from .process_groups import GROUP_S_MAX

# --- Aborts of NCCL groups ---
#
# An abort waits until NCCL has ended its own threads, measured 1.0 s for each communicator (NCCL
# 2.28, H200). So a thread of its own aborts each group. The memory of a communicator is free only
# after its abort.

COMMUNICATOR_BYTES = 512 << 20
"""GPU memory of a communicator, rounded up: 388 MiB measured with NCCL 2.28 on an H200."""


class NcclAborts:
    """The aborts of this process. Any thread may call `begin`. `errors`: what NCCL tells of the
    groups until then."""

    def __init__(self, errors: NcclErrors) -> None:
        self.errors = errors
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


COLLECTIVE_S_MAX = 1800.0
"""Timeout of a collective. It covers the slowest member and the wait for the next order."""
CONNECT_S_MAX = 1.0
"""Timeout of one attempt to connect to a store."""
REACH_S = 0.05
"""Pause between two attempts to connect to a store."""
BACKEND = "UNICRON_BACKEND"
"""Environment variable: `gloo` also on a GPU. For two ranks on one GPU, which NCCL may refuse."""
ABORTED = (KeyError, ValueError)
"""Exceptions, besides RuntimeError, that torch raises when an aborted group is used."""


def pack_news(news: Sequence[bytes]) -> bytes:
    """The news of all members as one value. Most are alike, so that little is left of them."""
    return zlib.compress(msgspec.msgpack.encode(news), level=1)


def unpack_news(data: bytes) -> list[bytes]:
    return from_msgpack(zlib.decompress(data), list[bytes])


@contextmanager
def _same_excepthook() -> Generator[None]:
    """Restores sys.excepthook at the end. With each world torch wraps it, and buffers stderr until
    the wrapped hook returns. The rank's hook ends the process, so the traceback would be lost."""
    excepthook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = excepthook


def _unconnected(axes: Axes, place: int) -> Any:
    """Groups with the sizes and ranks of a position in a layout, but without connections."""
    with _same_excepthook():
        dist.init_process_group(
            "fake", store=private_torch.fake_store(), rank=place, world_size=num_positions(axes)
        )
    return process_groups.build(axes, COLLECTIVE_S_MAX)


@contextmanager
def group_of_one() -> Generator[None]:
    """Within this context, before there are generations, torch.distributed and Megatron's parallel
    state are those of a process without peers: for code that asks for its rank, or waits at a
    barrier. Nothing is left of them."""
    with _same_excepthook():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = process_groups.build(Axes(), COLLECTIVE_S_MAX)
    private_megatron.publish_globals(groups, 1)
    try:
        yield
    finally:
        vars(groups).clear()
        private_megatron.clear_globals()
        dist.destroy_process_group()
        private_torch.restart_group_names()


class Communicators:
    """This process's communicators of one generation at a time, and the store that it hosts. Only
    the training thread may call other methods than `interrupt`, `spare`, `exclude_new_sockets`."""

    def __init__(
        self,
        host: str,
        device: torch.device,
        tell_error: Callable[[int, NcclError], None] = lambda generation, error: None,
    ) -> None:
        """`tell_error`: called in another thread, at most once for each generation, with the first
        error that NCCL reports of it."""
        self.backend = os.environ.get(BACKEND) or ("nccl" if device.type == "cuda" else "gloo")
        self._listener = network_address.listen(host)
        port: int = self._listener.getsockname()[1]
        self._server = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(self._listener.fileno()),
            use_libuv=True,
        )
        self.endpoint = network_address.endpoint(host, port)
        self._server_port = port
        self._excluded = sockets.inodes()
        self._driver_sockets: set[sockets.Inode] = set()
        self._training_thread = threading.get_ident()
        self._excluding_threads: list[int] = []
        """Threads that are using a storage driver."""
        self._is_watching = False
        self._handles = Handles()
        self._nccl_aborts = NcclAborts(NcclErrors(tell_error, device))
        self._operations: Operations | None = None
        self.generation = 0
        self.place = 0
        self.num_members = 0
        self.axes = Axes()
        self.replica: frozenset[int] = frozenset()
        """The ranks of this member's replica, its own included."""
        self.store: Any = None
        self.woken = False
        self._is_building = False
        self.down_s = 0.0
        self.on_groups: Callable[[Any], None] = lambda groups: None
        """Called with each generation's groups, and with None before they are destroyed; it must
        then drop its own."""

    @property
    def operations(self) -> Operations:
        """The operations of the current generation, which is up."""
        assert self._operations is not None
        return self._operations

    def is_current(self, operations: Operations) -> bool:
        """Whether these are of the generation that is up."""
        return self._operations is operations

    @property
    def groups(self) -> Any:
        """The ProcessGroupCollection of the current generation; None: there is none."""
        return None if self._operations is None else self._operations.groups

    @property
    def is_up(self) -> bool:
        return dist.is_initialized()

    def meet(
        self, generation: int, place: int, num_members: int, endpoint: str, news: bytes
    ) -> list[bytes]:
        """Rendezvous: connect to the generation's store. Returns the `news` of all members, by
        place: place 0 collects them, so that each other sets one key and reads one. Raises
        RuntimeError if a member is missing after RENDEZVOUS_S_MAX, or if interrupted."""
        assert not self.is_up
        self.generation, self.place, self.num_members = generation, place, num_members
        client = self._reach(*network_address.split_endpoint(endpoint))
        self.store = dist.PrefixStore(f"generation/{generation}", client)
        self.store.set(f"news/{place}", news)
        if place == 0:
            keys = [f"news/{other}" for other in range(num_members)]
            self.store.wait(keys, datetime.timedelta(seconds=RENDEZVOUS_S_MAX))
            self.store.set("news", pack_news(self.store.multi_get(keys)))
        return unpack_news(self.store.get("news"))

    def up(self, axes: Axes, replica: frozenset[int] = frozenset()) -> None:
        """Build the groups of a layout. `replica`: its ranks. Raises RuntimeError."""
        assert self.store is not None, "rendezvous first"
        self._nccl_aborts.make_room()
        self._is_building = True
        try:
            with _same_excepthook():
                dist.init_process_group(
                    self.backend,
                    store=self.store,
                    rank=self.place,
                    world_size=self.num_members,
                    timeout=datetime.timedelta(seconds=GROUP_S_MAX),
                )
            self._operations = Operations(process_groups.build(axes, COLLECTIVE_S_MAX))
        finally:
            self._is_building = False
        private_torch.set_timeout(COLLECTIVE_S_MAX)
        messages.wait_up_to(COLLECTIVE_S_MAX if self.backend == "gloo" else None)
        groups = {"world": dist.group.WORLD, **process_groups.by_role(self.groups)}
        counting.begin(groups)
        if self.backend == "nccl":
            self._nccl_aborts.errors.watch(self.generation, groups)
        self.axes = axes
        self.replica = replica
        self.on_groups(self.groups)

    def bind(self) -> None:
        """Put the new groups into the slots that `down` emptied. The model must be for the same
        sizes, except dp, and the same position in a replica."""
        self._handles.put(process_groups.by_role(self.groups))

    def borrow_groups(self) -> AbstractContextManager[None]:
        """A context in which the old model holds the new groups. The model must not use them."""
        return self._handles.borrow_groups(process_groups.by_role(self.groups))

    def discard_handles(self) -> None:
        """Discard the slots of a model that was replaced."""
        self._handles = Handles()

    def unbind(self, roots: Iterable[Any]) -> None:
        """Remove the groups from a model that will not be trained."""
        if self.groups is not None:
            Handles().take(roots, process_groups.by_role(self.groups))

    def alone(self) -> Any:
        """Single-member groups for every role."""
        return ProcessGroupCollection(**dict.fromkeys(process_groups.ROLES, self.groups.cp))

    def _reach(self, host: str, port: int) -> dist.TCPStore:
        """Connect to the store. Each attempt of torch is short: it cannot be interrupted."""
        last_s = time.monotonic() + RENDEZVOUS_S_MAX
        while True:
            try:
                socket.create_connection((host, port), timeout=CONNECT_S_MAX).close()
                client = dist.TCPStore(
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=datetime.timedelta(seconds=CONNECT_S_MAX),
                )
                client.set_timeout(datetime.timedelta(seconds=RENDEZVOUS_S_MAX))
                return client
            except (OSError, RuntimeError) as error:
                why = str(error).splitlines()[0]
            if self.woken or time.monotonic() > last_s:
                raise RuntimeError(f"the store at {host}:{port} cannot be reached: {why}")
            time.sleep(REACH_S)

    def down(self, roots: Iterable[Any]) -> None:
        """Leave the generation, even a failed one. Peers that wait for this member get an error."""
        began_s = time.monotonic()
        self.interrupt()
        if self.backend == "nccl":
            torch.cuda.synchronize()
        self._remove_groups(roots)
        self.woken = False
        self.down_s = time.monotonic() - began_s

    def _remove_groups(self, roots: Iterable[Any]) -> None:
        counting.end()
        self.on_groups(None)
        if self._operations is not None:
            self._handles.take(roots, process_groups.by_role(self.groups))
            self._operations.close()
            vars(self.groups).clear()
            self._operations = None
        private_megatron.clear_globals()
        if self.is_up:
            dist.destroy_process_group()
        # Names and store keys of groups contain a counter. All members must restart it, because
        # the counters differ if some member's last attempt failed half-way.
        private_torch.restart_group_names()
        self.store = None

    @contextmanager
    def without_peers(self, axes: Axes, place: int) -> Generator[list[Any]]:
        """Groups with the sizes and ranks of a position in a layout, but without connections, to
        build a model before the peers exist. At the end, they are removed from the objects that
        were put into the list. `bind` puts a generation's groups in their place."""
        roots: list[Any] = []
        self._operations = Operations(_unconnected(axes, place))
        self.on_groups(self.groups)
        try:
            yield roots
        finally:
            self._remove_groups(roots)

    @contextmanager
    def at_position(self, axes: Axes, place: int) -> Generator[Any]:
        """Groups as `without_peers`, but also while a generation is up: to build the part of a
        position in any layout. Megatron's globals are restored at the end."""
        with (
            counting.paused(),
            private_torch.separate_groups(),
            private_megatron.globals_restored(),
        ):
            yield _unconnected(axes, place)

    @contextmanager
    def spare(self, descriptor: int) -> Generator[None]:
        """Within the context, `interrupt` does not shut this socket down."""
        inode = os.fstat(descriptor).st_ino
        self._excluded[inode] = descriptor
        try:
            yield
        finally:
            del self._excluded[inode]

    @contextmanager
    def exclude_new_sockets(self) -> Generator[None]:
        """Connections that Python code opens within the context belong to no generation until they
        close: also those of a storage driver's own threads, but of the training thread only within
        its own context."""
        if not self._is_watching:
            self._is_watching = True
            sockets.watch_connections(self._on_connect)
        # Copy the set before the open sockets are listed, so that a socket opened meanwhile stays.
        known = tuple(self._driver_sockets)
        for inode in frozenset(known).difference(sockets.inodes()):
            self._driver_sockets.discard(inode)
        self._excluding_threads.append(threading.get_ident())
        try:
            yield
        finally:
            self._excluding_threads.remove(threading.get_ident())

    def _on_connect(self, inode: sockets.Inode) -> None:
        thread, excluding = threading.get_ident(), self._excluding_threads
        if excluding and (thread != self._training_thread or thread in excluding):
            self._driver_sockets.add(inode)

    def interrupt(self) -> None:
        """End every wait of this process in this generation with an error."""
        self.woken = True
        self._nccl_aborts.errors.forget()
        if self.backend == "nccl" and self.is_up:
            self._nccl_aborts.begin()
        excluded = (*self._excluded, *self._driver_sockets)
        if self._is_building and self.backend == "gloo":
            sockets.connect_to_listeners(excluded, self._server_port, self.num_members)
        sockets.shut_down(excluded, self._server_port)
