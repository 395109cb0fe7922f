"""The peers in the cases of a hang: what each does about it, and which processes end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.detection import faults
from bench.detection.faults import Trial
from bench.detection.hangs import HANGS, USUAL_NUM, Hang, spec_of
from bench.detection.torchrun import NODES_NUM, SAID, launcher
from bench.recovery.peers import HEARTBEATS_MS, LIGHTHOUSE, Peer
from bench.recovery.trial import STILL_S_MAX, NotStarted
from unicron.cli.cluster.local_cluster import free_port
from unicron.events.spec.parallelism import coordinates
from unicron.workers.host import linux

TOLD_S_MAX = 60.0
FAILED = re.compile(rb"failed \(exitcode: *-?\d+\) local_rank: (\d+)")
LAYOUT = "UNICRON_BENCH_LAYOUT"
"""The same as in layout_loop.py, which imports torch."""


class LayoutPeer(Peer):
    """A peer whose collectives all have the limit that Unicron's policy has for this hang."""

    settle_s_max = 10.0
    """How long after it has told the hang its processes are watched."""

    def __init__(self, folder: Path, hang: Hang) -> None:
        super().__init__(folder, self.name)
        self.hang = hang
        self._began_s = 0.0
        (folder / "spec.json").write_text(json.dumps(spec_of(hang, folder / "out")))
        self._env["UNICRON_BENCH_COLLECTIVE_S"] = str(hang.limit_s)
        self._env[LAYOUT] = f"{hang.axes.tp},{hang.axes.pp},{hang.axes.dp}"
        self._env["WORLD_SIZE"] = str(hang.num_ranks)

    def launch_all(self) -> None:
        raise NotImplementedError

    def told_s(self) -> float | None:
        """When it began to act: the first process that leaves its iteration and begins again."""
        self.watch.look()
        return min((line["t"] for line in self._restarts()), default=None)

    def named(self) -> set[int]:
        """The ranks that it names as the cause."""
        raise NotImplementedError

    def has_settled(self) -> bool:
        """Whether nothing more happens."""
        return bool(self.tend())

    def start(self) -> None:
        """Raises NotStarted. A hang of the first iteration is asked for before."""
        if self.hang.is_first:
            self._ask()
        self.launch_all()
        if not self.hang.is_first:
            self._wait(lambda: len(self._ends_s()) > USUAL_NUM, "does not train")

    def strike(self, case: str) -> Trial:
        """Hang; wait until it acts, and until nothing more happens. Raises NotStarted."""
        usual_s = None
        if not self.hang.is_first:
            usual_s = median(end - begin for begin, end in pairwise(self._ends_s()[-USUAL_NUM:]))
            self._ask()
        self._wait(lambda: bool(self._events("held")), "does not hang")
        self.begin(self._events("held")[0]["t"])
        faults.wait(lambda: self.told_s() or (time.time() if self.tend() else None), TOLD_S_MAX)
        came_s = self.told_s()
        faults.wait(lambda: time.time() if self.has_settled() else None, self.settle_s_max)
        self.watch.look()
        pids = {line["rank"]: line["pid"] for line in self.watch.lines}
        left = {proc.pid for proc in linux.table()}
        touched = [rank for rank, pid in pids.items() if pid not in left]
        why = f"collectives end after {self.hang.limit_s:g} s, as asked"
        if came_s is None:
            why = self.tend() or f"no reaction within {TOLD_S_MAX:g} s"
        return Trial(
            case,
            self.name,
            None if came_s is None else came_s - self._began_s,
            why,
            iteration_s=usual_s,
            named=float(came_s is not None and self.named() == {self.hang.victim}),
            healthy_touched=float(len({*touched} - {self.hang.victim})),
        )

    def begin(self, began_s: float) -> None:
        """What happens from now on counts: the rank hangs since `began_s`."""
        self._began_s = began_s

    def _ask(self) -> None:
        faults.ask(self.watch.folder / "hold" / f"1-{self.hang.victim}", self.hang.asked)

    def _wait(self, is_there: Callable[[], bool], otherwise: str) -> None:
        for _ in self.watch.while_new(STILL_S_MAX):
            if is_there():
                return
            if why := self.tend():
                raise NotStarted(why)
        raise NotStarted(f"{otherwise}: nothing new in its trace for {STILL_S_MAX:g} s")

    def _events(self, event: str) -> list[dict[str, float]]:
        return [line for line in self.watch.lines if line["event"] == event]

    def _ends_s(self) -> list[float]:
        return [line["t"] for line in self._events("done") if line["rank"] == 0]

    def _restarts(self) -> list[dict[str, float]]:
        """Processes that have begun again since the hang; torchft's also do in its first steps."""
        return [line for line in self._events("start") if line["t"] > self._began_s > 0]


