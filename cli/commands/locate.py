"""`unicron locate`: which ranks a hung job waits for, from its flight-recorder dumps."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...control_plane.incidents.hang_locator import HangLocation
from ...control_plane.incidents.hang_locator import locate as find
from ...events.errors import UsageError
from ...workers.diagnosis.dump_files import read_files
from ..terminal import console
from ..terminal.format import SCREEN_COLUMNS, clipped, command, labelled, number_of, ranks, table

ROWS_NUM_MAX = 20
"""Waiting ranks that are listed; the rest are counted."""
GROUP_COLUMNS = 44
LEFT_OUT_NUM_MAX = 5
"""Files left out that are listed; the rest are counted."""


def locate(paths: Sequence[Path], *, as_json: bool) -> None:
    """Read the dumps, locate the hang, print. Raises UsageError if there is no dump to read."""
    dumps, left_out = read_files(paths)
    if not any(dump.entered or dump.pending or dump.status for dump in dumps):
        raise UsageError(
            f"nothing was recorded: no collective in the dump of {number_of(len(dumps), 'rank')}",
            "the recorder must be on before the "
            "job starts: TORCH_FR_BUFFER_SIZE=2000 (an older torch reads "
            "TORCH_NCCL_TRACE_BUFFER_SIZE)",
        )
    found = find(dumps)
    console.show(
        {
            "verdict": found.verdict,
            "ranks": found.num_ranks,
            "missing": found.missing,
            "suspects": [one._asdict() for one in found.suspects],
            "waiting": [one._asdict() for one in found.waiting],
            "stuck": [one._asdict() for one in found.stuck],
            "left_out": left_out,
        },
        screen(found, left_out),
        as_json=as_json,
    )


def screen(found: HangLocation, left_out: Sequence[str] = ()) -> Iterator[str]:
    """The page, at most 100 columns: the verdict, the suspects, which rank waits for which; each
    file that is no dump is one line."""
    yield from textwrap.wrap(_verdict(found), SCREEN_COLUMNS)
    for line in left_out[:LEFT_OUT_NUM_MAX]:
        words = " ".join("".join(c if c.isprintable() else " " for c in line).split())
        yield from labelled("left out", words)
    if len(left_out) > LEFT_OUT_NUM_MAX:
        yield from labelled("left out", f"and {len(left_out) - LEFT_OUT_NUM_MAX} more files")
    for one in found.suspects:
        yield ""
        yield from labelled(f"rank {one.rank}", one.why)
        waits = f"; {ranks(one.waited_by)} wait{'s' * (len(one.waited_by) == 1)} for it there"
        yield from labelled(
            "",
            f"{one.state}, confidence {one.confidence}"
            + waits * bool(one.waited_by and one.state == "not entered"),
        )
    for stuck in found.stuck:
        yield ""
        yield from labelled(
            "stuck",
            f"{stuck.collective} {stuck.seq} of {stuck.group}: "
            f"{ranks(stuck.ranks)} are in it, and it does not end",
        )
    if found.waiting:
        yield ""
        rows = [
            [
                str(one.rank),
                ranks(one.ranks).partition(" ")[2] if one.ranks else "-",
                f"{one.collective} {one.seq}",
                clipped(one.group, GROUP_COLUMNS),
            ]
            for one in found.waiting[:ROWS_NUM_MAX]
        ]
        for line in table(("RANK", "WAITS FOR", "IN", "OF"), rows, right=(0,)):
            yield clipped(line, SCREEN_COLUMNS)
        if len(found.waiting) > ROWS_NUM_MAX:
            yield f"and {len(found.waiting) - ROWS_NUM_MAX} more that only wait"
    if found.missing and not found.suspects:
        yield ""
        yield from labelled(
            "hint:", f"no dump of {ranks(found.missing)} was given: add it if there is one"
        )
    elif found.verdict == "hang":
        whose = ranks(one.rank for one in found.suspects) if found.suspects else "each rank"
        yield ""
        yield from labelled(
            "next", f"{command('unicron classify FILE')}: what the log of {whose} says"
        )


def _verdict(found: HangLocation) -> str:
    of = f"of {number_of(found.num_ranks, 'rank')}"
    if found.suspects:
        text = f"hang: {ranks(one.rank for one in found.suspects)} {of}"
    elif found.verdict == "hang":
        text = f"hang: the dumps do not show which {of} caused it"
    elif found.verdict == "network":
        text = (
            f"network: {number_of(len(found.stuck), 'collective')} "
            f"{'does' if len(found.stuck) == 1 else 'do'} not end, although all ranks have "
            f"entered; none {of} is to blame"
        )
    else:
        text = f"none: no rank waits for another, {number_of(found.num_ranks, 'rank')} in all"
    if found.missing:
        text += f"; no dump of {ranks(found.missing)}"
    return text
