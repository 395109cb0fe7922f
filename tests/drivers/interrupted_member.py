"""One member of the plain engine, interrupted in each phase in each way, in a process of its own: a
rank whose agent is gone ends its process.

`python interrupted_member.py` prints a line of JSON for each phase and each kind of interruption.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import plain_engine
import torch
from rank_driver import small_spec
from unicron.events.records.orders import Quiesce
from unicron.events.spec.model import Axes
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack
from unicron.workers.ipc.progress_page import ProgressWriter
from unicron.workers.training.communicators.communicators import Communicators
from unicron.workers.training.process.control_thread import Control
from unicron.workers.training.process.history import History
from unicron.workers.training.process.orders import Orders
from unicron.workers.training.process.trace import Trace
from unicron.workers.training.recovery.settlement import MemberAssignment
from unicron.workers.training.step.iteration import Iteration
from unicron.workers.training.step.progress import (
    BarrierEntered,
    Interrupted,
    Reduced,
    ReductionBegan,
)
from unicron.workers.training.step.results import Done, Result, Stopped

PHASES = ("assigned", "passing", "reducing", "ready")
KINDS = ("second fault", "order before", "abort", "SIGSTOP", "exception in a thread")


class Member:
    """One member with the plain engine, in a world of its own; `agent` is the other end of the pipe
    of its orders."""

    def __init__(
        self, control: Orders, agent: socket.socket | None = None, *, overlap: bool = False
    ) -> None:
        self.agent = agent
        train = small_spec("unused", iterations=3, overlap=overlap).train
        assert train is not None
        self.communicators = Communicators("127.0.0.1", torch.device("cpu"))
        self.communicators.meet(1, 0, 1, self.communicators.endpoint, b"")
        self.communicators.up(Axes())
        engine = plain_engine.PlainEngine(train, Axes(), 0)
        self.iteration = Iteration(
            *(engine, control, self.communicators, plain_engine.Rows()),
            *(Trace(0), ProgressWriter(), History()),
        )
        self.part = self.iteration.part
        share = MemberAssignment(kept=(), todo=(0, 1), reassigned=())
        self.part.take(0, share, 1, begun=False)
        self.held = threading.Event()
        """Set: an abandoned call ends."""

    def order_stop(self) -> None:
        order = Quiesce(nodes=("n1",), task=1, generation=1, mode="now", ranks=(0,))
        assert self.agent is not None
        self.agent.sendall(pack(Frame(body=order, seq=1, epoch=1)))

    def advance_to(self, phase: str) -> None:
        """Go on to this phase as an iteration does, with real passes and a real sum."""
        part = self.part
        if phase == "assigned":
            return
        part.begin(1)
        if phase == "passing":
            assert self.iteration.passes.run([0]) is None
            return
        assert self.iteration.passes.run([0, 1]) is None
        part.happened(ReductionBegan())
        if phase == "ready":
            result = part.sum.run(self.iteration.passes.own_stats(), part.losses)
            assert isinstance(result, Done)
            part.reduced = result.value
            part.happened(Reduced())
            part.happened(BarrierEntered())

    def wait(self, kind: str) -> Result[None]:
        """Wait for other members, and be interrupted so."""
        collectives = self.part.collectives
        if kind == "order before":
            self.order_stop()
            while not collectives.must_stop():
                pass
            return collectives.run(lambda: None)

        def call() -> None:
            if kind == "second fault":
                raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
            if kind == "exception in a thread":
                raise RuntimeError("injected")
            self.order_stop()
            if kind == "SIGSTOP":  # nothing closes the connection of a stopped peer
                self.held.wait()
                return
            while not self.communicators.woken:
                pass
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

        return collectives.run(call)

    def interrupt(self, phase: str, kind: str) -> Result[None]:
        """Be interrupted in this phase, and tell it as the code of the phase does."""
        part = self.part
        result = self.wait(kind)
        if phase == "passing":
            part.lose_passes()
        elif phase == "reducing":
            part.happened(Interrupted(is_lost=not part.sum.undo()))
        else:
            part.happened(Interrupted())
        return result

    def close(self) -> None:
        self.held.set()
        self.communicators.down(())


def main() -> None:
    kept: list[Any] = []  # a Control whose agent's socket is closed ends the process
    for phase in PHASES:
        for kind in KINDS:
            agent, theirs = socket.socketpair()
            control = Control(theirs, 0, Unpacker())
            control.start([])
            member = Member(control, agent)
            kept.append(member)
            member.advance_to(phase)
            result = member.interrupt(phase, kind)
            state, claim = member.part.state, member.part.claim()
            told = {
                "interrupted": [phase, kind],
                "result": type(result).__name__,
                "is_abandoned": isinstance(result, Stopped) and result.is_abandoned,
                "phase": state.phase,
                "kept": claim.kept,
                "ready": claim.ready,
            }
            print(json.dumps(told), flush=True)
            member.close()


if __name__ == "__main__":
    main()
