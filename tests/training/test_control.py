"""A wait for other members that nothing ends: it is left behind, and the rank goes on."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from unicron.events.orders import Quiesce
from unicron.workers.training.control import STUCK_S_MAX, Abandoned, Control, Interrupted
from unicron.workers.wire import Frame, Unpacker, pack

FREED_S_MAX = STUCK_S_MAX + 5.0


def _now(generation: int) -> bytes:
    return pack(Frame(seq=1, epoch=1, body=Quiesce(
        nodes=("n1",), task=1, generation=generation, mode="now", ranks=(0,))))


def test_a_wait_that_nothing_ends_is_left_behind() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        control = Control(ours, 0, Unpacker())
        control.start([])
        entered, never, woken = threading.Event(), threading.Event(), threading.Event()

        def stuck() -> int:
            entered.set()
            never.wait(60)
            return 1

        def order() -> None:
            entered.wait(10)
            theirs.sendall(_now(1))

        threading.Thread(target=order, daemon=True).start()
        began_s = time.monotonic()
        with pytest.raises(Abandoned):
            control.apart(1, woken.set, stuck)
        assert woken.is_set(), "it is woken first"
        assert STUCK_S_MAX <= time.monotonic() - began_s < FREED_S_MAX

        with pytest.raises(Interrupted):
            control.apart(1, woken.set, lambda: 2)
        control.settle(1)
        assert control.apart(2, woken.set, lambda: 3) == 3, "another thread serves the next"
        with pytest.raises(ZeroDivisionError):
            control.apart(2, woken.set, lambda: 1 // 0)
        never.set()
