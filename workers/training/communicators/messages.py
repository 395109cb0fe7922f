"""Lets a message between two ranks wait as long as a collective.

gloo gives a message the timeout with which its group was built. That one is short, as a build must
not wait for a peer that is gone, and torch's function that sets the timeout of a group does not
change it: a pipeline's stage could wait for the one before it for that long only. A timeout that is
given to the wait itself counts.
"""

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_timeout: datetime.timedelta | None = None
_is_installed = False


def wait_up_to(seconds: float | None) -> None:
    """From now on, waits of this process that name no timeout have this one. None: as torch has it.
    NCCL needs None: there a wait with a timeout blocks the host."""
    global _timeout, _is_installed
    _timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
    if not _is_installed:
        _is_installed = True
        work: Any = dist.Work
        work.wait = _with_timeout(work.wait)


def _with_timeout(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **options: Any) -> Any:
        if _timeout is None or args or options:
            return original(work, *args, **options)
        return original(work, _timeout)

    return wait
