"""Environment variables with secrets, which a process removes before it starts others."""

import ctypes
import os

TOKEN, URL, REDIS_URL = "UNICRON_TOKEN", "UNICRON_URL", "UNICRON_REDIS_URL"
"""The URLs may hold a password."""


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
