"""What of a counterfactual a log holds, and what it does not: in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from .counterfactual import OURS, Choice, Played, Recording, as_measured
from .happening import Happening
from .measured import KEPT, STEPS, detected
from .policies import POLICIES

WORDS = {"start_s": "start", "quiesce_s": "quiesce", "regroup_s": "regroup",
         "checkpoint_s": "between checkpoints", "copy_s": "between copies"}


def sentences(recording: Recording, played: Sequence[tuple[Choice, Played]]) -> list[str]:
    """The first are of the log, the last of what was played."""
    return [_horizon(recording), *_sizes(recording), _costs(recording), *_absent(recording),
            *(line for choice, one in played for line in _of(recording, choice, one))]


def _horizon(recording: Recording) -> str:
    return (f"the horizon is {recording.end_s - recording.began_s:,.0f} s: from when all that had "
            "slots trained until the last record; a task that ended in the log is taken out then "
            "in each choice")


def _sizes(recording: Recording) -> list[str]:
    """Where a task's speed at a size is from."""
    found: list[str] = []
    for task, table in recording.measured.tables.items():
        seen = [size for size in sorted(recording.measured.times_s.get(task, {})) if size]
        others = [size for size in table.sizes if size not in seen]
        trained = f"trained here on {_numbers(seen)}" if seen else "told of no iteration"
        rest = f"; {_numbers(others)}: {table.origin}, never tried" if others else ""
        found.append(f"{recording.names[task]}'s FLOP/s are {table.origin}; it {trained} slots"
                     f"{rest}" if seen else
                     f"{recording.names[task]}'s FLOP/s are {table.origin}; it {trained}")
    return found


def _numbers(sizes: Sequence[int]) -> str:
    """Each, or where they are many, from which to which."""
    return (" ".join(map(str, sizes)) if len(sizes) <= 4 else
            f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}")


def _costs(recording: Recording) -> str:
    measured = recording.measured
    costs = measured.costs(POLICIES[OURS].costs, recording.began_s, _faults(recording))
    told = [f"{WORDS[name]} {getattr(costs, name):.3g} s ({len(measured.samples[name])})"
            for name in (*STEPS, *KEPT) if measured.samples[name]]
    told += [f"{cause} told after {costs.detect_s[cause]:.3g} s ({len(each)})"
             for cause, each in detected(_faults(recording)).items()]
    return ("Unicron's steps as measured here, each incident's own where it has them, else medians "
            "(of so many): " + ", ".join(told) if told else "no step of healing was measured here")


def _absent(recording: Recording) -> list[str]:
    measured, usual = recording.measured, POLICIES[OURS].costs
    never = [f"{WORDS[name]} {getattr(usual, name):g} s" for name in (*STEPS, *KEPT)
             if not measured.samples[name]]
    found = [f"never in this log, so the policy's constants: {', '.join(never)}"] if never else []
    silent = [recording.names[task] for task in recording.specs
              if not measured.times_s.get(task)]
    if silent:
        found.append(f"no iteration was told of {', '.join(silent)}: 10 s are taken")
    if recording.befallen.num_hearsay:
        found.append(f"{recording.befallen.num_hearsay} reports of a fault only tell of another's "
                     "end: not played as faults")
    if any(recording.specs[task].training is None for task in recording.specs):
        found.append("what a command did again is known only where it printed its iterations")
    return found


def _of(recording: Recording, choice: Choice, one: Played) -> list[str]:
    name, found = choice.words or "on paper", list[str]()
    if one.outcome.ignored:
        found.append(f"{name}: {one.outcome.ignored} of what befell met nobody: what was to be "
                     "struck, or asked for, was not there")
    costs, horizon_s = POLICIES[choice.policy].costs, recording.end_s - recording.began_s
    if not as_measured(choice):
        longest_s = max([costs.until_told_s(fault.cause, 0.0) for fault in _faults(recording)
                         if fault.event == "fault"], default=0.0) + costs.start_s
        found.append(f"{name}: our reading of it, with the costs that it publishes" + (
            f"; a fault and a restart alone take {longest_s:g} s, longer than the horizon"
            if longest_s > horizon_s else ""))
    if choice.weights:
        found.append(f"{name}: compared by these weights, also as recorded")
    return found


def _faults(recording: Recording) -> list[Happening]:
    return [one for one in recording.happenings if isinstance(one, Happening)]

