"""The list of private parts that Unicron reaches, and whether an installed version has them.

A part is a name that a dependency does not promise: one with a leading underscore, or an attribute
that its own code alone uses. Each function that reaches one says so by `reaches`.
tests/house/test_house.py holds that no other file has one of these names.
"""

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Part(NamedTuple):
    """`names`: alternatives, each a name in the module or `Class.attribute`. One must exist."""

    module: str
    names: tuple[str, ...]


PARTS: list[Part] = []


def reaches(module: str, *names: str) -> Callable[[T], T]:
    """Decorate what reaches these names of `module`. Of `a or b`, one must exist."""
    PARTS.extend(Part(module, tuple(name.split(" or "))) for name in names)
    return lambda reaching: reaching


def missing(package: str) -> list[str]:
    """The parts that the installed version of this top package does not have. Imports modules."""
    return [
        f"{part.module}.{' or '.join(part.names)}"
        for part in PARTS
        if part.module.partition(".")[0] == package
        and not any(_exists(part.module, name) for name in part.names)
    ]


def _exists(module: str, name: str) -> bool:
    try:
        found: Any = import_module(module)
    except ImportError:
        return False
    for step in name.split("."):
        if not hasattr(found, step):
            return isinstance(found, type) and _is_set(found, step)
        found = getattr(found, step)
    return True


def _is_set(kind: type, attribute: str) -> bool:
    """Whether a method of the class uses this attribute: its instances have it, not the class."""
    return any(
        attribute in method.__code__.co_names
        for each in kind.__mro__
        for method in vars(each).values()
        if isinstance(method, FunctionType)
    )
