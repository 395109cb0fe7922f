"""Environment variables with secrets, which a process removes before it starts others."""

import ctypes
import os
import re

from .errors import UsageError

TOKEN, URL, REDIS_URL = "UNICRON_TOKEN", "UNICRON_URL", "UNICRON_REDIS_URL"
"""The URLs may hold a password."""


_TOKEN = re.compile(r"[!-~]*")


def checked_token(text: str) -> str:
    """The token as a header may have it, without the blanks or the line's end that a file adds.
    Raises UsageError, which does not have the token."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise UsageError(
            "the token has a blank, a line's end or another character that no token has",
            f"set ${TOKEN} to the one line that unicron token create has printed",
        )
    return token


def remove_secrets(*names: str) -> None:
    """Remove the variables from os.environ, and overwrite their values in memory. Otherwise they
    stay in /proc/PID/environ, which any process of the same user may read."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in names:
        address = libc.getenv(name.encode())
        if address:
            ctypes.memset(address, 0, len(ctypes.string_at(address)))
        os.environ.pop(name, None)
