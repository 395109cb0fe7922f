"""A wait for other members that nothing ends: it is left behind, and the rank goes on."""

from __future__ import annotations

import socket
import subprocess
import sys

from unicron.workers.ipc.pipe_protocol import Unpacker
from unicron.workers.training.process.control_thread import (
    ABANDONED_NUM_MAX,
    EXIT_STUCK,
    REPLACE_ABANDONED_NUM,
)

PROGRAM = """
import os, socket, threading, time
from unicron.events.records.orders import Quiesce
from unicron.workers.training.process.control_thread import (
    STUCK_S_MAX,
    Abandoned,
    Control,
    Interrupted,
)
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack

def ends(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")

ours, theirs = socket.socketpair()
control = Control(ours, 0, Unpacker())
control.start([])
entered, never, woken = threading.Event(), threading.Event(), threading.Event()

def stuck():
    entered.set()
    never.wait(600)

def again(generation):
    body = Quiesce(nodes=("n1",), task=1, generation=generation, mode="now", ranks=(0,))
    threading.Timer(0.3, lambda: theirs.sendall(pack(Frame(seq=3, epoch=1, body=body)))).start()
    control.run_detached(generation, woken.set, stuck)

def order():
    assert entered.wait(10)
    body = Quiesce(nodes=("n1",), task=1, generation=1, mode="now", ranks=(0,))
    theirs.sendall(pack(Frame(seq=1, epoch=1, body=body)))

threading.Thread(target=order, daemon=True).start()
began_s = time.monotonic()
ends(Abandoned, lambda: control.run_detached(1, woken.set, stuck))
assert woken.is_set(), "it is woken first"
assert STUCK_S_MAX <= time.monotonic() - began_s
ends(Interrupted, lambda: control.run_detached(1, woken.set, lambda: 2))
control.discard_orders(1)
assert control.run_detached(2, woken.set, lambda: 3) == 3, "another thread serves the next"
ends(ZeroDivisionError, lambda: control.run_detached(2, woken.set, lambda: 1 // 0))

# What was left behind disturbs no later wait: one in the main thread is still woken.
def later():
    assert entered.wait(10)
    body = Quiesce(nodes=("n1",), task=1, generation=3, mode="now", ranks=(0,))
    theirs.sendall(pack(Frame(seq=2, epoch=1, body=body)))

ends(Abandoned, lambda: again(2))
control.discard_orders(2)
entered.clear()
threading.Thread(target=later, daemon=True).start()
freed = threading.Event()
with control.waiting_for_others(3, freed.set):
    entered.set()
    assert freed.wait(10), "nobody woke it"
print("went on", flush=True)
"""


def test_a_wait_that_nothing_ends_is_left_behind() -> None:
    """Nor does the process wait for it that has done all it had to."""
    # In a process of its own: a control whose agent is gone ends its process.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout == "went on\n", done.stderr
    assert done.returncode == 0


REPLICA = """
import os, socket, threading, time
from unicron.events.records.orders import Quiesce
from unicron.workers.training.process import control_thread as control
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack

control.FINISH_S_MAX = 0.5
ours, theirs = socket.socketpair()
rank = control.Control(ours, 0, Unpacker())
rank.start([])

def leave(generation, *ranks):
    body = Quiesce(nodes=("n1",), task=1, generation=generation, mode="now", ranks=ranks)
    theirs.sendall(pack(Frame(seq=1, epoch=1, body=body)))

def waits(generation, *orders, **options):
    woken, entered = threading.Event(), threading.Event()
    def call():
        entered.set()
        return "woken" if woken.wait(0.3) else "finished"
    def order():
        entered.wait(10)
        for ranks in orders:
            leave(generation, *ranks)
    threading.Thread(target=order, daemon=True).start()
    return rank.run_detached(generation, woken.set, call, **options)

replica = frozenset((0, 1))
print(waits(1, (0, 1, 2), replica=replica), rank.pending_quiesce(1))
print(waits(2, (0, 2), replica=replica))
print(waits(3, (0, 1, 2), (0, 2), replica=replica))
print(waits(4, (0, 1, 2)))
control.FINISH_S_MAX = 0.05
print(waits(5, (0, 1, 2), replica=replica))
print(waits(5, replica=replica), flush=True)
os._exit(0)
"""


