"""Shortages of the machine: no room, no descriptor, no memory. They pass; a loop outlasts them."""

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
ERRNOS = FULL | {
    errno.EAGAIN,  # fork, beyond the limit of processes
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EROFS,  # ext4 after an I/O error
}
PAUSE_S, PAUSE_S_MAX = 0.5, 10.0
STABLE_S = 30.0
"""After so long without an error the pause begins anew."""
_NO_THREAD = "can't start new thread"


def is_full(error: BaseException | None) -> bool:
    """Whether a disk or a quota is full, by the error or its cause."""
    return error is not None and (
        (isinstance(error, OSError) and error.errno in FULL) or is_full(error.__cause__)
    )


def is_shortage(error: BaseException) -> bool:
    """Whether the machine lacks something now, so that the same call may succeed later."""
    if isinstance(error, BaseExceptionGroup):
        parts: tuple[BaseException, ...] = error.exceptions  # pyright: ignore
        return all(map(is_shortage, parts))
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in ERRNOS)
        or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)
    )


def errno_of(error: BaseException) -> str:
    """The name of what the machine lacks, such as ENOSPC; empty if the error is no shortage."""
    if not is_shortage(error):
        return ""
    number = error.errno if isinstance(error, OSError) else None
    lacks = errno.ENOMEM if isinstance(error, MemoryError) else errno.EAGAIN
    return errno.errorcode[number or lacks]


async def outlast(run: Callable[[], Awaitable[None]], told: Callable[[str], None]) -> None:
    """Await `run`, and again after a pause when it ends by a shortage. `told` gets each reason
    once in a row. Raises every other error of `run`."""
    pause_s, last = PAUSE_S, ""
    while True:
        began_s = time.monotonic()
        try:
            await run()
            return
        except (OSError, MemoryError, RuntimeError, ExceptionGroup) as error:
            if not is_shortage(error):
                raise
            why = str(error) or "out of memory"
        if time.monotonic() - began_s > STABLE_S:
            pause_s, last = PAUSE_S, ""
        if why != last:
            told(why)
        last = why
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, PAUSE_S_MAX)
