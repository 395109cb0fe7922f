"""The handles of communicators that Megatron's objects keep: taken out, and put back by role.

gloo closes its sockets only when the last reference to a group is gone, and a model, its DDP and
its optimizer keep dozens. Before a generation ends every handle is taken out and remembered by
its role (`dp`, `tp`, ...); in the next generation that role's new group is put in its place.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

_LEAVES = (torch.Tensor, str, bytes, int, float, bool, type, type(None))
_OWNERS = ("megatron", "torch", "unicron")

Slot = tuple[Any, Any, str]
"""A dict or a list, the key or index in it, and the role of the handle that belongs there."""


class Handles:
    """The handles taken out of one trainee, waiting for the next generation."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, roots: Iterable[Any], groups: dict[str, Any]) -> None:
        """Take every handle out. A handle of no known role is a bug."""
        roles: dict[int, str] = {}
        for role, group in groups.items():
            roles.setdefault(id(group), role)
        seen: set[int] = set()
        for root in roots:
            self._walk(root, roles, seen)

    def put(self, groups: dict[str, Any]) -> None:
        """Put the new generation's groups where the old ones were."""
        for container, key, role in self._slots:
            container[key] = groups[role]
        self._slots.clear()

    @contextmanager
    def lent(self, groups: dict[str, Any]) -> Generator[None]:
        """For a while, though the generation's layout may be another one: nobody is to be met."""
        try:
            for container, key, role in self._slots:
                container[key] = groups[role]
            yield
        finally:
            for container, key, _ in self._slots:
                container[key] = None

    def _walk(self, root: Any, roles: dict[int, str], seen: set[int]) -> None:
        todo: list[Any] = [root]
        while todo:
            thing = todo.pop()
            if isinstance(thing, _LEAVES) or id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, dict):
                todo.extend(self._cells(thing, list(thing.items()), roles))
            elif isinstance(thing, list):
                todo.extend(self._cells(thing, list(enumerate(thing)), roles))
            elif isinstance(thing, (tuple, set, frozenset)):
                for value in thing:
                    assert not isinstance(value, dist.ProcessGroup), "a handle in a tuple"
                    todo.append(value)
            elif isinstance(thing, MethodType):
                todo.append(thing.__self__)
            elif type(thing).__module__.split(".")[0] in _OWNERS and hasattr(thing, "__dict__"):
                todo.append(vars(thing))

    def _cells(self, container: Any, cells: list[tuple[Any, Any]], roles: dict[int, str]
               ) -> list[Any]:
        deeper: list[Any] = []
        for key, value in cells:
            if isinstance(value, dist.ProcessGroup):
                self._slots.append((container, key, roles[id(value)]))
                container[key] = None
            else:
                deeper.append(value)
        return deeper
