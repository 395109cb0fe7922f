"""Removes the process-group handles from Megatron's objects and puts new ones in, by role.

gloo closes the sockets of a group only when the last reference to it is gone. Before a generation
ends, every handle is removed, and its slot is recorded with its role (`dp`, `tp`, ...), for the
next generation's group.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

_LEAVES = (torch.Tensor, str, bytes, int, float, bool, type, type(None))
_OWNERS = ("megatron", "torch", "transformer_engine", "unicron")

Slot = tuple[Any, Any, str]
"""A dict or list, the key or index in it, and the role of the handle."""


class Handles:
    """The emptied handle slots of one model."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def take(self, roots: Iterable[Any], groups: dict[str, Any]) -> None:
        """Remove every handle. Raises KeyError for a handle without a known role: that is a bug."""
        roles = {id(group): role for role, group in reversed(groups.items())}
        seen: set[int] = set()
        stack = [*roots]
        while stack:
            item = stack.pop()
            if isinstance(item, _LEAVES) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, dict):
                stack.extend(self._cells(item, list(item.items()), roles))
            elif isinstance(item, list):
                stack.extend(self._cells(item, list(enumerate(item)), roles))
            elif isinstance(item, (tuple, set, frozenset)):
                for value in item:
                    assert not isinstance(value, dist.ProcessGroup), "a handle in a tuple"
                    stack.append(value)
            elif isinstance(item, MethodType):
                stack.append(item.__self__)
            elif type(item).__module__.split(".")[0] in _OWNERS and hasattr(item, "__dict__"):
                stack.append(vars(item))

    def put(self, groups: dict[str, Any]) -> None:
        for container, key, role in self._slots:
            container[key] = groups[role]
        self._slots.clear()

    @contextmanager
    def borrow_groups(self, groups: dict[str, Any]) -> Generator[None]:
        """Fill the slots within the context. No collective may run, as the layout may differ."""
        try:
            for container, key, role in self._slots:
                container[key] = groups[role]
            yield
        finally:
            for container, key, _ in self._slots:
                container[key] = None

    def _cells(
        self, container: Any, cells: list[tuple[Any, Any]], roles: dict[int, str]
    ) -> list[Any]:
        deeper: list[Any] = []
        for key, value in cells:
            if isinstance(value, dist.ProcessGroup):
                self._slots.append((container, key, roles[id(value)]))
                container[key] = None
            else:
                deeper.append(value)
        return deeper
