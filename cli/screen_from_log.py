"""The screen of `unicron simulate --from-log`, at most 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..control_plane.simulation import evidence
from ..control_plane.simulation.counterfactual import Choice, Played, Recording, weighed
from ..control_plane.simulation.earnings import LOST
from ..control_plane.simulation.traced import Felt
from .figures import SCREEN_COLUMNS, clipped, command, labelled, number_of, scaled, span, table
from .from_log import incidents, words
from .simulate import HEADS

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
    for number, line in enumerate(evidence.sentences(recording, played)):
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
             *(_felt(column.earnings.felt[number]) for column in columns)]
            for number, one in shown]
    lines = table(("AT", "LOST FLOP, FULL AGAIN AFTER", *names), rows,
                  right=range(2, 2 + len(columns)))
    left = len(every) - len(shown)
    more = labelled("not shown", f"{number_of(left, 'more')}, of which each lost less: -o json"
                    ) if left else []
    return [*(clipped(line, SCREEN_COLUMNS) for line in lines), *more]


def _felt(felt: Felt) -> str:
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
