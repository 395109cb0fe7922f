"""Counts what this process enters in each of its groups, for the agent that watches it.

Every collective and message that Python starts goes through a method of torch's ProcessGroup: those
of the step (operations.py), of Megatron, of a loop, of FSDP2. These methods are wrapped, once for
the process, and not the functions of torch.distributed: libraries keep those under names of their
own (Megatron's `dist_all_gather_func`), and compare them (`P2POp`). The wait for the end of an
operation is wrapped too.

Not counted is what torch starts in C++: functional collectives (`torch.ops._c10d_functional`,
DTensor) and the reducer of DistributedDataParallel. Who waits there looks like one that works, but
nobody is seen to wait for it there either.

There is no lock: a group is used by one thread at a time.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...ipc.group_rows import KINDS, ROLES, Row, RowsWriter, group_of
from ..dependencies.private_torch import COLLECTIVES

MESSAGES: Mapping[str, str] = {"send": "send", "recv": "receive"}
"""Their second argument is the peer's place in the group. `recv_anysource` has none: it is not
counted."""
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Counting:
    """The counts of one generation."""

    def __init__(self, rows: RowsWriter, roles: Mapping[str, str]) -> None:
        self._rows = rows
        self._roles = roles
        """Name of a group in torch -> its role."""
        self._groups: dict[str, Row | None] = {}
        """None: it has one member."""
        self._peers: dict[tuple[str, int, int], Row] = {}
        self._synchronous: dict[int, Row] = {}
        """By thread: of the operation that it entered last, if it waits for it at once."""
        self._waits: dict[int, int] = {}
        """The threads that wait for an operation."""

    def enter(self, group: Any, kind: int, args: tuple[Any, ...]) -> None:
        """A collective is about to be started."""
        name = group.group_name
        try:
            row = self._groups[name]
        except KeyError:
            row = self._groups[name] = self._row_of(group, name)
        if row is None:
            return
        self._rows.enter(row, kind, _num_bytes(args))
        if args and getattr(args[-1], "asyncOp", True) is False:
            self._synchronous[threading.get_ident()] = row

    def exchange(self, group: Any, kind: int, args: tuple[Any, ...]) -> None:
        """A message is about to be sent to, or received from, one peer."""
        if len(args) < 2:
            return
        key = (group.group_name, args[1], kind)
        row = self._peers.get(key)
        if row is None:
            place = dist.get_process_group_ranks(group)[args[1]]
            row = Row(group_of(key[0], (place,)), self._role(key[0]))
            self._peers[key] = row
        self._rows.enter(row, kind, _num_bytes(args))

    def begin_wait(self) -> None:
        """This thread begins to wait for the end of an operation."""
        self._waits[threading.get_ident()] = 1
        if _current is self:
            self._rows.set_waits(len(self._waits))

    def end_wait(self) -> None:
        thread = threading.get_ident()
        self._waits.pop(thread, None)
        row = self._synchronous.pop(thread, None)
        if _current is self:
            self._rows.set_waits(len(self._waits))
            if row is not None:
                self._rows.leave(row, row.entered)

    def _row_of(self, group: Any, name: str) -> Row | None:
        if group.size() == 1:
            return None
        return Row(group_of(name, dist.get_process_group_ranks(group)), self._role(name))

    def _role(self, name: str) -> int:
        role = self._roles.get(name, "")
        return ROLES.index(role) if role in ROLES else 0


_rows: RowsWriter | None = None
_current: Counting | None = None
_is_installed = False


def count_in(rows: RowsWriter | None) -> None:
    """Count all operations of this process in these rows of its page; None: it has none."""
    global _rows
    _rows = rows


def begin(groups: Mapping[str, Any]) -> None:
    """A generation begins. `groups`: by role. Without rows nothing is counted."""
    global _current
    if _rows is None:
        _current = None
        return
    _install()
    _rows.clear()
    # Of the roles that share a group, the first in the order of ROLES is the one that counts.
    roles = {
        groups[role].group_name: role for role in reversed(ROLES) if groups.get(role) is not None
    }
    _current = Counting(_rows, roles)


def end() -> None:
    """The generation ends: what an abandoned thread still starts does not count."""
    global _current
    _current = None


@contextmanager
def paused() -> Generator[None]:
    """In this context nothing is counted: its groups have no connections."""
    global _current
    before, _current = _current, None
    try:
        yield
    finally:
        _current = before


def _install() -> None:
    """Wrap the methods, once for the process."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    methods: Any = dist.ProcessGroup
    for names, count in ((COLLECTIVES, Counting.enter), (MESSAGES, Counting.exchange)):
        for name, kind in names.items():
            if (original := getattr(methods, name, None)) is not None:
                setattr(methods, name, _counted(original, NUMBERS[kind], count))
    work: Any = dist.Work
    work.wait = _waited(work.wait)


def _counted(
    original: Callable[..., Any],
    kind: int,
    count: Callable[[Counting, Any, int, tuple[Any, ...]], None],
) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **options: Any) -> Any:
        if _current is not None:
            count(_current, group, kind, (*args, *options.values()) if options else args)
        return original(group, *args, **options)

    return call


def _waited(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **options: Any) -> Any:
        counting = _current
        if counting is None:
            return original(work, *args, **options)
        counting.begin_wait()
        try:
            return original(work, *args, **options)
        finally:
            counting.end_wait()

    return wait


def _num_bytes(args: tuple[Any, ...]) -> int:
    """Of the first tensor of a call."""
    value = args[0] if args else None
    while type(value) is list:
        value = value[0] if value else None
    return value.nbytes if type(value) is Tensor else getattr(value, "nbytes", 0)
