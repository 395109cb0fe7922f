"""How Unicron's recovery time grows with ranks and parameters, and what a zygote saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.recovery import phases as parts
from bench.recovery.job import NUM_RANKS
from bench.recovery.rows import Row, row
from bench.recovery.trial import NotStarted, Reference, Trial, strike
from bench.recovery.unicron import NUM_AGENTS, Unicron

RANKS = (2, 3, 4)
TRIALS_NUM = {"1M": 3, "10M": 3, "100M": 1}
WARM_NUM = 2
Say = Callable[[str], None]


def measure(folder: Path, case: str, say: Say) -> list[Row]:
    """The rows of `growth_ranks` or `growth_params`. Each point is a separate cluster."""
    points = [(f"{num}_ranks", num, "1M") for num in RANKS]
    if case == "growth_params":
        points = [(f"{size}_params", NUM_RANKS, size) for size in TRIALS_NUM]
    rows: list[Row] = []
    for name, num_ranks, size in points:
        say(f"{case}: {name}")
        trials, resumes_s, why = _struck(folder / name, num_ranks, size)
        metrics = [
            row(case, f"unicron_{name}", metric, [getattr(one, metric) for one in trials], "s", why)
            for metric in ("iteration_s", "fault_to_step_s", "recompute_s")
        ]
        rows += [*metrics, row(case, f"unicron_{name}", "fault_to_resume_s", resumes_s, "s", why)]
    return rows


def _struck(folder: Path, num_ranks: int, size: str) -> tuple[list[Trial], list[float], str]:
    made = Unicron(folder, num_ranks=num_ranks, size=size)
    trials: list[Trial] = []
    resumes_s: list[float] = []
    try:
        made.start()
        for _ in range(TRIALS_NUM[size]):
            trial = strike(
                made,
                "dp4_sigkill",
                Reference([]),
                num_ranks,
                stays=True,
                warm=WARM_NUM,
                fits=lambda index: True,
            )
            if trial.step is None:
                return trials, resumes_s, trial.why
            trials.append(trial)
            resumes_s += resumed_s(made, trial)
    except NotStarted as error:
        return trials, resumes_s, str(error)
    finally:
        made.stop()
    return trials, resumes_s, ""


def resumed_s(made: Unicron, trial: Trial) -> list[float]:
    """From the fault to the first action in the new generation; recomputed work is not included."""
    found = parts.phases(made.look(), made.watch.lines, trial)
    return [sum(found[name] for name in parts.PHASES[:8]) / 1000.0] if found else []


def measure_restart(folder: Path, num: int, say: Say) -> list[Row]:
    """The rows of `restart`: StartRank to RankReady, by exec and from a zygote, in turn.

    The first node's ranks come from a zygote, the second's from exec. One rank of each node is
    killed in turn while the others train.
    """
    say("restart: by exec and out of a zygote, in turn")
    # The trials need more restarts than a task's default budget.
    made = Unicron(folder, by_exec=("n2",), policy={"restarts_max": 10 * num})
    taken: dict[str, list[float]] = {"unicron_zygote": [], "unicron_exec": []}
    why = ""
    try:
        made.start()
        for _ in range(num):
            for name, place in (("unicron_zygote", 0), ("unicron_exec", NUM_RANKS // NUM_AGENTS)):
                trial = strike(
                    made,
                    "dp4_sigkill",
                    Reference([]),
                    NUM_RANKS,
                    stays=True,
                    victim=place + 1,
                    fits=lambda index: True,
                    warm=WARM_NUM,
                )
                found = ready_s(made.look(), place + 1, trial.struck_s)
                taken[name] += [found] if found is not None else []
    except NotStarted as error:
        why = str(error)
    finally:
        made.stop()
    return [
        row("restart", name, "start_to_ready_s", values, "s", why) for name, values in taken.items()
    ]


def ready_s(records: Sequence[dict[str, Any]], rank: int, from_s: float) -> float | None:
    """From the order that starts a rank to the rank's RankReady, in seconds."""

    def first(kind: str) -> dict[str, Any] | None:
        return next(
            (
                record
                for record in records
                if record["kind"] == kind
                and record["body"]["rank"] == rank
                and record["at_s"] >= from_s
            ),
            None,
        )

    begun, ready = first("StartRank"), first("RankReady")
    if begun is None or ready is None:
        return None
    return float(ready["occurred_s"] - begun["at_s"])
