"""Megatron's progress lines in a command's output: parsing, reports, and stalls."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from agent_driver import LocalNode, python
from guards import unguarded
from hypothesis import given
from hypothesis import strategies as st
from unicron.events.records.orders import StartRank
from unicron.events.records.reports import IterationsLogged, RankExited, RankStalled, RankUnstalled
from unicron.events.records.types import Body, Slot
from unicron.events.spec.job import parse as parse_spec
from unicron.workers.agent.monitoring import output_reader
from unicron.workers.agent.monitoring.megatron_output import (
    LINE_BYTES_MAX,
    IterationRanges,
    ProgressLine,
    ProgressLines,
    parse,
)
from unicron.workers.agent.monitoring.output_reader import (
    ANNOUNCED_PAUSE_S,
    OutputReader,
    OutputReaders,
)

CORE = (
    b" [2025-08-01 09:32:10] iteration        2/    5000 | consumed samples:          256 |"
    b" elapsed time per iteration (ms): 25879.2 | throughput per GPU (TFLOP/s/GPU): 116.7 |"
    b" learning rate: 1.395349E-07 | global batch size:   128 | lm loss: 1.044560E+01 |"
    b" loss scale: 1.0 | grad norm: 35.570 | number of skipped iterations:   0 |"
    b" number of nan iterations:   0 |"
)
DEEPSPEED = (
    b"[default7]: iteration    12695/  115311 | consumed samples:      9841584 |"
    b" consumed tokens:  20155564032 | elapsed time per iteration (s): 105.22 |"
    b" learning rate: 5.969E-05 | global batch size:  2048 | lm loss: 2.463556E+00 |"
    b" grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   2 |"
    b" number of nan iterations:   1 | samples per second: 19.463 | TFLOPs: 149.02 |"
)
NEOX = (
    b" samples/sec: 51.234 | iteration       10/      50 | elapsed time per iteration (ms): "
    b"19987.6 | learning rate: 1.234E-04 | approx flops per GPU: 150.3TFLOPS |"
    b" lm_loss: 7.123456E+00 | number of skipped iterations:   0 |"
)
MOE = (
    b" [2026-01-02 03:04:05.123456] iteration      311/  500000 | consumed samples:          311"
    b" | skipped samples:            8 | elapsed time per iteration (ms): 179.8 | mem usages:"
    b" 0.8131 | global batch size:     1 | load_balancing_loss: 1.01E+00 |"
    b" lm loss: 7.220541E+00 | loss scale: 1.0 |"
)
PRIMUS = (
    b"[20251023 12:39:12][rank-63/64][INFO ] [--------trainer.py:2382] :  iteration      424/"
    b"   40000 | consumed samples:        27136 | elapsed time per iteration (ms): "
    b"16601.3/17219.3 | hip mem usage/free/total/usage_ratio: 253.38GB/2.60GB/255.98GB/98.98%"
    b" | throughput per GPU (TFLOP/s/GPU): 11.9/11.5 | learning rate: 9.997254E-06 |"
    b" global batch size:    64 | lm loss: 4.440000E+00 | loss scale: 1.0 |"
)
STEP_S = 2.0
ASIDES = (
    "saving checkpoint at iteration      20 to /ckpt in torch_dist format",
    "[default0]:  successfully saved checkpoint from iteration      20 to /ckpt [ t 1/8, p 1/4 ]",
    "scheduled an async checkpoint save at iteration      20 to /ckpt",
    "Evaluating on 4096 samples",
    "Evaluating iter 3/8",
    " validation loss at iteration 20 | lm loss value: 2.91E+00 | lm loss PPL: 1.8E+01 | ",
    " validation-2 loss at iteration 20 | lm loss value: 2.91E+00 | lm loss PPL: 1.8E+01 | ",
    " validation results at iteration 20 | lm_loss value: 2.9E+00 | lm_loss_ppl value: 1.8E+01 | ",
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (CORE, ProgressLine(2, 5000, 25.8792, 10.4456, 128, 0, 0)),
        (DEEPSPEED, ProgressLine(12695, 115311, 105.22, 2.463556, 2048, 2, 1)),
        (NEOX, ProgressLine(10, 50, 19.9876, 7.123456, 0, 0, 0)),
        (MOE, ProgressLine(311, 500000, 0.1798, 7.220541, 1, 0, 0)),
        (PRIMUS, ProgressLine(424, 40000, 16.6013, 4.44, 64, 0, 0)),
        (
            b"==> iteration        8/      25 | elapsed time per iteration (ms): 548.5 |",
            ProgressLine(8, 25, 0.5485, None, 0, 0, 0),
        ),
        (
            b" iteration 8/25 | elapsed time per iteration (ms): 548.5 | lm loss: INF |",
            ProgressLine(8, 25, 0.5485, None, 0, 0, 0, loss_text="inf"),
        ),
        (
            b" iteration 8/25 | elapsed time per iteration (ms): 548.5 | lm loss: NAN",
            ProgressLine(8, 25, 0.5485, None, 0, 0, 0, loss_text="nan"),
        ),
        (
            b" iteration 8/25 | elapsed time per iteration (ms): 548.5 | loss: -inf |",
            ProgressLine(8, 25, 0.5485, None, 0, 0, 0, loss_text="-inf"),
        ),
        (
            b" iteration 8/25 | elapsed time per iteration (ms): 548.5 | lm loss: 1.0E+999 |",
            ProgressLine(8, 25, 0.5485, None, 0, 0, 0, loss_text="inf"),
        ),
        (
            b" iteration 30/25 | elapsed time per iteration (ms): 548.5",
            ProgressLine(30, 0, 0.5485, None, 0, 0, 0),
        ),
    ],
)
def test_progress_lines_of_all_versions_are_parsed(line: bytes, expected: ProgressLine) -> None:
    found = parse(line)
    assert found is not None
    assert found._replace(step_s=0.0) == expected._replace(step_s=0.0)
    assert found.step_s == pytest.approx(expected.step_s)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"iteration 3 of 7",
        b" validation results at iteration 100 | lm_loss value: 6.9E+00 |",
        b"time (ms) | forward-compute: 211.64 | backward-compute: 293.57",
        b" iteration 8/25 | consumed samples: 12 |",
        b" iteration 0/25 | elapsed time per iteration (ms): 548.5 |",
        b" iteration 8/25 | elapsed time per iteration (ms): nan |",
        b" iteration 8/25 | elapsed time per iteration (ms): -3.0 |",
        b" iteration 8/25 | elapsed time per iteration (ms): 1.0E+99 |",
        b" iteration 8/25 | elapsed time per iteration (h): 5 |",
        b" subiteration 8/25 | elapsed time per iteration (ms): 5 |",
        b" iteration 99999999999999/99999999999999 | elapsed time per iteration (ms): 5 |",
    ],
)
def test_other_lines_are_not_parsed(line: bytes) -> None:
    assert parse(line) is None


NOISE = st.lists(
    st.one_of(
        st.sampled_from(
            [
                CORE,
                DEEPSPEED,
                NEOX,
                MOE,
                PRIMUS,
                b"\n",
                b"\r",
                b"\n\n",
                b" iteration 8/25 |",
                b"elapsed time per iteration (ms): 5.0 |",
                b"x" * LINE_BYTES_MAX,
                b"elapsed time per iteration (" * 3,
                b"\x00\xff\xfe",
            ]
        ),
        st.binary(max_size=40),
    ),
    max_size=12,
).map(b"".join)


@given(NOISE, st.data())
def test_lines_are_found_however_the_output_is_cut(printed: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(printed)), max_size=8)))
    one, cut = ProgressLines(), ProgressLines()
    whole = one.feed(printed + b"\n")
    ends = [0, *cuts, len(printed)]
    parts = [printed[begin:end] for begin, end in pairwise(ends)]
    assert [line for part in (*parts, b"\n") for line in cut.feed(part)] == whole
    assert len(cut._begun) <= LINE_BYTES_MAX


@given(st.binary(max_size=300))
def test_parsing_never_raises(printed: bytes) -> None:
    for line in (
        printed,
        b" iteration 1/2 | " + printed,
        CORE + printed,
        printed + CORE,
        CORE[: len(printed)] + printed + CORE[len(printed) :],
    ):
        progress = parse(line)
        assert progress is None or (math.isfinite(progress.step_s) and progress.iteration >= 1)


def test_only_complete_lines_of_bounded_length_are_parsed() -> None:
    lines = ProgressLines()
    assert lines.feed(CORE) == []
    assert [line.iteration for line in lines.feed(b"\n" + DEEPSPEED + b"\r\n" + NEOX)] == [2, 12695]
    assert [line.iteration for line in lines.feed(b"\r")] == [10]
    assert lines.feed(b"x" * LINE_BYTES_MAX + CORE + b"\n") == []
    assert [line.iteration for line in lines.feed(CORE + b"\n")] == [2]


def test_skipped_output_ends_a_line() -> None:
    lines = ProgressLines()
    lines.feed(CORE[:60])
    lines.skip()
    assert lines.feed(CORE[60:] + b"\n") == []
    assert len(lines.feed(CORE + b"\n")) == 1


def line(iteration: int, step_s: float, global_batch: int = 8, **more: int) -> ProgressLine:
    return ProgressLine(
        iteration, 100, step_s, 2.0, global_batch, more.get("skipped", 0), more.get("nan", 0)
    )


def test_lines_are_joined_by_their_numbers_of_iterations() -> None:
    """The first line stays separate, because it does not say how many iterations it covers."""
    ranges = IterationRanges()
    for one in (line(10, 9.0), line(20, 1.0), line(50, 2.0, skipped=1), line(51, 2.5, nan=1)):
        ranges.add(one)
    first, rest = ranges.take(), ranges.take()
    assert first is not None
    assert (first.iteration, first.num, first.step_s) == (10, 0, 9.0)
    assert rest is not None
    assert (rest.iteration, rest.num, rest.skipped, rest.nan) == (51, 41, 1, 1)
    assert rest.step_s == pytest.approx((10 * 1.0 + 30 * 2.0 + 2.5) / 41)
    assert ranges.take() is None
    ranges.add(line(60, 3.0))
    assert ranges.take() == (60, 100, 3.0, 2.0, 8, 0, 0, 9, "")


def test_lines_of_another_batch_or_an_earlier_iteration_are_not_joined() -> None:
    ranges = IterationRanges()
    for one in (line(1, 1.0), line(2, 1.0), line(3, 1.5, 16), line(2, 4.0, 16), line(4, 1.0, 16)):
        ranges.add(one)
    found = [ranges.take() for _ in range(5)]
    assert [one and (one.iteration, one.num) for one in found] == [
        (1, 0),
        (2, 1),
        (3, 1),
        (2, 0),
        (4, 2),
    ]


@pytest.mark.parametrize(
    ("iterations", "nums"),
    [
        ((1, 10, 20, 30), (0, 0, 20)),
        ((51, 60, 70), (0, 0, 10)),
        ((1, 2, 3), (0, 2)),
        ((10, 20, 30), (0, 20)),
        ((1, 3, 6), (0, 0, 3)),
        ((60, 120, 51, 60, 120), (0, 60, 0, 0, 60)),
    ],
)
def test_a_separate_first_iteration_is_also_in_the_next_mean(
    iterations: tuple[int, ...], nums: tuple[int, ...]
) -> None:
    """A line for the first iteration alone does not restart the measurement of the mean."""
    ranges = IterationRanges()
    for iteration in iterations:
        ranges.add(line(iteration, 1.0))
    assert [one.num for one in iter(ranges.take, None) if one is not None] == list(nums)


def test_lines_of_several_ranks_in_one_log_count_once() -> None:
    ranges = IterationRanges()
    for iteration in (1, 1, 1, 2, 2, 2, 3, 3, 3):
        ranges.add(line(iteration, 1.0))
    found = [ranges.take() for _ in range(3)]
    assert [one and (one.iteration, one.num) for one in found] == [(1, 0), (3, 2), None]


def test_pending_ranges_are_bounded() -> None:
    ranges = IterationRanges()
    for iteration in range(1, 101):
        ranges.add(line(iteration, 1.0, 8 + iteration % 2))
    assert [one.iteration for one in iter(ranges.take, None) if one is not None] == [
        *range(93, 101)
    ]


def order(rank: int = 0, *, task: int = 7) -> StartRank:
    spec = parse_spec(
        {
            "apiVersion": "unicron/v1",
            "name": "gpt",
            "command": ["true"],
            "model": {
                "gpu": "A100-80",
                "num_layers": 2,
                "hidden": 64,
                "num_heads": 2,
                "sequence": 64,
                "vocabulary": 128,
                "global_batch": 8,
            },
        }
    )
    return StartRank(
        nodes=("n1",),
        task=task,
        rank=rank,
        attempt=1,
        incarnation=1,
        slot=Slot("n1", rank),
        spec=spec,
        num_seats=2,
        host="x",
        port=1,
        checkpoint="",
    )


def log_line(iteration: int, ms: float = 200.0, batch: int = 8) -> bytes:
    return (
        f" iteration {iteration:8d}/     100 | elapsed time per iteration (ms): {ms:.1f} |"
        f" global batch size: {batch:5d} | lm loss: 2.5E+00 |\n"
    ).encode()


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# --- the reader of a growing log -----------------------------------------------------------------
@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"an attempt before\n" + log_line(90))
    return path


@pytest.fixture
def reader(log: Path) -> Iterator[OutputReader]:
    made = OutputReader(order(), log, log.stat().st_size)
    yield made
    made.close()


def test_each_line_of_the_attempt_is_reported_once(log: Path, reader: OutputReader) -> None:
    assert reader.look() is None
    write(log, log_line(1, 900.0) + log_line(2)[:30])
    assert reader.look() == IterationsLogged(
        task=7,
        rank=0,
        attempt=1,
        iteration=1,
        iterations=100,
        num_iterations=0,
        step_s=0.9,
        loss=2.5,
        global_batch=8,
    )
    assert reader.look() is None
    write(log, log_line(2)[30:] + log_line(3, 100.0))
    report = reader.look()
    assert report is not None
    assert (report.iteration, report.num_iterations, report.step_s) == (3, 2, pytest.approx(0.15))


def test_a_log_that_grows_too_fast_is_read_at_its_end(
    log: Path, reader: OutputReader, capsys: pytest.CaptureFixture[str]
) -> None:
    write(log, log_line(1) + log_line(2))
    assert [report and report.iteration for report in (reader.look(), reader.look())] == [1, 2]
    write(log, log_line(3) + os.urandom(300_000) + b"\n" + log_line(4, 100.0))
    report = reader.look(1000)
    assert report is not None
    assert (report.iteration, report.num_iterations, report.step_s) == (4, 2, 0.1)
    write(log, b"x" * 5000 + log_line(5))
    assert reader.look(1000) is None, "a line without its beginning is ignored"
    assert capsys.readouterr().out.count("faster than the agent reads") == 1


def test_a_log_that_is_emptied_or_renamed_is_still_read(log: Path, reader: OutputReader) -> None:
    write(log, log_line(1))
    reader.look()
    os.truncate(log, 0)
    assert reader.look() is None
    write(log, b"rest\n" + log_line(2))
    report = reader.look()
    assert report is not None
    moved = log.rename(log.with_suffix(".1"))
    log.touch()
    write(moved, log_line(3))
    again = reader.look()
    assert (report.iteration, again and again.iteration) == (2, 3)


@pytest.mark.parametrize("name", ["nowhere", "pipe"])
def test_a_log_that_cannot_be_read_is_logged_and_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = OutputReader(order(), tmp_path / name, 0)
    assert reader.look() is None
    assert list(reader.end()) == []
    assert "cannot be read" in capsys.readouterr().out


def test_output_after_the_end_is_not_followed(log: Path, reader: OutputReader) -> None:
    """A process that survives may print indefinitely."""
    write(log, log_line(1) + log_line(2))
    rest = reader.end()
    iterations = [next(iter(rest)).iteration]
    for one in rest:
        write(log, log_line(len(iterations) + 2))
        iterations.append(one.iteration)
        assert len(iterations) < 9
    assert iterations == [1, 2]


def test_another_global_batch_is_logged_once(
    log: Path, reader: OutputReader, capsys: pytest.CaptureFixture[str]
) -> None:
    write(log, log_line(1, batch=16) + log_line(2, batch=16))
    assert [report.global_batch for report in (reader.look(), reader.look()) if report] == [16, 16]
    assert capsys.readouterr().out.count("differs from its model") == 1


def test_the_first_rank_that_prints_is_read(tmp_path: Path) -> None:
    reports: list[Body] = []
    readers = OutputReaders(lambda body, _: reports.append(body), unguarded)
    logs = [tmp_path / str(rank) for rank in range(3)]
    for rank, path in enumerate(logs):
        path.touch()
        readers.begin(order(rank, task=7 + rank // 2), path, 0, 0)
    for path in logs[1:]:
        write(path, log_line(1))
    readers.look(1.0)
    for path in logs:
        write(path, log_line(2))
    readers.look(2.0)
    for rank in range(3):
        write(logs[rank], log_line(3))
        readers.end(order(rank, task=7 + rank // 2))
    assert [
        (body.task, body.rank, body.iteration)
        for body in reports
        if isinstance(body, IterationsLogged)
    ] == [(7, 1, 1), (8, 2, 1), (7, 1, 2), (8, 2, 2), (7, 1, 3), (8, 2, 3)]


def test_one_look_reads_a_bounded_amount() -> None:
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


@pytest.mark.usefixtures("nothing_left")
async def test_a_command_that_floods_its_log_is_still_followed(
    node: LocalNode, tmp_path: Path
) -> None:
    await node.start(python(FLOOD))
    (exited,) = await node.leader.wait(RankExited)
    assert exited.exit_code == 0
    reports = node.leader.all(IterationsLogged)
    assert reports[-1].iteration == 30
    assert {round(body.step_s, 9) for body in reports} == {0.1}
    assert 0 < sum(body.num_iterations for body in reports) <= 30 - reports[0].iteration
    assert (tmp_path / "logs/1-job/rank-0.attempt-1.log").stat().st_size > 30_000_000


@pytest.mark.usefixtures("nothing_left")
async def test_the_agent_reports_the_lines_of_a_command(node: LocalNode) -> None:
    code = (
        "import sys, time\n"
        "for i in range(1, 31):\n"
        f"    print({CORE.decode()!r}.replace('        2/', f'{{i:9d}}/'))\n"
        "    sys.stdout.flush()\n"
        "    time.sleep(0.1 if i < 30 else 0)\n"
    )
    await node.start(python(code))
    await node.leader.wait(RankExited)
    reports = node.leader.all(IterationsLogged)
    assert (reports[0].num_iterations, reports[-1].iteration) == (0, 30)
    assert sum(body.num_iterations for body in reports) == 30 - reports[0].iteration
    assert {(round(body.step_s, 9), body.loss, body.global_batch) for body in reports} == {
        (25.8792, 10.4456, 128)
    }
    kinds = [record.kind for record in node.leader.records]
    assert kinds[-1] == "RankExited"
    reported_s = [
        record.occurred_s for record in node.leader.records if record.kind == "IterationsLogged"
    ]
    assert all(later - sooner > 0.5 for sooner, later in pairwise(reported_s[:-2])), (
        "all reports but the last two are spaced"
    )


# --- lines that stop coming ----------------------------------------------------------------------
class Played:
    """Logs of one task, read in simulated time: one look per second, as the agent does."""

    def __init__(self, folder: Path, num_ranks: int = 1) -> None:
        self.told: list[Body] = []
        self.readers = OutputReaders(lambda body, _: self.told.append(body), unguarded)
        self.logs = [folder / f"rank-{rank}.log" for rank in range(num_ranks)]
        self.now_s = 1000.0
        self.iteration = 0
        for rank, path in enumerate(self.logs):
            path.touch()
            self.readers.begin(order(rank), path, 0, os.getpid())

    def wait(self, s: float) -> None:
        for _ in range(round(s)):
            self.now_s += 1.0
            self.readers.look(self.now_s)

    def print(self, num: int = 1, every_s: float = STEP_S) -> None:
        for _ in range(num):
            self.wait(every_s)
            self.iteration += 1
            write(self.logs[-1], log_line(self.iteration, 1000 * STEP_S))
        self.wait(1.0)

    def stalls(self) -> list[RankStalled]:
        return [body for body in self.told if isinstance(body, RankStalled)]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    yield made
    for rank in range(len(made.logs)):
        made.readers.drop(order(rank))


def test_a_silent_command_is_reported_once_and_when_it_continues(played: Played) -> None:
    played.print(10)
    played.wait(58.0)
    assert not played.stalls(), "the limit is at least a minute"
    played.wait(100.0)
    (stall,) = played.stalls()
    assert (stall.task, stall.rank, stall.where, stall.what, stall.collective, stall.iteration) == (
        7,
        0,
        "own",
        "no line of progress",
        0,
        10,
    )
    assert stall.normal_s == pytest.approx(STEP_S)
    assert 60 < stall.in_s < 63
    assert stall.stack
    played.print()
    ended, last = played.told[-2:]
    assert isinstance(ended, RankUnstalled)
    assert isinstance(last, IterationsLogged)
    assert ended.stalled_s == pytest.approx(161, abs=2)
    played.wait(400.0)
    assert len(played.stalls()) == 1, "the limit is three times the longest interval"
    played.wait(100.0)
    assert len(played.stalls()) == 2


def test_the_intervals_of_a_command_set_its_limit(played: Played) -> None:
    played.print(8, every_s=30.0)
    played.wait(290.0)
    assert not played.stalls(), "the limit is ten times the average interval"
    played.wait(30.0)
    assert len(played.stalls()) == 1


def test_one_long_interval_among_the_last_raises_the_limit(played: Played) -> None:
    played.print(6)
    played.print(1, every_s=50.0)
    played.print(20)
    played.wait(145.0)
    assert not played.stalls()
    played.wait(15.0)
    assert len(played.stalls()) == 1


def test_before_five_intervals_no_stall_is_reported(played: Played) -> None:
    played.print(5)
    played.wait(3600.0)
    assert not played.stalls()
    played.print(1)
    played.wait(3 * 3600.0)
    assert not played.stalls(), "the hour of silence counts as an interval"


@pytest.mark.parametrize("announcement", ASIDES)
def test_an_announced_pause_extends_the_limit(played: Played, announcement: str) -> None:
    played.print(10)
    write(played.logs[0], f"{announcement}\n".encode())
    played.wait(ANNOUNCED_PAUSE_S - 10)
    assert not played.stalls()
    played.wait(20.0)
    assert len(played.stalls()) == 1, "the extension is limited"


def test_an_announcement_before_the_last_line_does_not_count(played: Played) -> None:
    played.print(10)
    write(played.logs[0], b"saving checkpoint at iteration 10 to /ckpt\n" + log_line(11, 2000.0))
    played.wait(70.0)
    assert len(played.stalls()) == 1


def test_rank_0_announces_and_the_last_rank_prints(tmp_path: Path) -> None:
    """In Megatron, rank 0 announces checkpoints and the last rank prints iterations."""
    played = Played(tmp_path, num_ranks=2)
    write(played.logs[0], b"saving checkpoint at iteration 1 to /ckpt\n")
    played.print(10)
    played.wait(70.0)
    assert [report.rank for report in played.stalls()] == [1], "an outdated announcement"
    played.print(1)
    write(played.logs[0], b"x" * 200_000 + b"\nsaving checkpoint at iteration 11 to /ckpt\n")
    played.wait(600.0)
    write(played.logs[0], b"successfully saved checkpoint\n")
    played.wait(600.0)
    assert len(played.stalls()) == 1
    for rank in range(2):
        played.readers.drop(order(rank))


def test_after_the_last_iteration_no_stall_is_reported(played: Played) -> None:
    played.iteration = 90
    played.print(10)
    played.wait(2 * ANNOUNCED_PAUSE_S)
    assert not played.stalls()


def test_time_in_which_the_agent_was_paused_does_not_count(played: Played) -> None:
    played.print(10)
    played.wait(55.0)
    played.now_s += 3600.0
    played.wait(58.0)
    assert not played.stalls(), "the limit starts again after the pause"
    played.wait(5.0)
    assert len(played.stalls()) == 1
    played.print(1)
    played.wait(62.0)
    assert len(played.stalls()) == 2, "the pause is not an interval of the command"


def test_no_stall_is_reported_where_the_monitor_is_off(tmp_path: Path) -> None:
    reports: list[Body] = []
    readers = OutputReaders(lambda body, _: reports.append(body), unguarded, is_on=False)
    path = tmp_path / "log"
    path.touch()
    readers.begin(order(), path, 0, os.getpid())
    for at in range(1, 200):
        if at < 20:
            write(path, log_line(at))
        readers.look(float(at))
    assert {type(body) for body in reports} == {IterationsLogged}
    readers.drop(order())


PRINTS = """
import itertools, sys, time
for i in itertools.count(1):
    print(f" iteration {i}/ 100000 | elapsed time per iteration (ms): 50.0 |", flush=True)
    time.sleep(0.05)
