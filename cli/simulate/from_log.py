"""`unicron simulate --from-log`: a recorded log, simulated with other choices."""

import math
from collections.abc import Sequence
from pathlib import Path

from ...control_plane.simulation.accounting import LOSSES, EventLoss
from ...control_plane.simulation.counterfactual import counterfactual
from ...control_plane.simulation.counterfactual.counterfactual import (
    OURS,
    Choice,
    Recording,
    RunResult,
    reweighted_flop,
)
from ...control_plane.simulation.policies import POLICIES
from ...control_plane.simulation.trace.external_event import (
    AnyEvent,
    ExternalEvent,
    NodeReport,
    OperatorRequest,
    causes_loss,
)
from ...events.errors import CorruptLog, SpecError, UsageError
from ...events.log import archive
from ...events.records.reports import TaskCancelRequested, TaskSubmitted, TaskWeightSet
from ...events.records.statuses import LOST_CONNECTION
from ...events.records.types import Body
from ...events.spec.job import WEIGHT_RATIO_MAX
from ..files.job_file import read_yaml
from ..terminal import console
from ..terminal import format as fmt
from ..terminal.format import Plain
from .compare import HEADS, LOSS_LEGEND

HINT = "--set weight.TASK=2, or --set policy.FIELD=VALUE (docs/reference/records.md, Policy)"


def from_log(
    path: Path, *, settings: Sequence[str], policies: Sequence[str], as_json: bool
) -> None:
    """`unicron simulate --from-log`. Raises UsageError for an invalid log or choice."""
    for name in policies:
        if name not in POLICIES:
            raise UsageError(f"--policy {name} is no policy", f"one of {', '.join(POLICIES)}")
    try:
        recording = counterfactual.read(lambda: archive.read(path), str(path))
    except CorruptLog as error:
        raise UsageError(
            f"{path}: {error}", "the records before that seq are valid; export the log again"
        ) from None
    choices = [Choice(), *chosen(recording, settings, policies)]
    played = [(choice, counterfactual.play(recording, choice)) for choice in choices]
    console.show(as_data(recording, played), screen(recording, played, path), as_json=as_json)


def chosen(recording: Recording, settings: Sequence[str], policies: Sequence[str]) -> list[Choice]:
    """One choice per policy, with these settings. With settings, Unicron's policy is included, so
    that all choices are compared by the same weights. Raises UsageError, SpecError."""
    weights: dict[str, float] = {}
    fields: Plain = {}
    for setting in settings:
        what, equals, value = (word.strip() for word in setting.partition("="))
        kind, _, name = what.partition(".")
        if not equals or not name or kind not in ("weight", "policy"):
            raise UsageError(f"--set {setting} is not a setting", HINT)
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
        raise UsageError(
            f"--set {setting}: the log has no task {name}", f"it has {', '.join(known)}"
        )
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not 1 / WEIGHT_RATIO_MAX <= weight <= WEIGHT_RATIO_MAX:
        raise UsageError(
            f"--set {setting}: the weight is {value!r}",
            f"a number between {1 / WEIGHT_RATIO_MAX:g} and {WEIGHT_RATIO_MAX:g}",
        )
    return weight


# --- events -------------------------------------------------------------------------------------
def incidents(recording: Recording) -> list[tuple[int, AnyEvent]]:
    """The events that can cause a loss, by time, with their index in `losses`."""
    return list(enumerate(one for one in recording.events if causes_loss(one)))


def describe(one: AnyEvent) -> str:
    """One event or request, in words."""
    match one:
        case ExternalEvent(event="fault", cause=cause, detected_in_s=0.0) if (
            cause == LOST_CONNECTION
        ):
            return f"{one.node} started again"  # its agent had ended, and no fault was detected
        case ExternalEvent() if one.event == "fault":
            subject = f"{one.task} rank {one.rank}, {one.node}" if one.task else one.node
            return f"{subject}: {one.cause}"
        case ExternalEvent():
            return f"{one.node} {one.event}"
        case OperatorRequest(body=TaskSubmitted()):
            return f"{one.task} submitted"
        case OperatorRequest(body=TaskWeightSet() as body):
            return f"{one.task}: weight {body.weight:g}"
        case OperatorRequest():
            subject = one.task or getattr(one.body, "node", "")
            return f"{subject} {_request_name(one.body)}".strip()
        case NodeReport():
            return f"{one.node}: {type(one.body).__name__}"
        case _:
            return ""


