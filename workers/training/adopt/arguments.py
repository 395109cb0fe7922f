"""Checks the arguments of `adopt`; a wrong one is reported in one line.

This module imports neither torch nor Megatron.
"""

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from ....events.errors import UsageError
from ....events.spec.job import Reproducible
from ...ipc.pipe_protocol import FD
from ..rank import connect_agent, preload

Loss = Literal["per_token", "per_micro_batch"]
P = ParamSpec("P")
T = TypeVar("T")


def check_arguments(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate `call`: an unknown or missing argument raises UsageError instead of TypeError."""
    signature = inspect.signature(call)

    @wraps(call)
    def checked(*args: P.args, **given: P.kwargs) -> T:
        try:
            signature.bind(*args, **given)
        except TypeError as error:
            with usage_errors_reported():
                if FD in os.environ:
                    connect_agent(int(os.environ[FD]))
                takes = f"it takes {', '.join(signature.parameters)}"
                unknown = [name for name in given if name not in signature.parameters]
                if not unknown:
                    raise UsageError(f"adopt: {error}", takes) from None
                near = difflib.get_close_matches(unknown[0], signature.parameters, n=1, cutoff=0.75)
                raise UsageError(
                    f"adopt: {unknown[0]} is none of its arguments",
                    f"did you mean {near[0]}?" if near else takes,
                ) from None
        return call(*args, **given)

    return checked


@contextmanager
def usage_errors_reported() -> Generator[None]:
    """A UsageError prints one line and ends the process; with an agent, the exit report has it."""
    try:
        yield
    except UsageError as error:
        if FD in os.environ:
            raise
        sys.stderr.write(f"{error} ({error.hint})\n")
        sys.exit(2)


def preload_checked() -> None:
    """`preload`; a version that cannot train ends the process as wrong arguments do."""
    with usage_errors_reported():
        try:
            preload()
        except UsageError:
            if FD in os.environ:
                connect_agent(int(os.environ[FD]))
            raise


def check_values(
    calls: Mapping[str, Any], loss: str, counts: Mapping[str, Any], reproducible: str | None
) -> None:
    """Raise UsageError for an argument of a wrong type or value."""
    for name, given in calls.items():
        if not callable(given):
            raise UsageError(f"adopt: {name} is {given!r}, not a function", "give a function")
    if loss not in get_args(Loss):
        raise UsageError(f"adopt: loss is {loss!r}", f"give {' or '.join(get_args(Loss))}")
    if reproducible not in (None, *get_args(Reproducible)):
        raise UsageError(
            f"adopt: reproducible is {reproducible!r}", f"give {', '.join(get_args(Reproducible))}"
        )
    for name, given in counts.items():
        if not isinstance(given, int) or given < (name == "samples"):
            raise UsageError(f"adopt: {name} is {given!r}, not a valid number", "give an integer")
