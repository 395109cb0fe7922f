"""Talk that cannot be written is dropped: nobody ends for it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TextIO, cast

import structlog
from unicron.events.process_io import LogStream


def test_a_full_disk_takes_the_words_and_not_the_speaker() -> None:
    stream = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115, its close fails
    talk = structlog.PrintLogger(cast(TextIO, LogStream(stream)))
    for _ in range(3):
        talk.info("nobody hears this")
    try:
        stream.close()
    except OSError:
        return
    raise AssertionError("the stream is not full")


def test_what_can_be_written_is() -> None:
    stream = io.StringIO()
    structlog.PrintLogger(cast(TextIO, LogStream(stream))).info("heard")
    assert stream.getvalue() == "heard\n"
    assert not LogStream(stream).isatty()
