"""The rows of a progress page: what a rank has entered in its groups, as its agent reads it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unicron.workers.ipc.group_rows import (
    BYTES,
    HEADER_BYTES,
    KINDS,
    ROW_BYTES,
    ROWS_NUM,
    UNKNOWN,
    Row,
    RowsWriter,
    group_of,
    members_of,
    strides,
)
from unicron.workers.ipc.progress_page import PAGE_BYTES, ProgressPage, ProgressWriter
from unicron.workers.ipc.violation import Violation


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    made = ProgressPage()
    yield made
    made.close()


def rows_of(page: ProgressPage) -> RowsWriter:
    rows = ProgressWriter(os.dup(page.fd)).rows
    assert rows is not None
    return rows


def test_a_row_is_read_as_it_was_written(page: ProgressPage) -> None:
    rows = rows_of(page)
    row = Row(group_of("7", (1, 3, 9, 11)), 3)
    rows.enter(row, KINDS.index("all_gather"), 1 << 40)
    rows.enter(row, KINDS.index("barrier"), 0)
    rows.leave(row, 1)
    rows.set_waits(1)
    told = page.groups()
    assert told is not None
    assert (told.is_complete, told.waits) == (True, True)
    (entry,) = told.entries
    assert (entry.role, entry.entered, entry.left, entry.kind) == ("tp", 2, 1, "barrier")
    assert (members_of(entry.members), entry.order) == ((1, 3, 9, 11), 2)
    assert page.num_entered() == 2


def test_the_last_operation_of_each_group_in_words(page: ProgressPage) -> None:
    rows = rows_of(page)
    tp, own = Row(group_of("7", (0, 1)), 3), Row(group_of("mine", (0, 1, 2)), 0)
    rows.enter(tp, KINDS.index("all_gather"), 1)
    rows.enter(own, KINDS.index("send"), 1)
    rows.leave(own, 1)
    rows.enter(tp, KINDS.index("all_reduce"), 1)
    told = page.groups()
    assert told is not None
    key = next(entry.key for entry in told.entries if not entry.role)
    behind = f"; before that send 1 of group {key:08x}, left"
    assert told.in_words() == f"its last operation is all_reduce 2 of tp, entered{behind}"
    rows.set_waits(1)
    told = page.groups()
    assert told is not None
    assert told.in_words() == f"its last operation is all_reduce 2 of tp, entered, not left{behind}"
    rows.clear()
    told = page.groups()
    assert told is not None
    assert told.in_words() == ""


def test_what_was_entered_before_an_iteration_has_no_order(page: ProgressPage) -> None:
    writer = ProgressWriter(os.dup(page.fd))
    rows = writer.rows
    assert rows is not None
    old, new = (Row(group_of(name, (0, 1)), 0) for name in "ab")
    rows.enter(old, 0, 1)
    writer.begin(1, 5, "usual")
    rows.enter(new, 0, 1)
    told = page.groups()
    assert told is not None
    assert [entry.order for entry in told.entries] == [0, 2]
    rows.clear()
    told = page.groups()
    assert told is not None
    assert (told.entries, told.is_complete) == ((), True)


def test_the_row_of_the_least_recent_group_gives_way(page: ProgressPage) -> None:
    rows = rows_of(page)
    many = [Row(group_of(str(number), (number, number + 1)), 0) for number in range(ROWS_NUM + 1)]
    for row in many[:-1]:
        rows.enter(row, 0, 1)
    rows.enter(many[0], 0, 1)
    told = page.groups()
    assert told is not None
    assert told.is_complete
    rows.enter(many[-1], 0, 1)
    told = page.groups()
    assert told is not None
    assert (len(told.entries), told.is_complete) == (ROWS_NUM, False)
    starts = {entry.members[0]: entry.entered for entry in told.entries}
    assert starts == {0: 2, **dict.fromkeys(range(2, ROWS_NUM + 1), 1)}
    rows.enter(many[1], 0, 1)  # its count went on
    told = page.groups()
    assert told is not None
    assert {entry.members[0]: entry.entered for entry in told.entries}[1] == 2


def test_a_row_that_is_being_written_is_left_out(page: ProgressPage) -> None:
    rows = rows_of(page)
    for name in "ab":
        rows.enter(Row(group_of(name, (0, 1)), 0), 0, 1)
    os.pwrite(page.fd, struct.pack("<I", 77), PAGE_BYTES + HEADER_BYTES)
    told = page.groups()
    assert told is not None
    assert (len(told.entries), told.is_complete) == (1, False)


def test_a_page_of_the_version_before_has_no_rows() -> None:
    """Of an agent of the version before, or of its rank."""
    fd = os.memfd_create("version-1")
    os.ftruncate(fd, PAGE_BYTES)
    writer, page = ProgressWriter(os.dup(fd)), ProgressPage(fd)
    writer.begin(1, 2, "usual")
    assert writer.rows is None
    assert (page.groups(), page.num_entered()) == (None, 0)
    mark = page.mark()
    assert mark is not None
    assert mark.iteration == 2
    page.close()
    page = ProgressPage()
    assert page.groups() is None, "a rank of the version before writes none"
    page.close()


@given(st.lists(st.integers(0, 40), max_size=9, unique=True))
def test_members_are_loops_or_unknown(members: list[int]) -> None:
    loops = strides(members)
    assert loops == UNKNOWN or members_of(loops) == tuple(members)


@given(st.integers(0, 30), *(st.integers(1, 5) for _ in range(4)))
def test_members_in_two_loops_are_known(start: int, n1: int, s1: int, n2: int, s2: int) -> None:
    members = tuple(start + i * s1 + j * (s2 + n1 * s1) for j in range(n2) for i in range(n1))
    assert members_of(strides(members)) == members


@given(st.lists(st.tuples(st.integers(0, BYTES - 9), st.binary(min_size=1, max_size=8))))
def test_rows_with_anything_are_values_or_a_violation(junk: list[tuple[int, bytes]]) -> None:
    page = ProgressPage()
    rows = rows_of(page)
    for name in "abc":
        rows.enter(Row(group_of(name, (0, 1)), 1), 0, 1)
    for at, data in junk:
        os.pwrite(page.fd, data, PAGE_BYTES + at)
    page.num_entered()
    try:
        told = page.groups()
    except Violation:
        return
    finally:
        page.close()
    if told is None:
        return
    assert all(entry.kind in KINDS and entry.at_s >= 0 for entry in told.entries)
    assert len(told.entries) <= (BYTES - HEADER_BYTES) // ROW_BYTES


@pytest.mark.parametrize("loops", [(0, 0, 0, 1 << 24, 0), (0, 1 << 24, 1, 0, 0)])
def test_loops_without_a_member_are_a_violation(
    page: ProgressPage, loops: tuple[int, int, int, int, int]
) -> None:
    """Whoever counts them out would be busy for seconds."""
    rows = rows_of(page)
    rows.enter(Row(struct.pack("<IIIIII", 7, *loops), 1), 0, 1)
    with pytest.raises(Violation, match="members"):
        page.groups()