class TorchrunLayout(LayoutPeer):
    """Two launchers, which restart nothing."""

    name = "torchrun"
    settle_s_max = 45.0
    """A launcher gives its workers 30 s to end after SIGTERM."""
    _said_s: float | None = None

    def launch_all(self) -> None:
        for number in range(NODES_NUM):
            words = launcher(number, self.hang.num_ranks, "127.0.0.1", self.port)
            self.spawn(self._log(number).stem, *words, "-m", "bench.detection.layout_loop")

    def told_s(self) -> float | None:
        if self._said_s is None and any(
            SAID in self._log(number).read_bytes() for number in range(NODES_NUM)
        ):
            self._said_s = time.time()
        return self._said_s

    def named(self) -> set[int]:
        """The ranks that the launchers call failed."""
        num_each = self.hang.num_ranks // NODES_NUM
        return {
            number * num_each + int(local)
            for number in range(NODES_NUM)
            for local in FAILED.findall(self._log(number).read_bytes())
        }

    def _log(self, number: int) -> Path:
        return self.folder / f"torchrun-{number}.log"


class NvrxLayout(LayoutPeer):
    """NVRx's in-process wrapper around the whole training."""

    name = "nvrx"
    settle_s_max = 30.0

    def launch_all(self) -> None:
        for rank in range(self.hang.num_ranks):
            self.spawn(
                f"rank-{rank}",
                "-m",
                "bench.detection.layout_nvrx",
                RANK=str(rank),
                LOCAL_RANK=str(rank),
            )

    def named(self) -> set[int]:
        """The ranks whose training function is not called again."""
        self.watch.look()
        return {*range(self.hang.num_ranks)} - {int(line["rank"]) for line in self._restarts()}

    def has_settled(self) -> bool:
        return self.named() <= {self.hang.victim} or super().has_settled()


class TorchftLayout(LayoutPeer):
    """A lighthouse, and a replica group for each replica, whose ranks have a world of their own."""

    name = "torchft_stable"

    def launch_all(self) -> None:
        axes, port = self.hang.axes, free_port()
        heartbeats_ms = map(str, HEARTBEATS_MS[self.name])
        self.spawn("lighthouse", "-c", LIGHTHOUSE, *heartbeats_ms, str(port))
        ports = [free_port() for _ in range(axes.dp)]
        for position in range(self.hang.num_ranks):
            at = coordinates(axes, position)
            self.spawn(
                f"rank-{position}",
                "-m",
                "bench.detection.layout_torchft",
                POSITION=str(position),
                RANK=str(at.pp * axes.tp + at.tp),
                WORLD_SIZE=str(axes.tp * axes.pp),
                MASTER_PORT=str(ports[at.dp]),
                REPLICA_GROUP_ID=str(at.dp),
                NUM_REPLICAS=str(axes.dp),
                TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
                **{LAYOUT: f"{axes.tp},{axes.pp},1"},
            )

    def named(self) -> set[int]:
        """torchft discards the step, and names nobody."""
        return set()


KINDS: dict[str, type[LayoutPeer]] = {
    kind.name: kind for kind in (TorchrunLayout, TorchftLayout, NvrxLayout)
}


def trials(folder: Path, name: str, case: str, num: int, say: Callable[[str], None]) -> list[Trial]:
    """`num` hangs, each in a launch of its own."""
    found: list[Trial] = []
    while len(found) < num and not faults.never(found):
        system = KINDS[name](folder / str(len(found)), HANGS[case])
        try:
            system.start()
            found.append(system.strike(case))
        except NotStarted as error:
            found.append(Trial(case, name, None, str(error)))
        finally:
            system.stop()
        took = found[-1].why if found[-1].detect_s is None else f"{found[-1].detect_s:.3f} s"
        say(f"{case} {name} {len(found)} of {num}: {took}")
    return found
