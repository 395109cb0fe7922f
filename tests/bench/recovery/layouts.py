"""The cases of layouts: one of four ranks is killed, the layout changes, and changes back.

Only Unicron and the floor are measured: no peer changes a layout. All faults of a kind of task
happen in one launch, each at full strength. The losses are compared with those of an undisturbed
reference run. That run is data-parallel in bare Megatron, since the loss of a batch is the same in
any layout but for rounding. Two undisturbed runs in layouts of the task give the tolerance: they
sum in other orders than the reference run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.recovery import default_job
from bench.recovery import watch as eyes
from bench.recovery.bare_torch import Floor
from bench.recovery.growth import resumed_s
from bench.recovery.job import SAVE_EVERY_NUM, VICTIM_NUM, Parallel
from bench.recovery.moved import Change, change, in_words, least_bytes
from bench.recovery.rounds import rows_of, train_twin, train_undisturbed
from bench.recovery.rows import Row, row
from bench.recovery.trial import NotStarted, Reference, Trial, strike
from bench.recovery.unicron import Unicron
from reference import tolerance

TWIN_NUM = 30
"""Iterations of the reference run for each fault: the maximum between two faults."""
Say = Callable[[str], None]


class Kind(NamedTuple):
    """A task: allowed layouts, replicas on four ranks, model size, copy interval. `is_loop`: it is
    the loop of default_job.py, and its reference run is that loop without a fault."""

    parallel: Parallel
    num_replicas: int
    size: str = "1M"
    copy_every: int = 0
    is_loop: bool = False


CASES = {
    "tp2dp2_sigkill": {"unicron": Kind({"tensor": [2]}, 2)},
    "pp2dp2_sigkill": {"unicron": Kind({"pipeline": [2, 3]}, 2, "1M_even")},
    # A rollback loads a copy; the copy is as old as the checkpoints of the peers that roll back.
    "zero1_sigkill": {
        "unicron_mirrored": Kind({"optimizer": "mirrored"}, 4),
        "unicron_sharded": Kind(
            {"optimizer": "sharded", "mirror": "never"}, 4, "1M", SAVE_EVERY_NUM
        ),
    },
    default_job.CASE: {"unicron": Kind(default_job.LAYOUT, 2, "loop", is_loop=True)},
}
"""All kinds of a case have one size."""
ORDERS: dict[str, tuple[tuple[Parallel, int], ...]] = {
    "tp2dp2_sigkill": (({"tensor": [2]}, 4), ({"tensor": [2]}, 2)),
    "pp2dp2_sigkill": (({"pipeline": [2]}, 4), ({"pipeline": [3]}, 3)),
    "zero1_sigkill": (({}, 3), ({}, 2)),
    default_job.CASE: ((default_job.LAYOUT, 2),),
}
"""The layouts and numbers of ranks whose undisturbed runs give the tolerance of a case."""


class Struck(NamedTuple):
    """A fault, and the return to full strength."""

    trial: Trial
    resumed_s: list[float]
    changes: tuple[Change, ...]
    """The change at the fault, and the change at the return, as far as they happened."""
    grow_pause_s: float | None = None


def measure(
    folder: Path, case: str, num: int, twins: dict[str, list[float]], say: Say, *, floored: bool
) -> list[Row]:
    """The rows of a case: `num` faults for each of its kinds of task, and of its floor, which is
    measured before and after them.

    `twins`: losses of the reference runs by model size. This function adds the runs that it trains.
    """
    folder.mkdir(parents=True)
    kinds = CASES[case]
    first = next(iter(kinds.values()))
    size, is_loop = first.size, first.is_loop
    if size not in twins:
        say(f"{case}: the undisturbed twin")
        twins[size] = (
            train_undisturbed(
                Unicron(folder / "twin", traced=False, parallel=first.parallel, is_loop=True),
                TWIN_NUM * num,
            )
            if is_loop
            else train_twin(folder / "twin", TWIN_NUM * num, size)
        )
    say(f"{case}: undisturbed runs in other orders of summing")
    noises = [
        _noise(
            Unicron(
                folder / f"order-{number}",
                num_ranks=num_ranks,
                size=size,
                traced=False,
                parallel=parallel,
                is_loop=is_loop,
            ),
            twins[size],
        )
        for number, (parallel, num_ranks) in enumerate(ORDERS[case])
    ]
    twin = Reference(twins[size], tolerance(noises))
    floor = Floor(folder, case, say)
    for _ in range((num + 1) // 2 if floored else 0):
        floor.measure()
    rows = [
        one
        for name, kind in kinds.items()
        for one in _rows_of(folder / name, case, name, kind, twin, num, say)
    ]
    for _ in range(num // 2 if floored else 0):
        floor.measure()
    return [*rows, *floor.rows()]


def _noise(system: Unicron, twin: list[float]) -> float:
    """The largest difference of an undisturbed run of the system from the reference run; NaN if the
    run is shorter."""
    losses = dict(enumerate(train_undisturbed(system, len(twin))))
    gap = eyes.differs(losses, twin, 0, len(twin))
    return math.nan if gap is None else gap


def _rows_of(
    folder: Path, case: str, name: str, kind: Kind, twin: Reference, num: int, say: Say
) -> list[Row]:
    made = Unicron(
        folder,
        size=kind.size,
        parallel=kind.parallel,
        copy_every=kind.copy_every,
        is_loop=kind.is_loop,
        # The trials need more restarts than a task's default budget.
        policy={"restarts_max": 10 * num},
    )
    made.name = name
    found: list[Struck] = []
    try:
        made.start()
        for number in range(1, num + 1):
            found.append(_struck(made, case, kind, twin))
            trial = found[-1].trial
            say(
                f"{case} {number} of {num}: {name} "
                + (
                    trial.why
                    or (
                        f"{trial.fault_to_step_s:.3f} s and {trial.recompute_s:.3f} s of "
                        "micro-batches, "
                        f"{trial.iterations_lost:.0f} iterations lost"
                    )
                )
            )
            if trial.step is None:
                break
    except NotStarted as error:
        say(f"{case}: {name} {error}")
        found.append(Struck(Trial(case, name, 0.0, 0, 0.0, why=str(error)), [], ()))
    finally:
        made.stop()
    return [
        *rows_of(case, name, [one.trial for one in found]),
        *_more_rows(case, name, found, made.spec),
    ]


def _struck(made: Unicron, case: str, kind: Kind, twin: Reference) -> Struck:
    trial = strike(made, case, twin, stays=True, victim=VICTIM_NUM, num_replicas=kind.num_replicas)
    if trial.step is None:
        return Struck(trial, [], ())
    healed = trial.step["generation"]
    lines, records = made.watch.lines, made.look()
    # The first generation with all ranks is the return to full strength.
    grown = next(
        (
            record["body"]["generation"]
            for record in records
            if record["kind"] == "Reconfigure"
            and record["body"]["generation"] > healed
            and len(record["body"]["members"]) == made.num_ranks
        ),
        None,
    )
    changes = [change(records, one) for one in (healed, grown) if one is not None]
    pause_s = None if grown is None else pause(lines, grown)
    return Struck(trial, resumed_s(made, trial), tuple(changes), pause_s)


def pause(lines: Sequence[eyes.Line], generation: int) -> float | None:
    """From the last step before that generation to its first step, without its micro-batches.

    None if one of these steps is missing.
    """
    step_s = [
        line["t"] for line in lines if line["event"] == "done" and line["generation"] < generation
    ]
    step = min(
        (line for line in lines if line["event"] == "done" and line["generation"] == generation),
        key=lambda line: float(line["t"]),
        default=None,
    )
    if step is None or not step_s:
        return None
    began_s = max(step_s)
    before = {line["pid"]: generation - 1 for line in lines}
    return float(step["t"] - began_s - eyes.recompute_s(lines, step, before, began_s))


def _more_rows(case: str, name: str, found: Sequence[Struck], spec: dict[str, Any]) -> list[Row]:
    """The rows that only a change of layout has: its pauses, and the bytes of state moved."""
    rows = [
        row(
            case,
            name,
            "fault_to_resume_s",
            [value for one in found for value in one.resumed_s],
            "s",
        ),
        row(case, name, "grow_pause_s", [one.grow_pause_s for one in found], "s"),
    ]
    for index, what in enumerate(("fault", "grow")):
        changes = [one.changes[index] for one in found if len(one.changes) > index]
        note = ", ".join(
            sorted({f"{what}: {in_words(one.before)} to {in_words(one.now)}" for one in changes})
        )
        least = least_bytes(spec, changes) if changes and "train" in spec else []
        rows += [
            row(case, name, f"{what}_settle_s", [one.settle_s for one in changes], "s"),
            row(
                case,
                name,
                f"{what}_moved_bytes",
                [one.moved_bytes for one in changes],
                "bytes",
                note,
            ),
            row(case, name, f"{what}_least_bytes", least, "bytes"),
        ]
    return rows


def reshaped(rows: Sequence[Row]) -> list[Row]:
    """The pause of a change of the model-parallel layout over that of a change of replicas.

    The policy's `reshape_s` is `transition_s` times this ratio. Both count the change and the
    return: PP 2 x DP 2 to PP 3, and TP 2 x DP 2 to TP 2. Micro-batches are not included.
    """
    found = {(one.case, one.metric): one.value for one in rows if one.system == "unicron"}
    both_s = [
        [found.get((case, metric)) for metric in ("fault_to_resume_s", "grow_pause_s")]
        for case in ("pp2dp2_sigkill", "tp2dp2_sigkill")
    ]
    shape_s, replicas_s = ([one for one in each if one is not None] for each in both_s)
    if len(shape_s) < 2 or len(replicas_s) < 2:
        return []
    return [Row("reshape", "unicron", "pause_ratio", sum(shape_s) / sum(replicas_s), "ratio", 1)]
