"""An exception read whole: the innermost cause decides, whatever it was wrapped in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from unicron.events.errors import UsageError
from unicron.events.records.statuses import (
    CONNECTION_REFUSED,
    CONNECTION_RESET,
    ILLEGAL_MEMORY_ACCESS,
    OTHER_SOFTWARE,
    WRONG_INPUT,
)
from unicron.workers.training.process.exit_report import _walked, bounded, verdict_of

CUDA = " CUDA error: an illegal memory access was encountered "
LINE = "ConnectionRefusedError: [Errno 111] Connection refused"


def refused() -> None:
    raise ConnectionRefusedError(111, "Connection refused")


def reset() -> None:
    raise RuntimeError("Connection reset by peer")


def plainly() -> None:
    refused()


def from_another() -> None:
    try:
        refused()
    except OSError as error:
        raise ValueError("the batch could not be made") from error


def within_another() -> None:
    try:
        from_another()
    except ValueError:
        {}["no such key"]


def in_a_wrapper_that_means_something() -> None:
    try:
        refused()
    except OSError as error:
        raise RuntimeError("Connection reset by peer") from error


def in_a_key_error_that_means_nothing() -> None:
    """What names a row comes before what is only software, also where that lies deeper."""
    try:
        {}["no such key"]
    except KeyError:
        refused()


def in_a_group() -> None:
    caught: list[Exception] = []
    for fail in (reset, from_another):
        try:
            fail()
        except (RuntimeError, ValueError) as error:
            caught.append(error)
    raise ExceptionGroup("two of them", caught)


def in_the_cause_of_a_group() -> None:
    try:
        refused()
    except OSError as error:
        raise ExceptionGroup("all of them", [RuntimeError("Connection reset by peer")]) from error


def in_a_circle() -> None:
    one, other = ValueError("one"), ConnectionRefusedError(111, "Connection refused")
    one.__cause__, other.__context__ = other, one
    raise one


def deep() -> None:
    error: Exception = ConnectionRefusedError(111, "Connection refused")
    for number in range(3000):
        wrapper = ValueError(f"wrapper {number}")
        wrapper.__cause__ = error
        error = wrapper
    raise error


def caught(fail: Callable[[], None]) -> Exception:
    try:
        fail()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize("fail", [
    plainly, from_another, within_another, in_a_wrapper_that_means_something,
    in_a_key_error_that_means_nothing, in_a_group, in_the_cause_of_a_group,
    in_a_circle, deep])
def test_the_innermost_decides(fail: Callable[[], None]) -> None:
    verdict = verdict_of(caught(fail))
    assert (verdict.status, verdict.second_hand) == (CONNECTION_REFUSED, False)
    assert "Connection refused" in verdict.line


def test_what_is_hidden_from_a_traceback_does_not_count() -> None:
    def hidden() -> None:
        try:
            refused()
        except OSError:
            raise RuntimeError("Connection reset by peer") from None

    assert verdict_of(caught(hidden)).status == CONNECTION_RESET


def test_in_a_group_ones_own_error_comes_before_news_of_a_peer() -> None:
    def members(*errors: Exception) -> ExceptionGroup[Exception]:
        return ExceptionGroup("connection reset by peer", errors)

    news, own = ConnectionResetError(104, "Connection reset by peer"), ValueError("no such layer")
    for group in (members(news, own), members(own, news), members(news, members(own))):
        assert verdict_of(group).status == OTHER_SOFTWARE
    assert verdict_of(members(news, members(news))).status == CONNECTION_RESET
    assert verdict_of(members(own, RuntimeError(CUDA), news)).status == ILLEGAL_MEMORY_ACCESS


def test_causes_come_before_what_was_raised_from_them() -> None:
    names = [type(error).__name__ for _, error in _walked(caught(within_another))]
    assert names == ["ConnectionRefusedError", "ValueError", "KeyError"]


def test_wrong_input_is_no_fault_of_the_machines() -> None:
    verdict = verdict_of(UsageError("Connection refused", hint="name another store"))
    assert verdict.status == WRONG_INPUT


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_what_cannot_be_read_raises_nothing() -> None:
    verdict_of(Unspeakable())
    assert verdict_of(RuntimeError("x" * 10_000_000 + CUDA)).status == ILLEGAL_MEMORY_ACCESS
    assert verdict_of(RuntimeError(CUDA + "x" * 10_000_000)).status == ILLEGAL_MEMORY_ACCESS


def test_a_bound_keeps_the_line_that_decided() -> None:
    text = f"{LINE}\n" + "frame\n" * 1000 + "ValueError: no batch"
    told = bounded(text, LINE, 400, end=True)
    assert len(told) == 400
    assert told.startswith(f"{LINE}\n[...]\n")
    assert told.endswith("ValueError: no batch")
    assert bounded(text, LINE, 400, end=False) == text[:400]
    assert bounded(text, "ValueError: no batch", 400, end=True) == text[-400:]
    assert bounded(text, "", 400, end=True) == text[-400:]
    assert bounded(LINE, LINE, 400, end=True) == LINE
    assert bounded("ab" * 9000, "q" * 9000, 4000, end=True).startswith("q" * 500 + "\n")
