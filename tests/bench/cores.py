"""A fixed piece of work on all cores: how fast this machine was when a bench ran."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

ROUNDS_NUM = 100_000
"""SHA-512 twice in each round: no core has an instruction for it, and Python's lock is free."""
PIECES_NUM = 2
"""On each core, one after the other."""
TRIES_NUM = 5


def speed() -> float:
    """Pieces per second on all cores together: the best of TRIES_NUM tries, about a second."""
    num_cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_cores) as pool:
        return max(_tried(pool, num_cores * PIECES_NUM) for _ in range(TRIES_NUM))


def _tried(pool: ThreadPoolExecutor, num: int) -> float:
    began_s = time.perf_counter()
    for _ in pool.map(_piece, range(num)):
        pass
    return num / (time.perf_counter() - began_s)


def _piece(number: int) -> None:
    hashlib.pbkdf2_hmac("sha512", b"unicron", number.to_bytes(8, "big"), ROUNDS_NUM)
