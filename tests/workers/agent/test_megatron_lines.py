"""Megatron's lines of progress: those of its versions are read, and nothing else, however cut."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_lines_setup import CORE
from unicron.workers.agent.monitoring.megatron_output import (
    LINE_BYTES_MAX,
    IterationRanges,
    ProgressLine,
    ProgressLines,
    parse,
)

DEEPSPEED = (b"[default7]: iteration    12695/  115311 | consumed samples:      9841584 |"
             b" consumed tokens:  20155564032 | elapsed time per iteration (s): 105.22 |"
             b" learning rate: 5.969E-05 | global batch size:  2048 | lm loss: 2.463556E+00 |"
             b" grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   2 |"
             b" number of nan iterations:   1 | samples per second: 19.463 | TFLOPs: 149.02 |")
NEOX = (b" samples/sec: 51.234 | iteration       10/      50 | elapsed time per iteration (ms): "
        b"19987.6 | learning rate: 1.234E-04 | approx flops per GPU: 150.3TFLOPS |"
        b" lm_loss: 7.123456E+00 | number of skipped iterations:   0 |")
MOE = (b" [2026-01-02 03:04:05.123456] iteration      311/  500000 | consumed samples:          311"
       b" | skipped samples:            8 | elapsed time per iteration (ms): 179.8 | mem usages:"
       b" 0.8131 | global batch size:     1 | load_balancing_loss: 1.01E+00 |"
       b" lm loss: 7.220541E+00 | loss scale: 1.0 |")
PRIMUS = (b"[20251023 12:39:12][rank-63/64][INFO ] [--------trainer.py:2382] :  iteration      424/"
          b"   40000 | consumed samples:        27136 | elapsed time per iteration (ms): "
          b"16601.3/17219.3 | hip mem usage/free/total/usage_ratio: 253.38GB/2.60GB/255.98GB/98.98%"
          b" | throughput per GPU (TFLOP/s/GPU): 11.9/11.5 | learning rate: 9.997254E-06 |"
          b" global batch size:    64 | lm loss: 4.440000E+00 | loss scale: 1.0 |")


@pytest.mark.parametrize(("line", "told"), [
    (CORE, ProgressLine(2, 5000, 25.8792, 10.4456, 128, 0, 0)),
    (DEEPSPEED, ProgressLine(12695, 115311, 105.22, 2.463556, 2048, 2, 1)),
    (NEOX, ProgressLine(10, 50, 19.9876, 7.123456, 0, 0, 0)),
    (MOE, ProgressLine(311, 500000, 0.1798, 7.220541, 1, 0, 0)),
    (PRIMUS, ProgressLine(424, 40000, 16.6013, 4.44, 64, 0, 0)),
    (b"==> iteration        8/      25 | elapsed time per iteration (ms): 548.5 |",
     ProgressLine(8, 25, 0.5485, None, 0, 0, 0)),
    (b" iteration 8/25 | elapsed time per iteration (ms): 548.5 | lm loss: INF |",
     ProgressLine(8, 25, 0.5485, None, 0, 0, 0)),
    (b" iteration 8/25 | elapsed time per iteration (ms): 548.5 | lm loss: NAN",
     ProgressLine(8, 25, 0.5485, None, 0, 0, 0)),
    (b" iteration 8/25 | elapsed time per iteration (ms): 548.5 | lm loss: 1.0E+999 |",
     ProgressLine(8, 25, 0.5485, None, 0, 0, 0)),
    (b" iteration 30/25 | elapsed time per iteration (ms): 548.5",
     ProgressLine(30, 0, 0.5485, None, 0, 0, 0)),
])
def test_lines_of_all_versions(line: bytes, told: ProgressLine) -> None:
    found = parse(line)
    assert found is not None
    assert found._replace(step_s=0.0) == told._replace(step_s=0.0)
    assert found.step_s == pytest.approx(told.step_s)


@pytest.mark.parametrize("line", [
    b"", b"iteration 3 of 7", b" validation results at iteration 100 | lm_loss value: 6.9E+00 |",
    b"time (ms) | forward-compute: 211.64 | backward-compute: 293.57",
    b" iteration 8/25 | consumed samples: 12 |",
    b" iteration 0/25 | elapsed time per iteration (ms): 548.5 |",
    b" iteration 8/25 | elapsed time per iteration (ms): nan |",
    b" iteration 8/25 | elapsed time per iteration (ms): -3.0 |",
    b" iteration 8/25 | elapsed time per iteration (ms): 1.0E+99 |",
    b" iteration 8/25 | elapsed time per iteration (h): 5 |",
    b" subiteration 8/25 | elapsed time per iteration (ms): 5 |",
    b" iteration 99999999999999/99999999999999 | elapsed time per iteration (ms): 5 |"])
def test_what_is_no_such_line(line: bytes) -> None:
    assert parse(line) is None


NOISE = st.lists(st.one_of(
    st.sampled_from([CORE, DEEPSPEED, NEOX, MOE, PRIMUS, b"\n", b"\r", b"\n\n",
                     b" iteration 8/25 |",
                     b"elapsed time per iteration (ms): 5.0 |", b"x" * LINE_BYTES_MAX,
                     b"elapsed time per iteration (" * 3, b"\x00\xff\xfe"]),
    st.binary(max_size=40)), max_size=12).map(b"".join)


@given(NOISE, st.data())
def test_however_it_is_cut_the_same_is_found(printed: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(printed)), max_size=8)))
    one, cut = ProgressLines(), ProgressLines()
    whole = one.feed(printed + b"\n")
    ends = [0, *cuts, len(printed)]
    parts = [printed[begin:end] for begin, end in pairwise(ends)]
    assert [line for part in (*parts, b"\n") for line in cut.feed(part)] == whole
    assert len(cut._begun) <= LINE_BYTES_MAX


@given(st.binary(max_size=300))
def test_nothing_that_is_printed_raises(printed: bytes) -> None:
    for line in (printed, b" iteration 1/2 | " + printed, CORE + printed, printed + CORE,
                 CORE[:len(printed)] + printed + CORE[len(printed):]):
        told = parse(line)
        assert told is None or (math.isfinite(told.step_s) and told.iteration >= 1)


def test_whole_lines_alone_and_none_that_is_too_long() -> None:
    lines = ProgressLines()
    assert lines.feed(CORE) == []
    assert [line.iteration for line in lines.feed(b"\n" + DEEPSPEED + b"\r\n" + NEOX)] == [2, 12695]
    assert [line.iteration for line in lines.feed(b"\r")] == [10]
    assert lines.feed(b"x" * LINE_BYTES_MAX + CORE + b"\n") == []
    assert [line.iteration for line in lines.feed(CORE + b"\n")] == [2]


def test_what_is_left_out_ends_a_line() -> None:
    lines = ProgressLines()
    lines.feed(CORE[:60])
    lines.skip()
    assert lines.feed(CORE[60:] + b"\n") == []
    assert len(lines.feed(CORE + b"\n")) == 1


def line(iteration: int, step_s: float, global_batch: int = 8, **more: int) -> ProgressLine:
    return ProgressLine(iteration, 100, step_s, 2.0, global_batch, more.get("skipped", 0),
                more.get("nan", 0))


def test_lines_are_joined_by_their_numbers_of_iterations() -> None:
    """The first stands alone: it does not say of how many iterations it is."""
    told = IterationRanges()
    for one in (line(10, 9.0), line(20, 1.0), line(50, 2.0, skipped=1), line(51, 2.5, nan=1)):
        told.add(one)
    first, rest = told.take(), told.take()
    assert first is not None
    assert (first.iteration, first.num, first.step_s) == (10, 0, 9.0)
    assert rest is not None
    assert (rest.iteration, rest.num, rest.skipped, rest.nan) == (51, 41, 1, 1)
    assert rest.step_s == pytest.approx((10 * 1.0 + 30 * 2.0 + 2.5) / 41)
    assert told.take() is None
    told.add(line(60, 3.0))
    assert told.take() == (60, 100, 9, 3.0, 2.0, 8, 0, 0)


def test_another_batch_is_not_joined_and_a_line_that_goes_back_begins_anew() -> None:
    told = IterationRanges()
    for one in (line(1, 1.0), line(2, 1.0), line(3, 1.5, 16), line(2, 4.0, 16), line(4, 1.0, 16)):
        told.add(one)
    found = [told.take() for _ in range(5)]
    assert [one and (one.iteration, one.num) for one in found] == [
        (1, 0), (2, 1), (3, 1), (2, 0), (4, 2)]


@pytest.mark.parametrize(("iterations", "nums"), [
    ((1, 10, 20, 30), (0, 0, 20)), ((51, 60, 70), (0, 0, 10)), ((1, 2, 3), (0, 2)),
    ((10, 20, 30), (0, 20)), ((1, 3, 6), (0, 0, 3)), ((60, 120, 51, 60, 120), (0, 60, 0, 0, 60))])
def test_the_first_iteration_is_in_the_mean_of_the_line_after_it_too(
        iterations: tuple[int, ...], nums: tuple[int, ...]) -> None:
    """Where it is printed on its own, measuring goes on."""
    told = IterationRanges()
    for iteration in iterations:
        told.add(line(iteration, 1.0))
    assert [one.num for one in iter(told.take, None) if one is not None] == list(nums)


def test_what_several_ranks_print_into_one_log_counts_once() -> None:
    told = IterationRanges()
    for iteration in (1, 1, 1, 2, 2, 2, 3, 3, 3):
        told.add(line(iteration, 1.0))
    found = [told.take() for _ in range(3)]
    assert [one and (one.iteration, one.num) for one in found] == [(1, 0), (3, 2), None]


def test_what_waits_is_bounded() -> None:
    told = IterationRanges()
    for iteration in range(1, 101):
        told.add(line(iteration, 1.0, 8 + iteration % 2))
    assert [one.iteration for one in iter(told.take, None) if one is not None] == [*range(93, 101)]
