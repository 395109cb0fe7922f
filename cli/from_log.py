"""`unicron simulate --from-log`: the incident that might have been."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..control_plane.simulation import counterfactual, evidence
from ..control_plane.simulation.counterfactual import OURS, Choice, Played, Recording, weighed
from ..control_plane.simulation.happening import Anything, Asked, Happening, Said, is_felt
from ..control_plane.simulation.policies import POLICIES
from ..control_plane.simulation.traced import Felt
from ..events import archive
from ..events.errors import CorruptLog, SpecError, UsageError
from ..events.reports import Body, TaskCancelRequested, TaskSubmitted, TaskWeightSet
from ..events.spec import WEIGHT_RATIO_MAX
from ..events.statuses import LOST_CONNECTION
from . import say
from .job_file import read_yaml

Plain = dict[str, Any]
HINT = "--set weight.TASK=2, or --set policy.FIELD=VALUE (docs/reference/records.md, Policy)"


def from_log(path: Path, *, settings: Sequence[str], policies: Sequence[str], as_json: bool
             ) -> None:
    """Read, play, show. Raises UsageError for what cannot be read or chosen."""
    from .screen_from_log import screen

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
        say.out(json.dumps(told(recording, played)))
    else:
        say.lines(screen(recording, played, path))


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
        "evidence": evidence.sentences(recording, played)}


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
