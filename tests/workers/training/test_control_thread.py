"""A wait for other members that cannot be ended is abandoned, and the rank continues."""

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

BEGIN = """
import gc, itertools, os, socket, threading, time, weakref
from unicron.events.records.orders import Quiesce
from unicron.workers.training.process import control_thread as control
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack

ours, theirs = socket.socketpair()
seqs = itertools.count(1)
rank = control.Control(ours, 0, Unpacker())
rank.start([])

def leave(generation, *ranks):
    body = Quiesce(nodes=("n1",), task=1, generation=generation, mode="now", ranks=ranks or (0,))
    theirs.sendall(pack(Frame(seq=next(seqs), epoch=1, body=body)))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process: a rank whose agent is gone ends its process."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


ABANDONED = """
def ends(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")

entered, never, woken = threading.Event(), threading.Event(), threading.Event()

def stuck():
    entered.set()
    never.wait(600)

def again(generation):
    threading.Timer(0.3, lambda: leave(generation)).start()
    rank.run_detached(generation, woken.set, stuck)

def order(generation):
    assert entered.wait(10)
    leave(generation)

threading.Thread(target=order, args=(1,), daemon=True).start()
began_s = time.monotonic()
ends(control.Abandoned, lambda: rank.run_detached(1, woken.set, stuck))
assert woken.is_set(), "it is woken first"
assert control.STUCK_S_MAX <= time.monotonic() - began_s
ends(control.Interrupted, lambda: rank.run_detached(1, woken.set, lambda: 2))
rank.discard_orders(1)
assert rank.run_detached(2, woken.set, lambda: 3) == 3, "another thread serves the next"
ends(ZeroDivisionError, lambda: rank.run_detached(2, woken.set, lambda: 1 // 0))

# What was abandoned disturbs no later wait: one in the main thread is still woken.
ends(control.Abandoned, lambda: again(2))
rank.discard_orders(2)
entered.clear()
threading.Thread(target=order, args=(3,), daemon=True).start()
freed = threading.Event()
with rank.waiting_for_others(3, freed.set):
    entered.set()
    assert freed.wait(10), "nobody woke it"
print("went on", flush=True)
"""


def test_a_wait_that_cannot_be_ended_is_abandoned() -> None:
    """When the process has finished, its exit does not wait for the abandoned thread either."""
    done = run(ABANDONED)
    assert done.stdout == "went on\n", done.stderr
    assert done.returncode == 0


REPLICA = """
control.FINISH_S_MAX = 0.5

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


def test_a_replica_whose_members_live_finishes_its_micro_batch() -> None:
    """The wait ends early if a replica member is gone, after FINISH_S_MAX, or without a replica."""
    done = run(REPLICA)
    assert done.stdout.splitlines() == ["finished now", *["woken"] * 5], done.stderr


TOO_MANY = """
control.STUCK_S_MAX = 0.05
ends = [threading.Event() for _ in range(2 + control.ABANDONED_NUM_MAX)]
for generation, end in enumerate(ends, 1):
    def stuck(end=end, generation=generation):
        leave(generation)
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


def test_the_number_of_abandoned_collectives_is_bounded() -> None:
    """Each holds a sum of gradients in memory. A collective that has ended since does not count."""
    done = run(TOO_MANY)
    assert done.returncode == EXIT_STUCK, done.stderr
    # A rank with too many does not exit at once, because its peers have as many.
    assert done.stdout == "left\n" * REPLACE_ABANDONED_NUM + "worn\n" * (
        1 + ABANDONED_NUM_MAX - REPLACE_ABANDONED_NUM
    )
    assert "13 abandoned collectives still wait: this process ends" in done.stderr


ENDED_LATE = """
control.STUCK_S_MAX = 0.05

class Gradients:
    pass

end, seen = threading.Event(), []

def stuck():
    gradients = Gradients()
    seen.append(weakref.ref(gradients))
    leave(1)
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


def test_an_abandoned_collective_keeps_no_memory_after_its_end() -> None:
    """This must not depend on a later abandoned collective, which would free the memory too."""
    done = run(ENDED_LATE)
    assert done.stdout == "gone\n", done.stderr


LAST_REPORTS = """
import signal, sys
from unicron.events.records.reports import RankFinished

control = control.Control(socket.socket(fileno=int(sys.argv[1])), 0, Unpacker())
for number in range(50):
    control.tell(RankFinished(task=1, rank=0, attempt=1, generation=1, step_version=number,
                              forward_calls=0))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_report_reaches_the_agent_even_if_the_rank_dies() -> None:
    """When `tell` returns, the agent's socket has the report: no thread has to live to send it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-c", BEGIN + LAST_REPORTS, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            timeout=60,
            check=False,
        )
        theirs.close()
        unpacker, versions = Unpacker(), []
        while data := ours.recv(1 << 16):
            versions += [frame.body.step_version for frame in unpacker.feed(data)]
    assert versions == list(range(50))
