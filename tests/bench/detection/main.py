"""`make bench-detection`: detection times of Unicron and its peers, measured in one run.

The systems take turns. The printed results are also written to build/bench/detection.json.
docs/guides/bench-detection.md describes what is measured and how.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.detection import faults, hangs, layout_peers, network, silent_host
from bench.detection.faults import CASES, NotStruck, Trial
from bench.detection.torchrun import Torchrun
from bench.detection.unicron import Watched
from bench.recovery import environment
from bench.recovery.main import interrupt, words
from bench.recovery.overhead import UnicronSide, compared, in_turn
from bench.recovery.rows import Row, finish, row
from bench.recovery.trial import NotStarted
from bench.recovery.unicron import Unicron

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = ("unicron", "torchrun", "torchft_stable", "nvrx")
"""All are measured in the cases of a hang, and the first two in the others."""
ALL_CASES = (*CASES, *hangs.CASES, *silent_host.CASES)
OVERHEAD, OFF = "overhead", "unwatched"
PAPER_S = {"rank_killed": 1.8, "exception": 0.3, "agent_killed": 5.6}
"""Detection times of the Unicron paper, on other machines (rank_killed: from memory)."""
GOALS_S = {
    "rank_killed": 0.1,
    "exception": 0.1,
    "agent_killed": 2.0,
    **dict.fromkeys(silent_host.CASES, 6.0),
}
OVERHEAD_MAX = 1.01
UNITS = {
    "iteration_s": "s",
    "named": "0 or 1",
    "iterations_lost": "iterations",
    "healthy_touched": "processes",
}
"""What a trial may tell besides `detect_s`."""
EXACT_GOALS = {"named": 1.0, "iterations_lost": 0.0, "healthy_touched": 0.0}
Say = Callable[[str], None]


def main() -> None:
    """Inject faults, wait for the detections, compare."""
    parser = argparse.ArgumentParser(prog="make bench-detection")
    parser.add_argument("-n", type=int, default=10, help="faults of each kind, of each system")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks for overhead")
    parser.add_argument("--systems", type=words(SYSTEMS), default=SYSTEMS)
    choices = (*ALL_CASES, OVERHEAD)
    parser.add_argument("--cases", type=words(choices), default=choices)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "detection.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    signal.signal(signal.SIGTERM, interrupt)
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {text}", flush=True)

    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="unicron-bench-"))
    try:
        absent = environment.ensure(options.systems)
        for case in (case for case in ALL_CASES if case in options.cases):
            rows += rows_of(
                case,
                {
                    name: [Trial(case, name, None, absent[name])]
                    if name in absent
                    else _trials(folder, name, case, options.n, say)
                    for name in options.systems
                    if name in SYSTEMS[:2] or case in hangs.CASES
                },
            )
        if OVERHEAD in options.cases:
            rows += _overhead(folder / OVERHEAD, options.pairs, say)
    except KeyboardInterrupt:
        say("interrupted: what was measured by then is told below")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        finish(rows, options.out, began_s, held_to(rows), paper_s=PAPER_S)


def _trials(folder: Path, name: str, case: str, num: int, say: Say) -> list[Trial]:
    """`num` faults: all in one launch of Unicron, which recovers; torchrun is launched for each."""
    if case == network.CASE:
        return network.trials(folder, name, num, say)
    if case in hangs.CASES:
        place = folder / f"{name}-{case}"
        if name == "unicron":
            return hangs.trials(place, case, num, say)
        return layout_peers.trials(place, name, case, num, say)
    if case in silent_host.CASES:
        if name != "unicron":
            return [Trial(case, name, None, f"not run: its packets vanish in {network.CASE} too")]
        return silent_host.trials(folder / f"{name}-{case}", case, num, say)
    found: list[Trial] = []
    while len(found) < num and not faults.never(found):
        place = folder / f"{name}-{case}-{len(found)}"
        system = Watched(Unicron(place)) if name == "unicron" else Torchrun(place)
        try:
            system.start()
            while len(found) < num and not faults.never(found):
                found.append(system.strike(case))
                took = found[-1].why or f"{found[-1].detect_s:.3f} s"
                say(f"{case} {name} {len(found)} of {num}: {took}")
                if name != "unicron":
                    break
        except (NotStarted, NotStruck) as error:
            found.append(Trial(case, name, None, str(error)))
            say(f"{case} {name}: {error}")
        finally:
            system.stop()
    return found


def _overhead(folder: Path, num_pairs: int, say: Say) -> list[Row]:
    """The iteration time with all detection over that with none; both sides take turns."""
    sides = [UnicronSide(folder / OFF, 0, OFF, watches=False), UnicronSide(folder / "unicron", 0)]
    blocks = in_turn(sides, num_pairs, say)
    return compared(OVERHEAD, OFF, [(one[OFF], one["unicron"]) for one in blocks], num_pairs)


def rows_of(case: str, told: dict[str, list[Trial]]) -> list[Row]:
    """One row for each system: its median detection time."""
    rows: list[Row] = []
    for name, trials in told.items():
        num = sum(trial.detect_s is not None for trial in trials)
        whys = sorted({trial.why for trial in trials if trial.why})
        note = f"{num} of {len(trials)} told" + (f": {'; '.join(whys)}" if whys else "")
        rows.append(
            row(
                case,
                name,
                "detect_s",
                [trial.detect_s for trial in trials],
                "s",
                note if whys else "",
            )
        )
        told_more = {metric: [getattr(trial, metric) for trial in trials] for metric in UNITS}
        rows += [
            row(case, name, metric, values, UNITS[metric])
            for metric, values in told_more.items()
            if any(value is not None for value in values)
        ]
        if case == hangs.FIRST:
            limit_s = hangs.FIRST_ITERATION_S_MAX
            rows.append(row(case, name, "limit_s", [limit_s], "s"))
    return rows


def held_to(rows: Sequence[Row]) -> list[str]:
    """Each measured value beside its goal and the value of the Unicron paper."""
    lines: list[str] = []
    for one in rows:
        if one.system != "unicron" or one.value is None:
            continue
        most = goal(one, rows)
        paper = f"; the paper's: {PAPER_S[one.case]:g} s" if one.case in PAPER_S else ""
        if one.metric in EXACT_GOALS:
            wanted = EXACT_GOALS[one.metric]
            holds = "holds " if one.low == one.high == wanted else "BROKEN"
            lines.append(f"{holds}  {one.case} {one.metric}: {one.value:g}, goal {wanted:g}")
        elif most is not None:
            holds = "holds " if one.value <= most else "BROKEN"
            lines.append(
                f"{holds}  {one.case} {one.metric}: {one.value:.4g}, goal at most {most:.4g}{paper}"
            )
        elif one.metric == "detect_s" and one.high is not None:
            lines.append(f"        {one.case} {one.metric}: {one.value:.4g}, worst {one.high:.4g}")
    return lines


def goal(one: Row, rows: Sequence[Row]) -> float | None:
    """The most that this value may be; None if it has no goal. That of a hang depends on the
    iteration."""
    if one.metric == "iteration_ratio":
        return OVERHEAD_MAX
    if one.metric != "detect_s":
        return None
    if one.case in hangs.CASES:
        steps_s = [
            row.value
            for row in rows
            if (row.case, row.system, row.metric) == (one.case, one.system, "iteration_s")
        ]
        return hangs.goal_s(one.case, (steps_s or [0.0])[0] or 0.0)
    return GOALS_S.get(one.case)


if __name__ == "__main__":
    main()
