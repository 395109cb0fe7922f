"""`log dead-letters`: what the intake has rejected: list, drop, or send it to the intake again."""

from collections.abc import Sequence

from ...events.errors import UsageError
from ...events.whole_numbers import whole_number
from ..cluster.client import Client, Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, count, number_of, rfc3339, table
from .operate import reason_or_user

ALL = "all"


def dead_letters(
    state: StateDir,
    url: Urls,
    *,
    drop: Sequence[str] | None,
    replay: Sequence[int] | None,
    reason: str,
    as_json: bool,
) -> None:
    """List the dead letters of the leader; with `drop` or `replay`, deal with some of them. Raises
    UsageError."""
    if drop and replay:
        raise UsageError("--drop and --replay do not go together", "use one after the other")
    if reason and not (drop or replay):
        raise UsageError("--reason is for --drop and --replay", "leave it out")
    numbers = [] if drop in (None, [ALL]) else [_number(text) for text in drop or ()]
    client = connect(state, url)
    if drop:
        body = {"numbers": numbers, "all": not numbers, "reason": reason_or_user(reason)}
        answer = client.post("/v1/dead-letters/drop", body)
        console.show(
            answer, [f"dropped {number_of(answer['num'], 'dead letter')}"], as_json=as_json
        )
    elif replay:
        _replay(client, replay, reason_or_user(reason), as_json=as_json)
    else:
        _show(list(client.items("dead-letters")), as_json=as_json)


def _number(text: str) -> int:
    if (number := whole_number(text)) is None:
        raise UsageError(
            f"--drop {text!r} is not the number of a dead letter",
            f"its number in unicron log dead-letters, or --drop {ALL} alone",
        )
    return number


def _replay(client: Client, numbers: Sequence[int], reason: str, *, as_json: bool) -> None:
    """Those before one that is refused are told too."""
    answers: list[Plain] = []
    try:
        for number in numbers:
            path = f"/v1/dead-letters/{number}/replay"
            answers.append(client.post(path, {"reason": reason}))
    finally:
        if answers:
            lines = [
                f"dead letter {answer['number']} is in the intake again, "
                f"as report {answer['source_seq']} of {answer['source']}"
                for answer in answers
            ]
            console.show({"replayed": answers}, lines, as_json=as_json)


def _show(letters: Sequence[Plain], *, as_json: bool) -> None:
    rows = [
        (
            str(letter["number"]),
            rfc3339(letter["at_s"]),
            letter["source"] or "-",
            count(letter["num_bytes"]) + ("" if letter["whole"] else " (cut)"),
            letter["why"],
        )
        for letter in letters
    ]
    lines = table(("NUMBER", "WHEN", "FROM", "BYTES", "WHY"), rows, right=(0, 3))
    console.show({"letters": letters}, lines if letters else ["no dead letters"], as_json=as_json)