def _request_name(body: Body) -> str:
    """`finished`, `cancelled`, `healing frozen`, `node drained`."""
    if isinstance(body, TaskCancelRequested):
        return body.reason if body.reason in ("finished", "failed") else "cancelled"
    spaced = "".join(f" {sign.lower()}" if sign.isupper() else sign for sign in type(body).__name__)
    return spaced.strip()


# --- as data ------------------------------------------------------------------------------------
def as_data(recording: Recording, played: Sequence[tuple[Choice, RunResult]]) -> Plain:
    """All results as JSON. FLOP are weighted; times are seconds from the start of the horizon."""
    began_s, verdict = recording.began_s, recording.verdict
    return {
        "began_s": began_s,
        "horizon_s": recording.end_s - began_s,
        "decisions": {
            "equal": sum(verdict.recomputed.values()),
            "differ": sum(verdict.differ.values()),
            "words": verdict.words,
        },
        "recorded": _played(recording, Choice(), recording.played, recording.played),
        "choices": [_played(recording, choice, one, played[0][1]) for choice, one in played],
        "evidence": counterfactual.sentences(recording, played),
    }


def _played(recording: Recording, choice: Choice, one: RunResult, baseline: RunResult) -> Plain:
    earnings, began_s = one.earnings, one.outcome.began_s
    against = reweighted_flop(baseline, choice.weights)
    return {
        "choice": choice.words,
        "policy": choice.policy,
        "weights": choice.weights,
        "fields": choice.fields,
        "accumulated_waf_flop": earnings.flop,
        "lost_waf_flop": earnings.lost_flop,
        "difference_flop": earnings.flop - against,
        "downtime_task_s": earnings.down_s,
        "slot_s": earnings.slot_s,
        "lost_slot_s": earnings.lost_slot_s,
        "transitions": one.outcome.transitions,
        "ignored": one.outcome.ignored,
        "waf_flop_by_task": one.earned,
        "flop_by_task": one.work,
        "waf_over_time": [[at_s - began_s, waf] for at_s, waf in earnings.curve],
        "incidents": [
            {
                "at_s": what.at_s - recording.began_s,
                "what": describe(what),
                **_loss(earnings.losses[number]),
            }
            for number, what in incidents(recording)
        ],
    }


def _loss(loss: EventLoss) -> Plain:
    return {
        "lost_waf_flop": loss.lost_flop,
        "full_after_s": loss.recovered_s - loss.at_s if loss.recovered_s is not None else None,
    }


# --- as text, at most 100 columns ---

NAME_COLUMNS = 20
WHAT_COLUMNS, CHOICE_COLUMNS = 32, 14
CHOICES_NUM_MAX = 2
"""The number of choices in the comparison by event; -o json has all choices."""
EQUAL_SHARE = 5e-5
"""Below this relative difference, two choices earn the same."""
SHOWN_NUM_MAX = 12


def screen(
    recording: Recording, played: Sequence[tuple[Choice, RunResult]], path: Path
) -> list[str]:
    """The recorded run, its simulation, the choices, and a comparison by event."""
    start, horizon_s = recording.start_state, recording.end_s - recording.began_s
    verdict = recording.verdict
    lines = [
        f"{path}: {fmt.number_of(len(start.slots), 'node')}, "
        f"{fmt.number_of(len(recording.specs), 'task')}, {fmt.span(horizon_s)}",
        *fmt.labelled("decided", verdict.words),
        "",
    ]
    rows = [
        _row("recorded", recording.played, None),
        _row("simulated", played[0][1], recording.played.earnings.flop),
    ]
    chosen = played[-1][0]  # all choices have the same settings
    if chosen.weights:
        again = fmt.scaled(reweighted_flop(played[0][1], chosen.weights), "FLOP")
        rows.append(["simulated, reweighted", again, *["-"] * (len(LOSSES) + 3)])
    rows += [
        _row(choice.policy, one, reweighted_flop(played[0][1], choice.weights))
        for choice, one in played[1:]
    ]
    head = ("CHOICE", "EARNED", "DIFFERS", "DOWN", "GPU", *(HEADS[what] for what in LOSSES))
    lines += [
        fmt.clipped(line, fmt.SCREEN_COLUMNS) for line in fmt.table(head, rows, right=range(1, 10))
    ]
    if chosen.settings:
        lines += fmt.labelled(
            "set",
            f"{chosen.settings}, in the rows below `simulated`"
            + ("; DIFFERS is from the reweighted row" if chosen.weights else ""),
        )
    lines += ["", *_by_incident(recording, played), ""]
    error_share = _percent(played[0][1].earnings.flop, recording.played.earnings.flop)
    lines += fmt.labelled(
        "differs",
        "with the same choices, the simulated run earns "
        f"{error_share} compared with the recorded run: the model's error. The "
        "other choices are compared with the simulated run, which has the same "
        "error",
    )
    lines += fmt.labelled(
        "lost",
        "DOWN: time without training, summed over the tasks. GPU: slot "
        "time below full strength. The other columns are in % of what full "
        "strength earns. " + LOSS_LEGEND,
    )
    for number, line in enumerate(counterfactual.sentences(recording, played)):
        lines += fmt.labelled("evidence" if not number else "", line)
    return [*lines, *fmt.labelled("best", _best(played))]


