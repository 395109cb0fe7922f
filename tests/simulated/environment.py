"""What processes on paper share: time, chance, generations, files."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from msgspec import Struct
from simulated.checkpoint_store import SimulatedStores
from simulated.generation import SimulatedGeneration
from unicron.events.records.orders import Reconfigure


class Tempo(Struct, frozen=True, kw_only=True):
    """How long things take on paper: seconds, each drawn between its two ends."""

    load_s: tuple[float, float] = (0.5, 3.0)
    micro_batch_s: tuple[float, float] = (0.02, 0.12)
    reduce_s: tuple[float, float] = (0.01, 0.05)
    notice_s: tuple[float, float] = (0.02, 0.05)
    """How long until a peer's closed connection shows."""
    meet_s: tuple[float, float] = (0.05, 0.2)
    meet_s_max: float = 20.0
    save_s: tuple[float, float] = (0.05, 0.5)
    copy_s: tuple[float, float] = (0.02, 0.3)
    exit_s: tuple[float, float] = (0.01, 0.1)
    progress_s: float = 1.0


class Environment:
    """What processes share: time, chance, generations, files; and what must never have happened."""

    def __init__(self, seed: int, tempo: Tempo) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = random.Random(f"net {seed}")
        self.tempo = tempo
        self.generations: dict[tuple[int, int], SimulatedGeneration] = {}
        self.files: dict[tuple[str, str], tuple[int, int]] = {}
        """(output, path) -> step version and digest of a complete checkpoint."""
        self.keepers = SimulatedStores()
        self.latest: dict[str, tuple[tuple[int, int], str]] = {}
        """output -> generation, order and path of what was published last."""
        self.printed: dict[int, int] = {}
        """Task -> iterations in the checkpoint of a command's own."""
        self.gone_on: dict[int, list[tuple[int, int]]] = {}
        """Task -> each generation that was resumed, and the step it went on from."""
        self.violations: list[str] = []
        self.num_steps = self.num_stopped = 0
        self._pid = 100

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def draw(self, span: tuple[float, float]) -> float:
        return self.rng.uniform(*span)

    def later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, call)

    def never(self, what: str) -> None:
        self.violations.append(f"at {self.loop.time():.3f} s: {what}")

    def meet(self, order: Reconfigure) -> SimulatedGeneration:
        """The generation's meeting point, one for all its members."""
        found = self.generations.get((order.task, order.generation))
        if found is None:
            found = SimulatedGeneration(self, order)
            self.generations[order.task, order.generation] = found
        elif found.members != order.members:
            self.never(f"task {order.task} has two generations {order.generation}")
        return found
