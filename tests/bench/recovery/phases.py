"""The phases of one recovery of Unicron, in ms, from the log and the ranks' trace."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from bench.recovery import watch as eyes
from bench.recovery.rows import Row, row
from bench.recovery.trial import Trial

Record = dict[str, Any]
PHASES = (
    "1_detected",
    "2_decided",
    "3_micro_batch_finished",
    "4_communicators_down",
    "5_reconfigure_ordered",
    "6_communicators_up",
    "7_resume_ordered",
    "8_begun",
    "9_micro_batches",
    "10_reduced_and_stepped",
)
"""In order; they sum to the whole recovery. `phases` defines their bounds."""
FLOORS = {"1_detected": "error_s", "4_communicators_down": "down_s", "6_communicators_up": "up_s"}


def phases(records: Iterable[Record], lines: Iterable[eyes.Line], trial: Trial) -> dict[str, float]:
    """The phases of one recovery, in ms; empty if a record is missing.

    A phase ends at its event. Detected: the agent has reaped the process. Decided: the incident is
    in the log. Finished: the slowest survivor has finished its micro-batch. Ordered: all members
    have answered and the order is in the log. Begun: the first micro-batch or reduction.
    """
    step = trial.step
    if step is None:
        return {}
    since = [record for record in records if record["at_s"] >= trial.struck_s - 0.001]
    new = step["generation"]
    opened = _first(since, "IncidentOpened")
    left = [
        record
        for record in since
        if record["kind"] == "Quiesced" and record["body"]["generation"] == trial.before
    ]
    order = _first(since, "Reconfigure", generation=new)
    came = [
        record
        for record in since
        if record["kind"] == "Reconfigured" and record["body"]["generation"] == new
    ]
    resume = _first(since, "Resume", generation=new)
    begun = min(
        (
            line["t"]
            for line in lines
            if line["generation"] == new and line["event"] in ("micro_batch", "reduce")
        ),
        default=None,
    )
    if not (opened and order and resume and left and came and begun):
        return {}
    cause = next((record for record in since if record["seq"] == opened["cause"]), opened)
    last = max(left, key=lambda record: float(record["occurred_s"]))
    down_s = next(
        (
            record["body"]["down_s"]
            for record in came
            if record["body"]["rank"] == last["body"]["rank"]
        ),
        0.0,
    )
    redone_s = trial.recompute_s or 0.0
    ends = [
        cause["occurred_s"],
        opened["at_s"],
        last["occurred_s"] - down_s,
        last["occurred_s"],
        order["at_s"],
        max(record["occurred_s"] for record in came),
        resume["at_s"],
        begun,
        begun + redone_s,
        step["t"],
    ]
    begins = [trial.struck_s, *ends]
    return {
        name: (end - begin) * 1000.0 for name, begin, end in zip(PHASES, begins, ends, strict=False)
    }


def usual_step_ms(lines: Iterable[eyes.Line], until_s: float) -> float | None:
    """Median time from a rank's reduction to its step, without faults, up to `until_s`."""
    took: list[float] = []
    begun: dict[tuple[int, int], float] = {}
    for line in sorted(lines, key=lambda line: float(line["t"])):
        key = (line["pid"], line["iteration"])
        if line["t"] > until_s:
            break
        if line["event"] == "reduce":
            begun[key] = line["t"]
        elif line["event"] == "done" and key in begun:
            took.append((line["t"] - begun[key]) * 1000.0)
    return median(took) if took else None


def rows(
    taken: list[dict[str, float]], steps_ms: list[float | None], floor: list[dict[str, float]]
) -> list[Row]:
    """The rows of the breakdown: each phase, and the same phase in bare torch."""
    taken = [one for one in taken if one]
    found: list[Row] = []
    for name in PHASES:
        found.append(row("breakdown", "unicron", name, [one[name] for one in taken], "ms"))
        if name in FLOORS:
            found.append(
                row(
                    "breakdown",
                    "bare_torch",
                    name,
                    [one[FLOORS[name]] * 1000.0 for one in floor],
                    "ms",
                )
            )
    found.append(
        row(
            "breakdown",
            "bare_torch",
            PHASES[-1],
            steps_ms,
            "ms",
            "the same, undisturbed, by all ranks",
        )
    )
    found.append(row("breakdown", "unicron", "whole", [sum(one.values()) for one in taken], "ms"))
    return found


def _first(records: Iterable[Record], kind: str, **wanted: object) -> Record | None:
    return next(
        (
            record
            for record in records
            if record["kind"] == kind
            and all(record["body"].get(key) == value for key, value in wanted.items())
        ),
        None,
    )
