"""What commands print becomes reports: read as it grows, bounded, at no cost of the command."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from agent_driver import go, house, python
from megatron_lines_setup import CORE
from memory_log import MemoryLog
from progress_setup import line, order, write
from unicron.events.records.reports import IterationsLogged, RankExited
from unicron.events.records.types import Body
from unicron.workers.agent.monitoring import output_reader
from unicron.workers.agent.monitoring.output_reader import OutputReader, OutputReaders
from unicron.workers.host import linux


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"an attempt before\n" + line(90))
    return path


@pytest.fixture
def reader(log: Path) -> Iterator[OutputReader]:
    made = OutputReader(order(), log, log.stat().st_size)
    yield made
    made.close()


def test_only_its_own_output_and_each_line_once(log: Path, reader: OutputReader) -> None:
    assert reader.look() is None
    write(log, line(1, 900.0) + line(2)[:30])
    assert reader.look() == IterationsLogged(
        task=7, rank=0, attempt=1, iteration=1, iterations=100, num_iterations=0, step_s=0.9,
        loss=2.5, global_batch=8)
    assert reader.look() is None
    write(log, line(2)[30:] + line(3, 100.0))
    told = reader.look()
    assert told is not None
    assert (told.iteration, told.num_iterations, told.step_s) == (3, 2, pytest.approx(0.15))


def test_a_log_that_grows_too_fast_is_read_at_its_end(
        log: Path, reader: OutputReader, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, line(1) + line(2))
    assert [told and told.iteration for told in (reader.look(), reader.look())] == [1, 2]
    write(log, line(3) + os.urandom(300_000) + b"\n" + line(4, 100.0))
    told = reader.look(1000)
    assert told is not None
    assert (told.iteration, told.num_iterations, told.step_s) == (4, 2, 0.1)
    write(log, b"x" * 5000 + line(5))
    assert reader.look(1000) is None, "the beginning of its line was left out"
    assert capsys.readouterr().out.count("faster than the agent reads") == 1


def test_a_log_that_is_emptied_or_renamed_is_read_on(log: Path, reader: OutputReader) -> None:
    write(log, line(1))
    reader.look()
    os.truncate(log, 0)
    assert reader.look() is None
    write(log, b"rest\n" + line(2))
    told = reader.look()
    assert told is not None
    moved = log.rename(log.with_suffix(".1"))
    log.touch()
    write(moved, line(3))
    again = reader.look()
    assert (told.iteration, again and again.iteration) == (2, 3)


def test_a_log_that_is_not_there_is_said_and_no_error(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = OutputReader(order(), tmp_path / "nowhere", 0)
    assert reader.look() is None
    assert list(reader.end()) == []
    assert "cannot be read" in capsys.readouterr().out


def test_who_writes_on_after_the_end_is_not_followed(log: Path, reader: OutputReader) -> None:
    """A process that does not die may print for ever."""
    write(log, line(1) + line(2))
    rest = reader.end()
    told = [next(iter(rest)).iteration]
    for one in rest:
        write(log, line(len(told) + 2))
        told.append(one.iteration)
        assert len(told) < 9
    assert told == [1, 2]


def test_another_global_batch_is_said_once(log: Path, reader: OutputReader,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    write(log, line(1, batch=16) + line(2, batch=16))
    assert [told.global_batch for told in (reader.look(), reader.look()) if told] == [16, 16]
    assert capsys.readouterr().out.count("differs from its model") == 1


def test_who_prints_first_tells_alone(tmp_path: Path) -> None:
    told: list[Body] = []
    readers = OutputReaders(lambda body, _: told.append(body))
    logs = [tmp_path / str(rank) for rank in range(3)]
    for rank, path in enumerate(logs):
        path.touch()
        readers.begin(order(rank, task=7 + rank // 2), path, 0, 0)
    for path in logs[1:]:
        write(path, line(1))
    readers.look(1.0)
    for path in logs:
        write(path, line(2))
    readers.look(2.0)
    for rank in range(3):
        write(logs[rank], line(3))
        readers.end(order(rank, task=7 + rank // 2))
    assert [(body.task, body.rank, body.iteration) for body in told
            if isinstance(body, IterationsLogged)] == [
        (7, 1, 1), (8, 2, 1), (7, 1, 2), (8, 2, 2), (7, 1, 3), (8, 2, 3)]


def test_what_one_look_reads_is_bounded() -> None:
    assert output_reader.read_bytes_max(1) == output_reader.LOOK_BYTES_MAX
    assert 16 * output_reader.read_bytes_max(16) <= output_reader.LOOK_BYTES_MAX
    assert output_reader.read_bytes_max(10_000) == output_reader.RANK_BYTES_MIN


FLOOD = """
import sys, time
junk = b"0123456789abcdef" * 4000 + b"\\n"
for i in range(1, 31):
    for _ in range(16):
        sys.stdout.buffer.write(junk)
    sys.stdout.buffer.write(b" iteration %d/30 | elapsed time per iteration (ms): 100.0 |\\n" % i)
    sys.stdout.buffer.flush()
    time.sleep(0.1)
"""


def test_a_command_that_floods_its_log_is_followed_all_the_same(tmp_path: Path) -> None:
    """10 MB/s: most is passed over, what is told is right, and the agent does all else."""
    memory = MemoryLog(time.monotonic)

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python(FLOOD))
            (exited,) = await one.leader.wait(RankExited)
            assert exited.exit_code == 0
            told = one.leader.all(IterationsLogged)
            assert told[-1].iteration == 30
            assert {round(body.step_s, 9) for body in told} == {0.1}
            assert 0 < sum(body.num_iterations for body in told) <= 30 - told[0].iteration
            assert (tmp_path / "logs/1-job/rank-0.attempt-1.log").stat().st_size > 30_000_000

    try:
        go(test)
    finally:
        assert linux.kill_marked(f"UNICRON_PROCESS={tmp_path}".encode()) == []


def test_the_agent_tells_what_a_command_prints(tmp_path: Path) -> None:
    """Also what it printed last, before its end is told."""
    memory = MemoryLog(time.monotonic)
    code = ("import sys, time\n"
            "for i in range(1, 31):\n"
            f"    print({CORE.decode()!r}.replace('        2/', f'{{i:9d}}/'))\n"
            "    sys.stdout.flush()\n"
            "    time.sleep(0.1 if i < 30 else 0)\n")

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python(code))
            await one.leader.wait(RankExited)
            told = one.leader.all(IterationsLogged)
            assert (told[0].num_iterations, told[-1].iteration) == (0, 30)
            assert sum(body.num_iterations for body in told) == 30 - told[0].iteration
            assert {(round(body.step_s, 9), body.loss, body.global_batch) for body in told} == {
                (25.8792, 10.4456, 128)}
            kinds = [record.kind for record in one.leader.records]
            assert kinds[-1] == "RankExited"
            said_s = [record.occurred_s for record in one.leader.records
                      if record.kind == "IterationsLogged"]
            assert all(later - sooner > 0.5 for sooner, later in pairwise(said_s[:-2])), (
                "but for what is left at the end")

    try:
        go(test)
    finally:
        assert linux.kill_marked(f"UNICRON_PROCESS={tmp_path}".encode()) == []
