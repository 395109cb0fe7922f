"""A rank that trains PlainEngine: the life of a Member (member.py) with the real iteration, orders,
communicators and settlement, and with a state that the first holder sends to all.

`python plain_rank.py --fd N`, as an agent starts a rank. It writes its losses and parameters to
`train.output`/<rank>.pt at the end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from unicron.workers.training import rank

control, start, exit_reporter = rank.connect_agent(int(sys.argv[sys.argv.index("--fd") + 1]))
rank.preload()

import plain_engine  # noqa: E402
import torch  # noqa: E402
from unicron.events.decoding import from_msgpack  # noqa: E402
from unicron.events.records import reports  # noqa: E402
from unicron.events.records.orders import Quiesce, Reconfigure, Resume  # noqa: E402
from unicron.events.spec.model import Axes  # noqa: E402
from unicron.workers.ipc.progress_page import ProgressWriter  # noqa: E402
from unicron.workers.training.communicators.communicators import Communicators  # noqa: E402
from unicron.workers.training.model import cpu_device  # noqa: E402
from unicron.workers.training.process.exit_report import exit_process  # noqa: E402
from unicron.workers.training.process.history import History  # noqa: E402
from unicron.workers.training.process.trace import trace_of  # noqa: E402
from unicron.workers.training.recovery.peers import World  # noqa: E402
from unicron.workers.training.recovery.settlement import settle  # noqa: E402
from unicron.workers.training.recovery.state_sources import Claim  # noqa: E402
from unicron.workers.training.step.iteration import Iteration  # noqa: E402
from unicron.workers.training.step.results import Failed, Outcome, Stepped  # noqa: E402

IDS = {"task": start.task, "rank": start.rank, "attempt": start.attempt}
assert start.spec.train is not None
TRAIN = start.spec.train


class PlainMember:
    """One rank; `generation` and `step_version` as of Member."""

    def __init__(self) -> None:
        self.generation = 0
        self._is_joined = False
        self._communicators = Communicators("127.0.0.1", cpu_device.prepare_device())
        folder = os.environ["UNICRON_TRACE_DIR"]
        self._iteration = Iteration(
            plain_engine.PlainEngine(TRAIN, Axes(), 0),
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
        control.tell(
            reports.RankReady(
                **IDS,
                endpoint=endpoint,
                num_params=1,
                state_bytes=1,
                iteration_flops=1.0,
                data_digest="rows",
            )
        )
        while True:
            match control.next_order():
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
        place = [member.rank for member in order.members].index(start.rank)
        axes, part = Axes(dp=num), self._part
        part.engine.axes, part.engine.place = axes, place
        with control.waiting_for_others(order.generation, self._communicators.interrupt):
            news = self._communicators.meet(
                order.generation, place, num, order.store, msgspec.msgpack.encode(part.claim())
            )
            self._communicators.up(axes)
            claims = [from_msgpack(each, Claim) for each in news]
            settlement = settle(claims, TRAIN.num_micro_batches, axes)
            share = settlement.shares[place]
            part.finish_step(settlement, share)
            step_version = max(settlement.step_version, 0)
            source = self._receive(step_version, place) if settlement.step_version > 0 else place
            part.take(step_version, share, order.generation, begun=settlement.begun)
        self._is_joined = True
        control.tell(
            reports.Reconfigured(
                **IDS,
                generation=order.generation,
                step_version=step_version,
                kept_micro_batches=share.kept,
                remaining_micro_batches=share.todo,
                reassigned_micro_batches=share.dealt,
                source=order.members[source].rank,
                received_bytes=0,
                down_s=0.0,
                up_s=0.0,
                settle_s=0.0,
            )
        )

    def _receive(self, step_version: int, place: int) -> int:
        """If some member lacks the state, the first that has it sends it. Returns its place."""
        part, world = self._part, World()
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
        while outcome.goes_on and self.step_version < TRAIN.iterations:
            outcome = self._iteration.run()
        if outcome.goes_on:
            outcome = self._iteration.beside.meet()
        if outcome.goes_on:
            self._iteration.beside.meet()
            self._finish()
            return True
        if isinstance(outcome, Failed):
            control.tell(
                reports.CollectiveFailed(
                    **IDS,
                    generation=self.generation,
                    iteration=self.step_version,
                    error=outcome.why,
                )
            )
        self._leave()
        return False

    def _finish(self) -> None:
        params = [param.detach() for param in self._part.engine.module.parameters()]
        folder = Path(TRAIN.output)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save([self._part.history.losses, params], folder / f"{start.rank}.pt")
        control.tell(
            reports.RankFinished(
                **IDS,
                generation=self.generation,
                step_version=self.step_version,
                forward_calls=self._iteration.notes.forward_calls,
            )
        )

    def _leave(self) -> None:
        if self._is_joined:
            self._is_joined = False
            self._communicators.down(())
        control.discard_orders(self.generation)
        control.tell(
            reports.Quiesced(
                **IDS,
                generation=self.generation,
                step_version=self.step_version,
                micro_batches=self._part.kept,
                buckets_reduced=self._part.sum.num_complete,
                num_buckets=self._part.engine.gradients.num_buckets,
            )
        )


member = PlainMember()
exit_reporter.member = member
member.run()
exit_process(control, 0)
