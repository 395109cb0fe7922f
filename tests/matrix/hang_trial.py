"""Runs the hang rows of the fault matrix on one real cluster, and judges them.

Each row is a task of its own. It trains to its end, and its losses and its model are compared with
those of an undisturbed run.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from loop_driver import flagged_example
from matrix.hang_cells import ITERATIONS, MICRO_BATCHES, MISMATCHES, SAVES_EVERY, HangCell
from megatron_trial import WORDS, clones
from real_cluster import RealCluster, running
from source_changes import changed
from twins import RATE, Spec, Twins, small, unequal
from unicron.control_plane.incidents.hangs import FIRST_MORE_S
from unicron.events.records.envelope import Record

HANG_S_MIN, FIRST_S_MAX = 3.0, 6.0
"""In the policy: the least limit of an iteration, and that of what has no usual time. Longer than
the delay of a rank on a busy machine."""
POLICY = {"hang_s_min": HANG_S_MIN, "first_iteration_s_max": FIRST_S_MAX, "restart_iterations": 5}
ACTED_S_MAX = 5.0
"""From the limit of a hang until it is acted upon."""
SLOW_S = 0.8
"""How long a healthy rank sleeps in each iteration until the hung one is replaced, so that the task
does not end before. Shorter than any stall."""
MODEL = {"num_layers": 4, "hidden": 64, "num_heads": 2, "sequence": 64}
LOOP_RATE = 1e-4
"""The learning rate of the last steps of the example, and of Megatron-LM's script."""
HELD_FORWARD = (
    "    timers = get_timers()\n",
    "    timers = get_timers()\n"
    "    import sys\n\n"
    "    if not model.training:\n"
    '        sys.rank_trace.note("evaluate", 0, 0)\n',
)
"""A change of its `forward_step`."""


NO_CLONE = "UNICRON_MEGATRON_LM names no clone of Megatron-LM"


class HangVerdict(NamedTuple):
    """The result of a cell. `acted_s`: from the hang until it was acted upon."""

    cell: HangCell
    outcome: str
    why: str = ""
    acted_s: float = 0.0
    lasted_s: float = 0.0


class _Story(NamedTuple):
    """What happened. `before`: the pids as the rank hung; `kept`: the ranks whose process is the
    same when the task is whole again."""

    after: int
    task: int
    hung_s: float
    before: dict[int, int]
    opened: Record
    kept: set[int]
    ended: dict[str, Any]


def hang_cluster(folder: Path) -> AbstractContextManager[RealCluster]:
    """The cluster of all rows. It has eight slots."""
    return running(folder, 2, POLICY, num_slots=4)


