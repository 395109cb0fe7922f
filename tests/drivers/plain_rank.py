"""A rank that trains PlainEngine: the life of a Member (member.py) with the real iteration, orders,
communicators and settlement, and with a state that the first holder sends to all.

`PATCH` makes a forked rank (nursery.py) one of these. It writes its losses and parameters to
`train.output`/<rank>.pt at the end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import msgspec
import plain_engine
import torch
from unicron.events.decoding import from_msgpack
from unicron.events.records import reports
from unicron.events.records.orders import Quiesce, Reconfigure, Resume, StartRank
from unicron.events.spec.model import Axes
from unicron.workers.ipc.progress_page import ProgressWriter
from unicron.workers.training import rank
from unicron.workers.training.communicators.communicators import Communicators
from unicron.workers.training.model import cpu_device
from unicron.workers.training.process.control_thread import Control
from unicron.workers.training.process.exit_report import exit_process
from unicron.workers.training.process.history import History
from unicron.workers.training.process.trace import trace_of
from unicron.workers.training.recovery.peers import World
from unicron.workers.training.recovery.settlement import settle
from unicron.workers.training.recovery.state_sources import decode_claims, encode_claim
from unicron.workers.training.step.iteration import Iteration
from unicron.workers.training.step.results import Failed, Outcome, Stepped

PATCH = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import plain_rank
plain_rank.run_rank(fd)
"""


class PlainMember:
    """One rank; `generation` and `step_version` as of Member."""

    def __init__(self, control: Control, start: StartRank) -> None:
        assert start.spec.train is not None
        self._control, self._start, self._train_spec = control, start, start.spec.train
        self._ids = {"task": start.task, "rank": start.rank, "attempt": start.attempt}
        self.generation = 0
        self._is_joined = False
        self._communicators = Communicators("127.0.0.1", cpu_device.prepare_device())
        folder = os.environ["UNICRON_TRACE_DIR"]
        self._iteration = Iteration(
            plain_engine.PlainEngine(self._train_spec, Axes(), 0),
            control,
            self._communicators,
            plain_engine.Rows(),
            trace_of(folder, start.task, start.rank, start.attempt),
            ProgressWriter(),
            History(),
        )
        self._part = self._iteration.part

    @property
    def step_version(self) -> int:
        return self._iteration.step_version

    def run(self) -> None:
        endpoint = self._communicators.endpoint
        self._control.tell(
            reports.RankReady(
                **self._ids,
                endpoint=endpoint,
                num_params=1,
                state_bytes=1,
                iteration_flops=1.0,
                data_digest="rows",
            )
        )
        while True:
            match self._control.next_order():
                case Reconfigure() as order if order.generation > self.generation:
                    self._join(order)
                case Resume() as order if self._is_joined and order.generation == self.generation:
                    if self._train():
                        return
                case Quiesce() as order if order.generation >= self.generation:
                    self.generation = order.generation
                    self._leave()
                case _:
                    pass

    def _join(self, order: Reconfigure) -> None:
        self.generation, num = order.generation, len(order.members)
        place = [member.rank for member in order.members].index(self._start.rank)
        axes, part = Axes(dp=num), self._part
        part.engine.axes, part.engine.place = axes, place
        with self._control.waiting_for_others(order.generation, self._communicators.interrupt):
            news = self._communicators.meet(
                order.generation, place, num, order.store, encode_claim(part.claim(), place)
            )
            self._communicators.up(axes)
            claims = decode_claims(news)
            settlement = settle(claims, self._train_spec.num_micro_batches, axes)
            share = settlement.shares[place]
            part.finish_step(settlement, share)
            step_version = max(settlement.step_version, 0)
            source = self._receive(step_version, place) if settlement.step_version > 0 else place
            part.take(step_version, share, order.generation, begun=settlement.begun)
        self._is_joined = True
        self._control.tell(
            reports.Reconfigured(
                **self._ids,
                generation=order.generation,
                step_version=step_version,
                kept_micro_batches=share.kept,
                remaining_micro_batches=share.todo,
                reassigned_micro_batches=share.reassigned,
                source=order.members[source].rank,
                received_bytes=0,
                down_s=0.0,
                up_s=0.0,
                settle_s=0.0,
            )
        )

    def _receive(self, step_version: int, place: int) -> int:
        """If some member lacks the state, the first that has it sends it. Returns its place."""
        part, world = self._part, World(self._communicators.rounds)
        is_holder = part.state.step_version == step_version
        holders = [at for at, each in enumerate(world.collect(b"+" * is_holder)) if each]
        if len(holders) < world.num:
            losses = msgspec.msgpack.encode(part.history.losses)
            data = msgspec.msgpack.encode([part.engine.state(), losses])
            sent = world.collect(data if place == holders[0] else b"")[holders[0]]
            if not is_holder:
                state, told = from_msgpack(sent, tuple[bytes, bytes])
                part.engine.load(state)
                own = from_msgpack(told, list[float])
                part.history.replace(0, own, [0.0] * len(own))
                part.reset_to(step_version)
                return holders[0]
        return place

    def _train(self) -> bool:
        """Train until an order to stop, a failure or the end. Returns True at the end."""
        outcome: Outcome = Stepped()
        while outcome.goes_on and self.step_version < self._train_spec.iterations:
            outcome = self._iteration.run()
        if outcome.goes_on:
            outcome = self._iteration.beside.meet()
        if outcome.goes_on:
            self._iteration.beside.meet()
            self._finish()
            return True
        if isinstance(outcome, Failed):
            self._control.tell(
                reports.CollectiveFailed(
                    **self._ids,
                    generation=self.generation,
                    iteration=self.step_version,
                    error=outcome.why,
                )
            )
        self._leave()
        return False

    def _finish(self) -> None:
        params = [param.detach() for param in self._part.engine.module.parameters()]
        folder = Path(self._train_spec.output)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save([self._part.history.losses, params], folder / f"{self._start.rank}.pt")
        self._control.tell(
            reports.RankFinished(
                **self._ids,
                generation=self.generation,
                step_version=self.step_version,
                forward_calls=self._iteration.notes.forward_calls,
            )
        )

    def _leave(self) -> None:
        if self._is_joined:
            self._is_joined = False
            self._communicators.down(())
        self._control.discard_orders(self.generation)
        self._control.tell(
            reports.Quiesced(
                **self._ids,
                generation=self.generation,
                step_version=self.step_version,
                micro_batches=self._part.kept,
                buckets_reduced=self._part.sum.num_complete,
                num_buckets=self._part.engine.gradients.num_buckets,
            )
        )


def run_rank(fd: int) -> NoReturn:
    """Run a rank for the agent at socket `fd`."""
    control, start, exit_reporter = rank.connect_agent(fd)
    member = PlainMember(control, start)
    exit_reporter.member = member
    member.run()
    exit_process(control, 0)