def _row(name: str, one: RunResult, against: float | None) -> list[str]:
    earnings = one.earnings
    full, down_s = earnings.flop + sum(earnings.lost_flop.values()), sum(earnings.down_s.values())
    return [
        fmt.clipped(name, NAME_COLUMNS),
        fmt.scaled(round(earnings.flop), "FLOP"),
        _percent(earnings.flop, against),
        fmt.span(down_s),
        fmt.span(max(sum(earnings.lost_slot_s.values()), 0.0)),
        *(f"{100 * earnings.lost_flop[what] / full:.1f}" if full else "-" for what in LOSSES),
    ]


def _percent(flop: float, against: float | None) -> str:
    if not against:
        return "-"
    more = round(100 * (flop / against - 1), 2)
    return f"{more:+.2f} %" if more else "0.00 %"


def _by_incident(recording: Recording, played: Sequence[tuple[Choice, RunResult]]) -> list[str]:
    """The loss of each event until full strength; of many events, only the most costly ones."""
    every = shown = incidents(recording)
    columns = [recording.played, *(one for _, one in played[: 1 + CHOICES_NUM_MAX])]
    if len(shown) > SHOWN_NUM_MAX:
        costliest = sorted(
            shown,
            key=lambda one: (
                -max(abs(column.earnings.losses[one[0]].lost_flop) for column in columns)
            ),
        )
        shown = sorted(costliest[:SHOWN_NUM_MAX], key=lambda one: one[0])
    if not shown:
        return ["no event occurred within the horizon"]
    names = [
        "RECORDED",
        "SIMULATED",
        *(fmt.clipped(choice.policy, 13) for choice, _ in played[1 : 1 + CHOICES_NUM_MAX]),
    ]
    wide = WHAT_COLUMNS + CHOICE_COLUMNS * (2 + CHOICES_NUM_MAX - len(columns))
    rows = [
        [
            f"+{fmt.span(one.at_s - recording.began_s)}",
            fmt.clipped(describe(one), wide),
            *(_fault_cell(column.earnings.losses[number]) for column in columns),
        ]
        for number, one in shown
    ]
    lines = fmt.table(
        ("AT", "EVENT: LOST FLOP, TIME TO FULL", *names), rows, right=range(2, 2 + len(columns))
    )
    left = len(every) - len(shown)
    more = (
        fmt.labelled("not shown", f"{fmt.number_of(left, 'event')} with smaller losses: -o json")
        if left
        else []
    )
    return [*(fmt.clipped(line, fmt.SCREEN_COLUMNS) for line in lines), *more]


def _fault_cell(loss: EventLoss) -> str:
    if not loss.has_lost and not loss.lost_flop:
        return "-"
    after = fmt.span(loss.recovered_s - loss.at_s) if loss.recovered_s is not None else "never"
    return f"{fmt.scaled(loss.lost_flop, '')} {after}"


def _best(played: Sequence[tuple[Choice, RunResult]]) -> str:
    """The choice that earns most, and its advantage over the second."""
    if len(played) < 2:
        return "no other choice was simulated: name other weights, fields or policies"
    baseline = played[0][1]
    comparable = played[1:] if len(played) > 2 and played[1][0].settings else played
    ranked = sorted(
        (
            (one.earnings.flop / max(reweighted_flop(baseline, choice.weights), 1e-300), number)
            for number, (choice, one) in enumerate(comparable)
        ),
        reverse=True,
    )
    (first, winner), (second, beaten) = ranked[:2]
    names = [choice.words or "as recorded" for choice, _ in comparable]
    if first - second < EQUAL_SHARE * first:
        return f"{names[winner]} and {names[beaten]} earn the same"
    return (
        f"{names[winner]}: {100 * (first / second - 1):.2f} % more than {names[beaten]}"
        if second > 0
        else names[winner]
    )
