"""`unicron simulate --from-log`: the incident that might have been."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...control_plane.simulation.accounting import LOST, Felt
from ...control_plane.simulation.counterfactual import counterfactual
from ...control_plane.simulation.counterfactual.counterfactual import (
    OURS,
    Choice,
    Played,
    Recording,
    weighed,
)
from ...control_plane.simulation.policies import POLICIES
from ...control_plane.simulation.trace.external_event import (
    Anything,
    Asked,
    Happening,
    Said,
    is_felt,
)
from ...events.errors import CorruptLog, SpecError, UsageError
from ...events.log import archive
from ...events.records.reports import TaskCancelRequested, TaskSubmitted, TaskWeightSet
from ...events.records.statuses import LOST_CONNECTION
from ...events.records.types import Body
from ...events.spec.job import WEIGHT_RATIO_MAX
from ..files.job_file import read_yaml
from ..terminal import console
from ..terminal.format import (
    SCREEN_COLUMNS,
    clipped,
    command,
    labelled,
    number_of,
    scaled,
    span,
    table,
)
from .compare import HEADS

Plain = dict[str, Any]
HINT = "--set weight.TASK=2, or --set policy.FIELD=VALUE (docs/reference/records.md, Policy)"


def from_log(path: Path, *, settings: Sequence[str], policies: Sequence[str], as_json: bool
             ) -> None:
    """Read, play, show. Raises UsageError for what cannot be read or chosen."""

    for name in policies:
        if name not in POLICIES:
            raise UsageError(f"--policy {name} is no policy", f"one of {', '.join(POLICIES)}")
    try:
        recording = counterfactual.read(lambda: archive.read(path), str(path))
    except CorruptLog as error:
        raise UsageError(f"{path}: {error}", "what stands before that seq is sound; "
                         "export the log again") from None
    try:
        choices = [Choice(), *chosen(recording, settings, policies)]
        played = [(choice, counterfactual.play(recording, choice)) for choice in choices]
    except SpecError as error:
        raise UsageError(str(error), error.hint) from None
    if as_json:
        console.out(json.dumps(told(recording, played)))
    else:
        console.lines(screen(recording, played, path))


def chosen(recording: Recording, settings: Sequence[str], policies: Sequence[str]) -> list[Choice]:
    """One for each policy, under these settings; with settings ours, too: others are compared with
    it by the same weights. Raises UsageError, SpecError."""
    weights: dict[str, float] = {}
    fields: Plain = {}
    for setting in settings:
        what, equals, value = (word.strip() for word in setting.partition("="))
        kind, _, name = what.partition(".")
        if not equals or not name or kind not in ("weight", "policy"):
            raise UsageError(f"--set {setting} says nothing that can be set", HINT)
        if kind == "weight":
            weights[name] = _weight(recording, setting, name, value)
        else:
            fields[name] = read_yaml(value, HINT)
    try:
        counterfactual.limits_of(recording, fields)
    except SpecError as error:
        path = str(error).removeprefix("limits: ")
        raise UsageError(f"--set policy.{path}", error.hint) from None
    names = [*dict.fromkeys([OURS, *policies] if settings else policies)]
    return [Choice(weights=weights, fields=fields, policy=name) for name in names]


def _weight(recording: Recording, setting: str, name: str, value: str) -> float:
    known = list(recording.names.values())
    if name not in known:
        raise UsageError(f"--set {setting}: the log has no task {name}",
                         f"it has {', '.join(known)}")
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not 1 / WEIGHT_RATIO_MAX <= weight <= WEIGHT_RATIO_MAX:
        raise UsageError(f"--set {setting}: the weight is {value!r}",
                         f"a number between {1 / WEIGHT_RATIO_MAX:g} and {WEIGHT_RATIO_MAX:g}")
    return weight


# --- what befell --------------------------------------------------------------------------------
def incidents(recording: Recording) -> list[tuple[int, Anything]]:
    """What losses may be laid to, in order, with its number in `felt`."""
    return list(enumerate(one for one in recording.happenings if is_felt(one)))


def words(one: Anything) -> str:
    """What befell, or was asked for."""
    match one:
        case Happening(event="fault", cause=cause, told_in_s=0.0) if cause == LOST_CONNECTION:
            return f"{one.node} started again"  # its agent had ended, and nobody had seen it
        case Happening() if one.event == "fault":
            whom = f"{one.task} rank {one.rank}, {one.node}" if one.task else one.node
            return f"{whom}: {one.cause}"
        case Happening():
            return f"{one.node} {one.event}"
        case Asked(body=TaskSubmitted()):
            return f"{one.task} submitted"
        case Asked(body=TaskWeightSet() as body):
            return f"{one.task}: weight {body.weight:g}"
        case Asked():
            whom = one.task or getattr(one.body, "node", "")
            return f"{whom} {_asked(one.body)}".strip()
        case Said():
            return f"{one.node}: {type(one.body).__name__}"
        case _:
            return ""


def _asked(body: Body) -> str:
    """`finished`, `cancelled`, `healing frozen`, `node drained`."""
    if isinstance(body, TaskCancelRequested):
        return body.reason if body.reason in ("finished", "failed") else "cancelled"
    told = "".join(f" {sign.lower()}" if sign.isupper() else sign for sign in type(body).__name__)
    return told.strip()


# --- as data ------------------------------------------------------------------------------------
def told(recording: Recording, played: Sequence[tuple[Choice, Played]]) -> Plain:
    """All of it; FLOP are weighted, times in seconds from the beginning of the horizon."""
    began_s, verdict = recording.began_s, recording.verdict
    return {
        "began_s": began_s, "horizon_s": recording.end_s - began_s,
        "decisions": {"equal": sum(verdict.recomputed.values()),
                      "differ": sum(verdict.differ.values()), "words": verdict.words},
        "recorded": _played(recording, Choice(), recording.played, recording.played),
        "choices": [_played(recording, choice, one, played[0][1]) for choice, one in played],
        "evidence": counterfactual.sentences(recording, played)}


def _played(recording: Recording, choice: Choice, one: Played, paper: Played) -> Plain:
    earnings, began_s = one.earnings, one.outcome.began_s
    against = weighed(paper, choice.weights)
    return {
        "choice": choice.words, "policy": choice.policy, "weights": choice.weights,
        "fields": choice.fields,
        "accumulated_waf_flop": earnings.flop, "lost_waf_flop": earnings.lost_flop,
        "difference_flop": earnings.flop - against,
        "downtime_task_s": earnings.down_s, "slot_s": earnings.slot_s,
        "lost_slot_s": earnings.lost_slot_s, "transitions": one.outcome.transitions,
        "ignored": one.outcome.ignored, "waf_flop_by_task": one.earned, "flop_by_task": one.work,
        "waf_over_time": [[at_s - began_s, waf] for at_s, waf in earnings.curve],
        "incidents": [{"at_s": what.at_s - recording.began_s, "what": words(what),
                       **_felt(earnings.felt[number])} for number, what in incidents(recording)]}


def _felt(felt: Felt) -> Plain:
    return {"lost_waf_flop": felt.lost_flop, "recomputed_waf_flop": felt.again_flop,
            "lost_slot_s": felt.lost_slot_s, "down_task_s": felt.down_s,
            "full_after_s": felt.over_s - felt.at_s if felt.over_s is not None else None}


# --- The screen of `unicron simulate --from-log`, at most 100 columns. ---

NAME_COLUMNS = 20
WHAT_COLUMNS, CHOICE_COLUMNS = 32, 14
CHOICES_NUM_MAX = 2
"""That are compared by incident; -o json has them all."""
EQUAL_SHARE = 5e-5
"""What is nearer to each other is called the same."""
SHOWN_NUM_MAX = 12


def screen(recording: Recording, played: Sequence[tuple[Choice, Played]], path: Path) -> list[str]:
    """What was recorded, how far paper is from it, and what each choice would have made of it."""
    begun, horizon_s = recording.begun, recording.end_s - recording.began_s
    verdict = recording.verdict
    lines = [f"{path}: {number_of(len(begun.slots), 'node')}, "
             f"{number_of(len(recording.specs), 'task')}, {span(horizon_s)}",
             *labelled("decided", verdict.words), ""]
    rows = [_row("recorded", recording.played, None),
            _row("on paper", played[0][1], recording.played.earnings.flop)]
    chosen = played[-1][0]  # all of them are under the same settings
    if chosen.weights:
        again = scaled(weighed(played[0][1], chosen.weights), "FLOP")
        rows.append(["on paper, so weighed", again, *["-"] * (len(LOST) + 3)])
    rows += [_row(choice.policy, one, weighed(played[0][1], choice.weights))
             for choice, one in played[1:]]
    head = ("CHOICE", "EARNED", "DIFFERS", "DOWN", "GPU", *(HEADS[what] for what in LOST))
    lines += [clipped(line, SCREEN_COLUMNS) for line in table(head, rows, right=range(1, 10))]
    if chosen.settings:
        lines += labelled("set", f"{chosen.settings}, in what stands below `on paper`"
                          + ("; DIFFERS is from paper so weighed" if chosen.weights else ""))
    lines += ["", *_by_incident(recording, played), ""]
    lines += labelled("differs", f"paper from the record: {_honest(recording, played[0][1])}; "
                      "choices from paper, so that both are played alike")
    lines += labelled("lost", "DOWN: task-time without training, GPU: slots' time short of full "
                      "strength; then, of what full strength earns, in %: until a fault was told, "
                      "on the way to train again, without slots, on fewer, and done again")
    for number, line in enumerate(counterfactual.sentences(recording, played)):
        lines += labelled("evidence" if not number else "", line)
    return [*lines, *labelled("best", _best(played)), *labelled("next", command(
        _next(recording, played, path)))]


def _row(name: str, one: Played, against: float | None) -> list[str]:
    earnings = one.earnings
    full, down_s = earnings.flop + sum(earnings.lost_flop.values()), sum(earnings.down_s.values())
    return [clipped(name, NAME_COLUMNS), scaled(earnings.flop, "FLOP"),
            _percent(earnings.flop, against), span(down_s),
            span(max(sum(earnings.lost_slot_s.values()), 0.0)),
            *(f"{100 * earnings.lost_flop[what] / full:.1f}" if full else "-" for what in LOST)]


def _percent(flop: float, against: float | None) -> str:
    if not against:
        return "-"
    more = round(100 * (flop / against - 1), 2)
    return f"{more:+.2f} %" if more else "0.00 %"


def _honest(recording: Recording, paper: Played) -> str:
    off = _percent(paper.earnings.flop, recording.played.earnings.flop)
    return f"{off} earned by the same choices"


def _by_incident(recording: Recording, played: Sequence[tuple[Choice, Played]]) -> list[str]:
    """What each took until full strength again; the dearest, where there are many."""
    every = shown = incidents(recording)
    columns = [recording.played, *(one for _, one in played[:1 + CHOICES_NUM_MAX])]
    if len(shown) > SHOWN_NUM_MAX:
        dear = sorted(shown, key=lambda one: -max(
            abs(column.earnings.felt[one[0]].lost_flop) for column in columns))
        shown = sorted(dear[:SHOWN_NUM_MAX], key=lambda one: one[0])
    if not shown:
        return ["nothing befell the cluster within the horizon"]
    names = ["RECORDED", "ON PAPER", *(clipped(choice.policy, 13)
                                       for choice, _ in played[1:1 + CHOICES_NUM_MAX])]
    wide = WHAT_COLUMNS + CHOICE_COLUMNS * (2 + CHOICES_NUM_MAX - len(columns))
    rows = [[f"+{span(one.at_s - recording.began_s)}", clipped(words(one), wide),
             *(_fault_cell(column.earnings.felt[number]) for column in columns)]
            for number, one in shown]
    lines = table(("AT", "LOST FLOP, FULL AGAIN AFTER", *names), rows,
                  right=range(2, 2 + len(columns)))
    left = len(every) - len(shown)
    more = labelled("not shown", f"{number_of(left, 'more')}, of which each lost less: -o json"
                    ) if left else []
    return [*(clipped(line, SCREEN_COLUMNS) for line in lines), *more]


def _fault_cell(felt: Felt) -> str:
    if not felt.has_hurt and not felt.lost_flop:
        return "-"
    after = span(felt.over_s - felt.at_s) if felt.over_s is not None else "never"
    return f"{scaled(felt.lost_flop, '')} {after}"


def _best(played: Sequence[tuple[Choice, Played]]) -> str:
    """Who earns most of all that were played, and by how much the next is beaten."""
    if len(played) < 2:
        return "nothing else was tried: name other weights, fields or policies"
    paper = played[0][1]
    alike = played[1:] if len(played) > 2 and played[1][0].settings else played
    ranked = sorted(((one.earnings.flop / max(weighed(paper, choice.weights), 1e-300), number)
                     for number, (choice, one) in enumerate(alike)), reverse=True)
    (first, winner), (second, beaten) = ranked[:2]
    names = [choice.words or "as recorded" for choice, _ in alike]
    if first - second < EQUAL_SHARE * first:
        return f"{names[winner]} and {names[beaten]} earn the same"
    return (f"{names[winner]}: {100 * (first / second - 1):.2f} % more than {names[beaten]}"
            if second > 0 else names[winner])


def _next(recording: Recording, played: Sequence[tuple[Choice, Played]], path: Path) -> str:
    """A first choice to try, or where to read on."""
    if len(played) < 2:
        return (f"unicron simulate --from-log {path} --policy megatron "
                f"--set weight.{next(iter(recording.names.values()))}=2")
    return f"unicron replay {path} --verify"