class HangTrials:
    """Runs cells on a `hang_cluster`, one after another."""

    def __init__(self, folder: Path, cluster: RealCluster, twins: Twins) -> None:
        self._folder, self._cluster, self._twins = folder, cluster, twins
        self._finals: dict[str, Path] = {}

    def run(self, cell: HangCell) -> HangVerdict:
        """Run and judge a cell. Failures are returned, not raised."""
        absent = cell.absent or (NO_CLONE if cell.engine == "Megatron-LM" and not clones() else "")
        if absent:
            return HangVerdict(cell, "not run", absent)
        folder = self._folder / "".join(c if c.isalnum() else "-" for c in cell.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began_s, after, acted_s = time.monotonic(), self._cluster.seq(), 0.0
        try:
            spec = self._spec(cell, folder)
            story = self._play(cell, spec)
            acted_s = story.opened.at_s - story.hung_s
            wrong = [*self._complaints(cell, story), *self._differences(cell, spec)]
        except (AssertionError, OSError):
            (folder / "why").write_text(traceback.format_exc())
            wrong = [traceback.format_exc().strip().splitlines()[-1]]
        if wrong:
            (folder / "log").write_text(self._cluster.tail(after))
        self._cluster.restore()
        return HangVerdict(
            cell,
            "not equal" if wrong else "equal",
            "; ".join(wrong),
            acted_s,
            time.monotonic() - began_s,
        )

    # --- the task ---
    def _spec(self, cell: HangCell, folder: Path) -> Spec:
        saves = SAVES_EVERY if cell.point.event == "save" else 0
        if cell.engine == "train":
            spec = small(
                "hang",
                folder,
                slots=(1, cell.layout.num),
                iterations=ITERATIONS[cell.engine],
                checkpoint_every=saves,
                copy_every=0,
                model=MODEL,
                batch={"global": 2 * MICRO_BATCHES, "micro": 2},
            )
            spec["train"] |= cell.layout.train
            return spec
        return {
            "apiVersion": "unicron/v1",
            "name": "hang",
            "slots": {"min": 1, "max": cell.layout.num},
            "command": _loop(cell, folder) if cell.engine == "loop" else _megatron(cell, folder),
            "heal": "in-memory",
            "loop": {
                "micro_batches": MICRO_BATCHES,
                "iterations": ITERATIONS[cell.engine],
                "parallel": cell.layout.parallel,
                "output": str(folder / "out"),
                "checkpoint_every": saves,
                "copy_every": 0,
            },
        }

    def _play(self, cell: HangCell, spec: Spec) -> _Story:
        cluster, num = self._cluster, cell.layout.num
        after = cluster.seq()
        task = cluster.submit(spec)
        cluster.hold(task, cell.victim, **cell.hold())
        line = cluster.wait_held(task, cell.victim, 0.0)
        before = cluster.pids(task)
        opened = cluster.wait_told(after, "IncidentOpened", task=task)
        slow = cluster.hold(task, (cell.victim + 1) % num, event="done", then="slow", slow_s=SLOW_S)
        cluster.wait_told(opened.seq, "TaskProgressed", task=task)
        cluster.wait_whole(task, num)
        kept = cluster.kept(task, before)
        slow.unlink()
        ended = cluster.wait_ended(task)
        cluster.seq()
        return _Story(after, task, float(line["t"]), before, opened, kept, ended)

    # --- what must be ---
    def _complaints(self, cell: HangCell, story: _Story) -> Iterator[str]:
        cluster, after, victim = self._cluster, story.after, cell.victim
        opened: Any = story.opened.body
        named = (opened.severity, opened.status, opened.ranks)
        if cell.is_unnamed:
            if opened.severity != "SEV3" or victim not in _in_circle(opened.why):
                yield f"named {named}: {opened.why}"
        elif named != ("SEV2", "task hang", (victim,)):
            yield f"named {named}: {opened.why}"
        if cell.fault in MISMATCHES and not _says_mismatch(opened.why):
            yield f"no mismatch: {opened.why}"
        if story.opened.at_s > (due_s := self._due_s(cell, story)) + ACTED_S_MAX:
            yield f"acted upon {story.opened.at_s - due_s:.1f} s after the limit"
        exits: list[Any] = cluster.told(after, "RankExited", task=story.task)
        ended = [record.body.rank for record in exits if record.body.exit_code != 0]
        lost = [] if cell.is_unnamed else [victim]
        if ended != lost or story.kept != set(story.before) - {*lost}:
            yield f"kept {sorted(story.kept)}, ended {ended}"
        incidents = cluster.told(after, "IncidentOpened")
        if len(incidents) != 1:
            yield f"{len(incidents)} incidents"
        yield from self._losses(story)

    def _losses(self, story: _Story) -> Iterator[str]:
        (*_, closed) = self._cluster.told(story.after, "IncidentClosed")
        body: Any = closed.body
        if body.iterations_lost or body.ckpt_read or body.outcome != "healed":
            yield f"{body.outcome}, {body.iterations_lost} iterations lost, {body.ckpt_read=}"
        if story.ended["state"] != "finished":
            yield f"{story.ended['state']}: {story.ended.get('why', '')}"

    def _due_s(self, cell: HangCell, story: _Story) -> float:
        """When the hang is long enough to be acted upon."""
        if cell.point.is_untimed:
            return story.hung_s + FIRST_S_MAX + FIRST_MORE_S
        stalls: list[Any] = self._cluster.told(story.after, "RankStalled", task=story.task)
        normal_s = max((record.body.normal_s for record in stalls), default=0.0)
        # On a machine with too few cores, an agent leaves out the time in which its rank had none.
        told_s = max((record.at_s for record in stalls if record.seq < story.opened.seq), default=0)
        times = 2 if cell.is_unnamed else 1
        return max(story.hung_s + times * max(3 * normal_s, HANG_S_MIN), told_s + normal_s)

    # --- the undisturbed run ---
    def _differences(self, cell: HangCell, spec: Spec) -> Iterator[str]:
        final = self._undisturbed(cell, spec)
        ours = Path(spec["train" if cell.engine == "train" else "loop"]["output"]) / "latest"
        if why := unequal(ours.resolve(), final, RATE if cell.engine == "train" else LOOP_RATE):
            yield why

    def _undisturbed(self, cell: HangCell, spec: Spec) -> Path:
        """The final state of the same training without a fault. All layouts of `train:` begin and
        end alike; a loop trains in the layout of its row."""
        key = cell.engine if cell.engine == "train" else cell.variant.name
        if key not in self._finals:
            if cell.engine == "train":
                self._finals[key] = self._twins.trained(
                    self._twins.begin(spec, ITERATIONS["train"])
                )
            else:
                self._finals[key] = self._trained(cell)
        return self._finals[key]

    def _trained(self, cell: HangCell) -> Path:
        folder = self._folder / f"twin-{len(self._finals)}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        spec = self._spec(cell, folder)
        ended = self._cluster.wait_ended(self._cluster.submit(spec))
        assert ended["state"] == "finished", ended
        return (folder / "out" / "latest").resolve()


def _loop(cell: HangCell, folder: Path) -> list[str]:
    """The command of the example's loop."""
    script = flagged_example(folder, (*cell.layout.flags, "held evaluation"))
    words = ["--iterations", str(ITERATIONS[cell.engine]), "--micro-batches", str(MICRO_BATCHES)]
    sharded = ["--sharded"] * cell.layout.is_sharded
    return [sys.executable, str(script), *words, *sharded]


def _megatron(cell: HangCell, folder: Path) -> list[str]:
    """The command of Megatron-LM's own script. An evaluation of it can be held."""
    clone, copy = clones()[0], folder / "megatron-lm"
    copy.mkdir()
    for file in clone.iterdir():
        (copy / file.name).symlink_to(file)
    script = copy / "pretrain_gpt.py"
    text = script.read_text()
    script.unlink()
    script.write_text(changed(text, [HELD_FORWARD]))
    layout = cell.layout
    words = ["--num-layers", "4", "--global-batch-size", str(2 * MICRO_BATCHES)]
    words += ["--train-iters", str(ITERATIONS[cell.engine])]
    words += ["--num-virtual-stages-per-pipeline-rank", "2"] * ("chunks" in layout.parallel)
    words += ["--use-distributed-optimizer"] * layout.is_sharded
    words += ["--overlap-grad-reduce"] * ("overlap" in layout.train)
    program = [sys.executable, "-P", "-m", "unicron.cli.main", "megatron"]
    return [*program, str(script), *WORDS, *words]


def _in_circle(why: str) -> set[int]:
    """The ranks of the circle that an incident tells: `ranks 1 3`, or `ranks 0-3`."""
    found = re.search(r"in a circle with ranks ([\d -]+)", why)
    parts = [part.split("-") for part in found[1].split()] if found else []
    return {
        rank for first, *last in parts for rank in range(int(first), int([first, *last][-1]) + 1)
    }


def _says_mismatch(why: str) -> bool:
    return any(words in why for words in ("in a circle", ", where ", "none of its step"))
