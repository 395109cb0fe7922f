"""Unicron's overhead without faults: its iteration time over that of the loop in bare Megatron.

All systems are up at once. Each runs alone for a block of seconds, in turn, while the processes of
all others are stopped (SIGSTOP). The mean iteration time of a block is the time between its first
and its last reported step, divided by the steps between them. So everything between two steps is
included. No trace is written.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from bench.recovery.job import Parallel
from bench.recovery.peers import Bare
from bench.recovery.rows import Row, interval, row
from bench.recovery.trial import STILL_S_MAX, NotStarted
from bench.recovery.unicron import Unicron
from unicron.workers.host import linux

SPARE_NUM = 2
"""Extra pairs: some blocks may have too few reported steps."""
BLOCK_S = 1.6
BLOCK_NUM = 2
"""A block lasts BLOCK_S plus BLOCK_NUM iterations: rank 0 reports once a second."""
STANDS_S = 3600.0
"""Fault timeouts: the stops between blocks must not look like faults."""
COPY_EVERY_NUM = 10
"""The default of a job spec."""
WARM_NUM = 8
Say = Callable[[str], None]


class Side(Protocol):
    """One of the systems that take turns."""

    name: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def pids(self) -> tuple[list[int], list[int]]:
        """The processes that supervise the ranks, and the ranks."""
        ...

    def steps(self) -> list[tuple[float, int]]:
        """The time of each report, and the number of steps taken by then."""
        ...


class BareSide:
    """The loop in bare Megatron."""

    name = "bare"

    def __init__(self, folder: Path) -> None:
        self._peer = Bare(folder, traced=False)

    def start(self) -> None:
        self._peer.start()

    def stop(self) -> None:
        self._peer.stop()

    def pids(self) -> tuple[list[int], list[int]]:
        return [], [process.pid for process in self._peer.processes.values()]

    def steps(self) -> list[tuple[float, int]]:
        self._peer.watch.look()
        return [(line["at_s"], line["iteration"] + 1) for line in self._peer.watch.told]


class UnicronSide:
    """Unicron with agents, control plane and log server."""

    def __init__(
        self,
        folder: Path,
        copy_every: int | None,
        name: str = "unicron",
        *,
        watches: bool = True,
        parallel: Parallel | None = None,
    ) -> None:
        self.name = name
        self._made = Unicron(
            folder,
            traced=False,
            copy_every=copy_every,
            watches=watches,
            parallel=parallel,
            policy=dict.fromkeys(
                ("silence_s_max", "stopped_s_max", "suspect_s_max", "hang_s_min"), STANDS_S
            ),
        )

    def start(self) -> None:
        self._made.start()

    def stop(self) -> None:
        self._made.stop()

    def pids(self) -> tuple[list[int], list[int]]:
        """Ranks and zygotes are descendants of the agents."""
        keepers = self._made.keepers()
        below = [proc.pid for proc in linux.descendants(set(keepers), linux.table())]
        return keepers, [pid for pid in below if pid not in keepers]

    def steps(self) -> list[tuple[float, int]]:
        self._made.look()
        return [
            (
                record["occurred_s"],
                record["body"]["first_iteration"] + len(record["body"]["losses"]),
            )
            for record in self._made.all("TaskProgressed")
        ]


def measure(folder: Path, cases: Sequence[str], num_pairs: int, say: Say) -> list[Row]:
    """The rows of `overhead` and `overhead_copies`, as far as `cases` has them."""
    sides: list[Side] = [BareSide(folder / "bare")]
    if "overhead" in cases:
        sides.append(UnicronSide(folder / "overhead", 0))
    if "overhead_copies" in cases:
        sides.append(UnicronSide(folder / "copies", COPY_EVERY_NUM, "unicron_copies"))
    blocks = in_turn(sides, num_pairs, say)
    return [
        one
        for case, name in (("overhead", "unicron"), ("overhead_copies", "unicron_copies"))
        if case in cases
        for one in compared(
            case, "bare", [(block["bare"], block[name]) for block in blocks], num_pairs
        )
    ]


def in_turn(sides: Sequence[Side], num_pairs: int, say: Say) -> list[dict[str, float | None]]:
    """The mean iteration time of each side in each block. Starts and stops the sides."""
    spans: list[dict[str, tuple[float, float]]] = []
    steps: dict[str, list[tuple[float, int]]] = {}
    try:
        for side in sides:
            say(f"overhead: {side.name} starts")
            side.start()
            _warm(side)
            stand_still(side)
        told = sides[0].steps()
        usual_s = (told[-1][0] - told[0][0]) / (told[-1][1] - told[0][1])
        block_s = BLOCK_S + BLOCK_NUM * usual_s
        say(f"overhead: {num_pairs + SPARE_NUM} times {', '.join(one.name for one in sides)}")
        for index in range(num_pairs + SPARE_NUM):
            # Reverse the order every other time, so that no side always comes second.
            turn = sides[:: 1 if index % 2 else -1]
            spans.append({side.name: block(side, block_s) for side in turn})
        for side in sides:
            go_on(side)
            steps[side.name] = side.steps()
            stand_still(side)
    except NotStarted as error:
        say(f"overhead: {error}")
    finally:
        for side in sides:
            go_on(side)
            side.stop()
    return [{name: mean_s(steps[name], *span) for name, span in one.items()} for one in spans]


def compared(
    case: str,
    other: str,
    pairs: Sequence[tuple[float | None, float | None]],
    num_pairs: int,
    system: str = "unicron",
) -> list[Row]:
    """Iteration times of both sides in pairs; the median of the ratios and its interval."""
    ratios = [ours / theirs for theirs, ours in pairs if theirs and ours]
    few = f"{len(ratios)} pairs of {num_pairs}" if len(ratios) < num_pairs else ""
    rows = [
        row(case, other, "iteration_s", [theirs for theirs, _ in pairs], "s"),
        row(case, system, "iteration_s", [ours for _, ours in pairs], "s"),
        row(case, system, "iteration_ratio", ratios, "ratio", few),
    ]
    for metric, edge in zip(
        ("iteration_ratio_low", "iteration_ratio_high"),
        interval(ratios) if ratios else (None, None),
        strict=True,
    ):
        rows.append(
            Row(case, system, metric, edge, "ratio", len(ratios), "95 % interval of the median")
        )
    return rows


def _warm(side: Side) -> None:
    """Wait until a side has made WARM_NUM steps. Raises NotStarted when it makes none for long."""
    num, last_s = 0, time.monotonic()
    while num < WARM_NUM:
        if time.monotonic() > last_s + STILL_S_MAX:
            raise NotStarted(f"{side.name} hangs: no step after {num} for {STILL_S_MAX:.0f} s")
        time.sleep(0.2)
        now = max((done for _, done in side.steps()), default=0)
        if now > num:
            num, last_s = now, time.monotonic()


def block(side: Side, block_s: float) -> tuple[float, float]:
    """Let one side run alone for `block_s`; return the begin and the end."""
    go_on(side)
    began_s = time.time()
    time.sleep(block_s)
    ended_s = time.time()
    stand_still(side)
    return began_s, ended_s


def mean_s(steps: Sequence[tuple[float, int]], from_s: float, to_s: float) -> float | None:
    """Seconds per iteration between the first and the last step reported in that time."""
    told = sorted((at_s, num) for at_s, num in steps if from_s < at_s < to_s)
    if len(told) < 2 or told[-1][1] <= told[0][1]:
        return None
    assert all(before[1] <= after[1] for before, after in pairwise(told)), "the step number fell"
    return (told[-1][0] - told[0][0]) / (told[-1][1] - told[0][1])


def stand_still(side: Side) -> None:
    """Stop the supervisors first: they must not see the ranks stop."""
    keepers, ranks = side.pids()
    _signal([*keepers, *ranks], signal.SIGSTOP)


def go_on(side: Side) -> None:
    keepers, ranks = side.pids()
    _signal([*ranks, *keepers], signal.SIGCONT)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
