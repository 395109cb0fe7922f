"""What changes in a graph of objects: every number, text and tensor in it, by its path."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device,
         torch.Size)
UNSEEN = (type, ModuleType, FunctionType)


def leaves(roots: dict[str, Any]) -> dict[str, Any]:
    """Path -> value of all that can be reached; of a tensor its address and its digest."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    todo = list(roots.items())[::-1]
    while todo:
        path, thing = todo.pop()
        if isinstance(thing, PLAIN):
            found[path] = thing
        elif id(thing) not in seen and not isinstance(thing, UNSEEN):
            seen[id(thing)] = thing  # kept, so that no other is given its id
            if isinstance(thing, torch.Tensor):
                found[path] = (thing.data_ptr(), digest(thing))
            elif isinstance(thing, torch.Generator):
                found[path] = digest(thing.get_state())
            todo += [(f"{path}{step}", inner) for step, inner in inside(thing)][::-1]
    return found


def inside(thing: Any) -> list[tuple[str, Any]]:
    """What a thing consists of, each with its step from there."""
    if isinstance(thing, dict):
        return [(f"[{key if isinstance(key, PLAIN) else number}]", value)
                for number, (key, value) in enumerate(thing.items())]
    if isinstance(thing, (list, tuple, deque)):
        return [(f"[{number}]", value) for number, value in enumerate(thing)]
    if isinstance(thing, MethodType):
        return [(".__self__", thing.__self__)]
    parts = [(f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items()]
    if isinstance(thing, torch.Tensor) and thing.grad is not None:
        parts.append((".grad", thing.grad))
    return parts


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths that are in one alone, or whose content is another."""
    def content(value: Any) -> Any:
        return value[1] if isinstance(value, tuple) else value

    return sorted(path for path in before.keys() | after.keys()
                  if path not in before or path not in after
                  or content(before[path]) != content(after[path]))
