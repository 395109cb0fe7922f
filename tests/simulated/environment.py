"""What simulated processes share: time, random numbers, generations, files."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from msgspec import Struct
from simulated.checkpoint_store import SimulatedStores
from simulated.generation import SimulatedGeneration
from unicron.events.records.orders import Reconfigure


class Tempo(Struct, frozen=True, kw_only=True):
    """Durations of the simulation in seconds; a pair is the range to draw from."""

    load_s: tuple[float, float] = (0.5, 3.0)
    micro_batch_s: tuple[float, float] = (0.02, 0.12)
    reduce_s: tuple[float, float] = (0.01, 0.05)
    notice_s: tuple[float, float] = (0.02, 0.05)
    """Until a peer notices a closed connection."""
    meet_s: tuple[float, float] = (0.05, 0.2)
    meet_s_max: float = 20.0
    collective_s_max: float = 1800.0
    """Timeout of a collective: a member that waits this long for the others fails."""
    save_s: tuple[float, float] = (0.05, 0.5)
    copy_s: tuple[float, float] = (0.02, 0.3)
    exit_s: tuple[float, float] = (0.01, 0.1)
    progress_s: float = 1.0


class Environment:
    """Time, random numbers, generations and files; and violations of what must never happen."""

    def __init__(self, seed: int, tempo: Tempo) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = random.Random(f"net {seed}")
        self.tempo = tempo
        self.generations: dict[tuple[int, int], SimulatedGeneration] = {}
        self.files: dict[tuple[str, str], tuple[int, int]] = {}
        self.shares: dict[tuple[int, int, int, tuple[int, ...]], set[int]] = {}
        """By task, generation, step and positions: the ranks that have written their shares."""
        """(output, path) -> step version and digest of a complete checkpoint."""
        self.keepers = SimulatedStores()
        self.latest: dict[str, tuple[tuple[int, int], str]] = {}
        """output -> (generation, order seq) and path of the checkpoint published last."""
        self.printed: dict[int, int] = {}
        """Task -> iterations in a command's own checkpoint."""
        self.answers: dict[str, int] = {}
        """Node -> the incarnation that lives there, so that it answers probes."""
        self.gone_on: dict[int, list[tuple[int, int]]] = {}
        """Task -> (generation, step version) of every resume of a member."""
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
        """The rendezvous of a generation, shared by all its members."""
        found = self.generations.get((order.task, order.generation))
        if found is None:
            found = SimulatedGeneration(self, order)
            self.generations[order.task, order.generation] = found
        elif found.members != order.members:
            self.never(f"task {order.task} has two generations {order.generation}")
        return found