def test_a_replica_that_lives_finishes_what_it_is_in() -> None:
    """Not one of whose members some are gone, nor for ever; nor whoever waits for all."""
    done = subprocess.run([sys.executable, "-c", REPLICA], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "finished now", "woken", "woken", "woken", "woken", "woken"], done.stderr


TOO_MANY = """
import os, socket, sys, threading, time
from unicron.events.records.orders import Quiesce
from unicron.workers.training.process import control_thread as control
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack

control.STUCK_S_MAX = 0.05
ours, theirs = socket.socketpair()
rank = control.Control(ours, 0, Unpacker())
rank.start([])
ends = [threading.Event() for _ in range(2 + control.ABANDONED_NUM_MAX)]
for generation, end in enumerate(ends, 1):
    def stuck(end=end, generation=generation):
        body = Quiesce(nodes=("n1",), task=1, generation=generation, mode="now", ranks=(0,))
        theirs.sendall(pack(Frame(seq=1, epoch=1, body=body)))
        end.wait(60)
    try:
        rank.run_detached(generation, lambda: None, stuck)
    except control.Abandoned:
        print("worn" if rank.has_too_many_abandoned else "left", flush=True)
    rank.discard_orders(generation)
    if generation == 1:
        end.set()  # it has ended by itself, and counts no more
        while rank._num_abandoned():
            time.sleep(0.01)
"""


def test_no_more_is_left_behind_than_memory_bears() -> None:
    """Each holds a sum of gradients. What has ended meanwhile does not count."""
    done = subprocess.run([sys.executable, "-c", TOO_MANY], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == EXIT_STUCK, done.stderr
    # Worn, it does not end by itself at once: its peers are as worn as it is.
    assert done.stdout == "left\n" * REPLACE_ABANDONED_NUM + "worn\n" * (
        1 + ABANDONED_NUM_MAX - REPLACE_ABANDONED_NUM)
    assert "13 abandoned collectives still wait: this process ends" in done.stderr


ENDED_LATE = """
import gc, os, socket, threading, time, weakref
from unicron.events.records.orders import Quiesce
from unicron.workers.training.process import control_thread as control
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack

control.STUCK_S_MAX = 0.05

class Gradients:
    pass

ours, theirs = socket.socketpair()
rank = control.Control(ours, 0, Unpacker())
rank.start([])
end, seen = threading.Event(), []

def stuck():
    gradients = Gradients()
    seen.append(weakref.ref(gradients))
    body = Quiesce(nodes=("n1",), task=1, generation=1, mode="now", ranks=(0,))
    theirs.sendall(pack(Frame(seq=1, epoch=1, body=body)))
    end.wait(60)
    raise RuntimeError("the connection was closed")

try:
    rank.run_detached(1, lambda: None, stuck)
except control.Abandoned:
    pass
gc.collect()
assert seen[0]() is not None, "it waits on"
end.set()
last_s = time.monotonic() + 20
while seen[0]() is not None and time.monotonic() < last_s:
    time.sleep(0.01)
    gc.collect()
print("gone" if seen[0]() is None else gc.get_referrers(seen[0]()), flush=True)
os._exit(0)
"""


def test_what_was_left_behind_keeps_no_memory_after_its_end() -> None:
    """Nobody asks the rank meanwhile: no later collective is left behind to sweep it up."""
    done = subprocess.run([sys.executable, "-c", ENDED_LATE], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout == "gone\n", done.stderr


LAST_WORDS = """
import os, signal, socket, sys, time
from unicron.events.records.reports import RankFinished
from unicron.workers.training.process.control_thread import Control
from unicron.workers.ipc.pipe_protocol import Unpacker

control = Control(socket.socket(fileno=int(sys.argv[1])), 0, Unpacker())
for number in range(50):
    control.tell(RankFinished(task=1, rank=0, attempt=1, generation=1, step_version=number,
                              forward_calls=0))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_told_is_told_whatever_becomes_of_the_rank() -> None:
    """The agent has it, in order, when `tell` returns: no thread has to live to hand it over."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run([sys.executable, "-c", LAST_WORDS, str(theirs.fileno())],
                       pass_fds=[theirs.fileno()], timeout=60, check=False)
        theirs.close()
        unpacker, told = Unpacker(), []
        while data := ours.recv(1 << 16):
            told += [frame.body.step_version for frame in unpacker.feed(data)]
    assert told == list(range(50))
