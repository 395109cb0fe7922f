"""What drives a loop of somebody's own: the member of a task that heals, or nobody.

Without an agent the same iterations run as they would with one, and a fault ends them: whoever has
started the processes starts them again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Mapping
from typing import Protocol

import torch.distributed as dist

from ...events.model_spec import Axes
from ..pulse import Pulse
from ..wire import Unpacker
from . import cpu
from .communicators import Communicators
from .control import Control
from .history import History
from .iteration import Iteration
from .ledger import settle
from .own import OwnWork
from .supply import seen
from .trace import Trace


class Driver(Protocol):
    """`steps` and `together` are those of member.py."""

    communicators: Communicators
    control: Control
    iteration: Iteration
    settled: int

    def steps(self) -> Generator[int | None]: ...
    def together(self, call: Callable[[], None]) -> bool: ...


class Unhealed:
    """This process alone, or one of those that a launcher such as torchrun has started."""

    def __init__(self, work: OwnWork, axes: Axes | None, environment: Mapping[str, str]) -> None:
        self.control = Control(socket.socketpair()[0], 0, Unpacker())
        self._train = work.train
        self.settled = 0
        place, num = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        device = cpu.stand_in()
        self.communicators = Communicators(environment.get("UNICRON_HOST", "127.0.0.1"), device)
        self.communicators.on_groups = work.on_groups
        self._hosted = None
        endpoint = self.communicators.endpoint
        if "MASTER_ADDR" in environment:
            endpoint = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
            if place == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._hosted = dist.TCPStore(
                    "0.0.0.0", int(environment["MASTER_PORT"]), is_master=True,
                    wait_for_workers=False)
        self._axes = axes or Axes(dp=num)
        self.communicators.meet(1, place, num, endpoint, b"")
        self.communicators.up(axes)
        trainee = seen(work.build(device, self.communicators.groups, self._axes, place))
        work.begin(trainee, lambda: seen(work.build_whole(device, self.communicators.alone())))
        self.iteration = Iteration(trainee, work, Trace("", 0, place, 0), Pulse(),
                                   History())
        claims = [self.iteration.claim() for _ in range(num)]
        share = settle(claims, self._train.num_micro_batches, axes).shares[place]
        self.iteration.take(0, share, 1, begun=False)

    def steps(self) -> Generator[int | None]:
        """Each iteration as it is stepped; RuntimeError where a collective failed."""
        yield None
        while self.iteration.step_version < self._train.iterations:
            outcome = self.iteration.run(self.control, self.communicators)
            if outcome not in ("stepped", "boundary"):
                raise RuntimeError(self.iteration.reduction.why)
            yield self.iteration.step_version - 1
        # A process that ends while another still waits for its last answer would fail that one.
        self.iteration.meet(self.control, self.communicators)
        self.iteration.meet(self.control, self.communicators)

    def together(self, call: Callable[[], None]) -> bool:
        """RuntimeError where a collective failed."""
        found = self.iteration.beside(self.control, self.communicators, call)
        if found is not None:
            raise RuntimeError(self.iteration.reduction.why)
        return True
