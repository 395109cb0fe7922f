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
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from ....events import network_address
from ....events.errors import UsageError
from ....events.spec.model import Axes
from ....events.spec.parallelism import num_positions
from ....events.timing import RENDEZVOUS_S_MAX
from ....events.words import install
from ..dependencies import private_megatron, private_torch
from . import counting, messages, process_groups, sockets
from .group_handles import Handles
from .nccl_errors import NcclError, NcclErrors
from .operations import Operations
from .process_groups import GROUP_S_MAX
from .rounds import Rounds

# --- Aborts of NCCL groups ---
#
# An abort waits until NCCL has ended its own threads, measured 1.0 s for each communicator (NCCL
# 2.28, H200). So a thread of its own aborts each group. The memory of a communicator is free only
# after its abort.
#
# Within a node NCCL's ranks use each other's memory. If one frees it while another's kernels run,
# these fail with an illegal access, and its CUDA context is lost (NVIDIA/nccl#863). So the ranks of
# a node first tell each other that they leave.

COMMUNICATOR_BYTES = 512 << 20
"""GPU memory of a communicator, rounded up: 388 MiB measured with NCCL 2.28 on an H200."""


class NcclAborts:
    """The aborts of this process. Any thread may call `begin`. `errors`: what NCCL tells of the
    groups until then. `meet`: called in a thread with the generation before its groups are aborted;
    returns when the other ranks of this node are about to do the same, or after a limit."""

    def __init__(self, errors: NcclErrors, meet: Callable[[int], object]) -> None:
        self.errors = errors
        self._meet = meet
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def begin(self, generation: int) -> None:
        """Take all groups out of torch, and abort each. Returns at once."""
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            groups, met = private_torch.take_groups(), threading.Event()
            for group in groups:
                thread = threading.Thread(
                    target=_abort, args=(group, met), name="abort", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        if groups:
            threading.Thread(
                target=self._meet_others, args=(generation, met), name="leave", daemon=True
            ).start()

    def _meet_others(self, generation: int, met: threading.Event) -> None:
        try:
            self._meet(generation)
        finally:
            met.set()

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


def _abort(group: Any, met: threading.Event) -> None:
    met.wait()
    group.abort()


COLLECTIVE_S_MAX = 1800.0
"""Timeout of a collective. It covers the slowest member and the wait for the next order."""
SETTLE_S_MAX = 20 * 86400.0
"""The same while members recover their states: the control plane ends this wait when nothing moves
any more, however long that takes. torch counts it as milliseconds in 32 bits."""
CONNECT_S_MAX = 1.0
"""Timeout of one attempt to connect to a store."""
REACH_S = 0.05
"""Pause between two attempts to connect to a store."""
BACKEND = "UNICRON_BACKEND"
"""Environment variable: `gloo` also on a GPU. For two ranks on one GPU, which NCCL may refuse."""
ABORTED = (KeyError, ValueError)
"""Exceptions, besides RuntimeError, that torch raises when an aborted group is used."""


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
    the training thread may call other methods than `interrupt` and `ending`."""

    def __init__(
        self,
        host: str,
        device: torch.device,
        tell_error: Callable[[int, NcclError], None] = lambda generation, error: None,
        meet_before_abort: Callable[[int], object] = lambda generation: None,
    ) -> None:
        """`tell_error`: called in another thread, at most once for each generation, with the first
        error that NCCL reports of it. `meet_before_abort`: as in NcclAborts."""
        self._device = device
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
        self._ends = sockets.Ends()
        self._naming_store: sockets.NamingStore | None = None
        """Kept as long as the groups, which do not keep what is Python's of it."""
        self._ending: set[socket.socket] = set()
        self._handles = Handles()
        self._nccl_aborts = NcclAborts(NcclErrors(tell_error, device), meet_before_abort)
        self._operations: Operations | None = None
        self.generation = 0
        self.place = 0
        self.num_members = 0
        self.axes = Axes()
        self.replica: frozenset[int] = frozenset()
        """The ranks of this member's replica, its own included."""
        self._client: Any = None
        self._rounds: Rounds | None = None
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
    def rounds(self) -> Rounds:
        """The rounds of the current generation, whose members have met."""
        assert self._rounds is not None
        return self._rounds

    @property
    def is_up(self) -> bool:
        return dist.is_initialized()

    def meet(
        self, generation: int, place: int, num_members: int, endpoint: str, news: bytes
    ) -> list[bytes]:
        """Rendezvous: connect to the generation's store. Returns the `news` of all members, by
        place. Raises RuntimeError if a member is missing after RENDEZVOUS_S_MAX, or if
        interrupted."""
        assert not self.is_up
        self.generation, self.place, self.num_members = generation, place, num_members
        self._ends = sockets.Ends()
        self._client = self._reach(*network_address.split_endpoint(endpoint))
        store = dist.PrefixStore(f"generation/{generation}", self._client)
        self._rounds = Rounds(store, place, num_members, "round")
        return Rounds(store, place, num_members, "meet", RENDEZVOUS_S_MAX).gather(news)

    def up(self, axes: Axes, replica: frozenset[int] = frozenset()) -> dict[str, float]:
        """Build the groups of a layout. `replica`: its ranks. Returns the seconds of each, by role,
        in order; NCCL builds a communicator only when it is first used. Raises RuntimeError,
        UsageError."""
        if self.backend == "nccl":
            self._nccl_aborts.make_room()
        self._is_building = True
        began_s = time.monotonic()
        try:
            self._build_world()
            costs = {"world": time.monotonic() - began_s}
            self._operations = Operations(process_groups.build(axes, COLLECTIVE_S_MAX, costs))
        finally:
            self._is_building = False
        if self.backend == "gloo" and not self._ends.listeners:
            raise UsageError(
                f"torch {torch.__version__} does not tell where gloo listens: its connections "
                "cannot be told from others",
                f"{install('train')} brings a torch that does",
            )
        self._limit_collectives(COLLECTIVE_S_MAX)
        groups = {"world": dist.group.WORLD, **process_groups.by_role(self.groups)}
        counting.begin(groups)
        if self.backend == "nccl":
            self._wait_for_first_uses()
            self._nccl_aborts.errors.watch(self.generation, groups)
        self.axes = axes
        self.replica = replica
        self.on_groups(self.groups)
        return costs

    def _build_world(self) -> None:
        with _same_excepthook():
            dist.init_process_group(
                self.backend,
                store=self._store_of_groups(),
                rank=self.place,
                world_size=self.num_members,
                timeout=datetime.timedelta(seconds=GROUP_S_MAX),
                device_id=self._device if self.backend == "nccl" else None,
            )
        if self.backend == "nccl":
            # Else torch would make each smaller group by a split of this one, in which all members
            # have to take part; and a split in a second generation ends the process
            # (pytorch#192109). A group is built by its own members.
            world: Any = dist.group.WORLD
            world.bound_device_id = None

    def _wait_for_first_uses(self) -> None:
        """NCCL connects a group when it is used first, by the store: a later stage of a pipeline
        waits there for the first forward of the earlier ones, with all that they compile."""
        self._client.set_timeout(datetime.timedelta(seconds=COLLECTIVE_S_MAX))

    def _store_of_groups(self) -> Any:
        """The store with which groups are built. NCCL's waits end by an abort, and torch asks its
        store from threads that must not wait for Python."""
        if self.backend != "gloo":
            return self.rounds.store
        self._naming_store = sockets.NamingStore(self.rounds.store, self._ends)
        return self._naming_store

    @contextmanager
    def settling(self) -> Generator[None]:
        """Within this context the members recover their states: collectives of the world wait for
        the slowest one of them."""
        self._limit_collectives(SETTLE_S_MAX)
        yield
        self._limit_collectives(COLLECTIVE_S_MAX)  # unless an error has ended the generation

    def _limit_collectives(self, timeout_s: float) -> None:
        private_torch.set_timeout(timeout_s)
        messages.wait_up_to(timeout_s if self.backend == "gloo" else None)

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
                self._ends.add_store(host, port)
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
        self._rounds = self._client = self._naming_store = None

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
    def ending(self, connection: socket.socket) -> Generator[None]:
        """Within the context, `interrupt` shuts this connection down as well."""
        self._ending.add(connection)
        try:
            yield
        finally:
            self._ending.discard(connection)

    def interrupt(self) -> None:
        """End every wait of this process in this generation with an error. Connections of others
        stay."""
        self.woken = True
        self._nccl_aborts.errors.forget()
        if self.backend == "nccl" and self.is_up:
            self._nccl_aborts.begin(self.generation)
        ends = self._ends
        if self._is_building and self.backend == "gloo":
            sockets.connect_to_listeners(ends, self.num_members)
        sockets.shut_down(ends)
        for connection in tuple(self._ending):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
