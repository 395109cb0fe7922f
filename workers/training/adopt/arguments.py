"""What a script gives to `adopt`; what of it is wrong is said in one line.

Nothing of torch or Megatron is imported here.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from ....events.errors import UsageError
from ...ipc.pipe_protocol import FD
from ..rank import meet_agent

Loss = Literal["per_token", "per_micro_batch"]
P = ParamSpec("P")
T = TypeVar("T")


def used_rightly(call: Callable[P, T]) -> Callable[P, T]:
    """An argument that is none, or is missing, is wrong input as any other."""
    signature = inspect.signature(call)

    @wraps(call)
    def checked(*args: P.args, **given: P.kwargs) -> T:
        try:
            signature.bind(*args, **given)
        except TypeError as error:
            told = given.get("environment", os.environ)
            assert isinstance(told, Mapping)
            with wrong_input_told(told):
                if FD in told:
                    meet_agent(int(told[FD]))
                unknown = [name for name in given if name not in signature.parameters]
                raise UsageError(
                    f"adopt: {f'{unknown[0]} is none of its arguments' if unknown else error}",
                    f"it takes {', '.join(signature.parameters)}") from None
        return call(*args, **given)

    return checked


@contextmanager
def wrong_input_told(environment: Mapping[str, str]) -> Generator[None]:
    """Wrong input is one line and ends the process: with an agent, LastWords says it."""
    try:
        yield
    except UsageError as error:
        if FD in environment:
            raise
        sys.stderr.write(f"{error} ({error.hint})\n")
        sys.exit(2)


def check_given(calls: Mapping[str, Any], loss: str, counts: Mapping[str, Any]) -> None:
    """Raises UsageError."""
    for name, given in calls.items():
        if not callable(given):
            raise UsageError(f"adopt: {name} is {given!r}, no function", "give one")
    if loss not in get_args(Loss):
        raise UsageError(f"adopt: loss is {loss!r}", f"give {' or '.join(get_args(Loss))}")
    for name, given in counts.items():
        if not isinstance(given, int) or given < (name == "samples"):
            raise UsageError(f"adopt: {name} is {given!r}, no number of them", "give one")
