"""The system `bare_torch`, the floor of a case: what no recovery from a killed rank can leave out.

The same ranks and as many gradient bytes, without a control plane, a model or a copy of its state:
the survivors destroy and build their groups and reduce once more (floor.py).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.recovery.job import NUM_RANKS, Parallel, spec
from bench.recovery.moved import Axes, parts_of
from bench.recovery.peers import Peer
from bench.recovery.rows import Row, row
from bench.recovery.trial import NotStarted

NAME = "bare_torch"
TRIAL_S_MAX = 180.0
"""More than the limits inside floor.py add up to."""
Times = dict[str, float]
Say = Callable[[str], None]


class Layout(NamedTuple):
    """The task whose gradient is reduced, and the places of its groups, as Unicron builds them."""

    axes: Axes
    parallel: Parallel | None = None
    size: str = "1M"
    before: Sequence[Sequence[int]] = ()
    after: Sequence[Sequence[int]] = ()


DP4 = {"tp": 1, "pp": 1, "dp": NUM_RANKS}
TP2DP2 = Layout(
    {"tp": 2, "pp": 1, "dp": 2},
    {"tensor": [2]},
    before=((0, 2), (1, 3), (0, 1), (2, 3)),
    after=((0, 1),),
)
LAYOUTS = {
    "dp4_sigkill": Layout(DP4),
    "tp2dp2_sigkill": TP2DP2,
    "pp2dp2_sigkill": Layout(
        {"tp": 1, "pp": 2, "dp": 2},
        {"pipeline": [2, 3]},
        "1M_even",
        before=((0, 1), (2, 3), (0, 2), (1, 3)),
        after=((0, 1, 2), (0, 2)),
    ),
    "zero1_sigkill": Layout(DP4, {"optimizer": "mirrored"}),
    # The loop's model has about as many parameters.
    "megatron_default_sigkill": TP2DP2,
}
"""The cases of a killed rank."""


def gradient_bytes(layout: Layout) -> int:
    """The gradient bytes of the rank that has most."""
    task = spec("bench", Path("unused"), size=layout.size, parallel=layout.parallel)
    return max(int(part["gradient_bytes"]) for part in parts_of(task, [layout.axes])[0])


class BareTorch(Peer):
    """One trial, in a program of its own, bounded and ended as every peer is."""

    name = NAME

    def __init__(self, folder: Path, layout: Layout, num_bytes: int) -> None:
        super().__init__(folder)
        self._asked = {"num_bytes": num_bytes, "before": layout.before, "after": layout.after}

    def start(self) -> None:
        self.spawn("floor", "-m", "bench.recovery.floor", json.dumps(self._asked))

    def times(self) -> Times:
        """Run the trial: the times that floor.py prints. Raises NotStarted."""
        try:
            self.start()
            code = self.processes["floor"].wait(TRIAL_S_MAX)
            if code:
                raise NotStarted(f"ended with exit code {code}: {self.last_words()}")
            return dict(json.loads((self.folder / "floor.log").read_text().splitlines()[-1]))
        except subprocess.TimeoutExpired as error:
            raise NotStarted(f"not done within {TRIAL_S_MAX:.0f} s: killed") from error
        finally:
            self.stop()


class Floor:
    """The trials of one case."""

    def __init__(self, folder: Path, case: str, say: Say) -> None:
        self._folder, self.case, self._say = folder, case, say
        self._layout = LAYOUTS[case]
        self._bytes = 0
        self._whys: list[str] = []
        self.times: list[Times] = []

    def measure(self) -> None:
        """One more trial; a failed one is said and kept in the note."""
        number = len(self.times) + len(self._whys) + 1
        said = f"{self.case} {NAME} {number}:"
        try:
            self._bytes = self._bytes or gradient_bytes(self._layout)
            place = self._folder / f"{NAME}-{self.case}-{number}"
            self.times.append(BareTorch(place, self._layout, self._bytes).times())
            self._say(f"{said} {self.times[-1]['fault_to_step_s']:.3f} s")
        except NotStarted as error:
            self._whys.append(str(error))
            self._say(f"{said} {error}")

    def rows(self) -> list[Row]:
        """How many trials came to their end, and the time from the kill to that."""
        done, num = len(self.times), len(self.times) + len(self._whys)
        if not num:
            return []
        note = "; ".join((f"{done} of {num} reduced {self._bytes} bytes again", *set(self._whys)))
        return [
            Row(self.case, NAME, "recovered", float(done) if done else None, "trials", num, note),
            row(
                self.case,
                NAME,
                "fault_to_step_s",
                [one["fault_to_step_s"] for one in self.times],
                "s",
            ),
        ]