"""


def test_a_real_process_that_is_stopped_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_reader, "LENIENT_S", 1.0)
    reports: list[Body] = []
    readers = OutputReaders(lambda body, _: reports.append(body), unguarded)
    path = tmp_path / "rank-0.log"
    program = tmp_path / "prints.py"
    program.write_text(PRINTS)
    with path.open("wb") as log:
        shell = subprocess.Popen(
            ["sh", "-c", f"'{sys.executable}' -S '{program}'; true"],
            stdout=log,
            start_new_session=True,
        )

    def until(kind: type[Body]) -> Body:
        give_up_s = time.monotonic() + 60
        while time.monotonic() < give_up_s:
            readers.look(time.monotonic())
            if found := [body for body in reports if isinstance(body, kind)]:
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"no {kind.__name__} in {reports[-3:]}")

    try:
        readers.begin(order(), path, 0, shell.pid)
        for _ in range(15):
            reports.clear()
            until(IterationsLogged)
        os.killpg(shell.pid, signal.SIGSTOP)
        stalled = until(RankStalled)
        assert isinstance(stalled, RankStalled)
        assert (stalled.stack, stalled.in_s >= 1.0) == ("stopped by a signal", True)
        assert stalled.normal_s == pytest.approx(0.05)
        os.killpg(shell.pid, signal.SIGCONT)
        ended = until(RankUnstalled)
        assert isinstance(ended, RankUnstalled)
        assert ended.stalled_s >= stalled.in_s
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        readers.drop(order())
