"""The classifier on real lines: each row of the table, lines that mean nothing, any text at all."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
from confusion import tables
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.control_plane.severity import TABLE
from unicron.workers.classify import (
    LINE_CHARS_MAX,
    NOTHING,
    OVERLAP_CHARS,
    RULES,
    Verdict,
    classify,
)
from unicron.workers.xids import XIDS

DATA = Path(__file__).parent / "data"
SAMPLES = ("error_lines.jsonl", "error_lines_more.jsonl")


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


LABELLED = [line for name in SAMPLES for line in lines_of(name)]
QUIET = [line["text"] for line in LABELLED if not line["status"]]


@pytest.mark.parametrize("line", LABELLED, ids=lambda line: line["text"][:60])
def test_each_labelled_line_gets_its_row(line: dict[str, Any]) -> None:
    verdict = classify(line["text"])
    assert verdict.status == line["status"], verdict
    assert TABLE.get(verdict.status, "NONE") == line["severity"], verdict


def test_the_samples_hold_every_row_with_many_lines_that_mean_nothing() -> None:
    assert {line["status"] for line in LABELLED} == {"", *TABLE} - {"wrong input"}
    assert len(QUIET) >= 50


def test_the_page_holds_the_tables_that_come_out_today() -> None:
    page = (DATA.parent.parent / "docs/guides/detection.md").read_text(encoding="utf-8")
    assert tables() in page, "make confusion prints them anew"


def test_the_xids_are_those_of_the_catalogue() -> None:
    with (DATA / "xid_catalog.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 172
    assert {int(row["xid"]): row["unicron_status_suggested"] for row in rows} == XIDS


@pytest.mark.parametrize("xid", sorted(set(XIDS) - {154}))
def test_an_xid_is_read_by_its_number_in_every_spelling(xid: int) -> None:
    for text in (f"[1.2] NVRM: Xid (PCI:0000:05:00): {xid}, pid=1, name=python3, Ch 00000008",
                 f"NVRM: Xid (0000:05:00): {xid}, Channel 1", f"XID errors: {xid}", f"xid={xid}"):
        assert (classify(text).status, classify(text).code) == (XIDS[xid], xid), text


def test_codes_that_need_their_text() -> None:
    def nvlink(word: str) -> str:
        return f"NVRM: Xid (PCI:0000:04:00): 145, RLW_CTRL {word} XC0 i0 Link 00 (0x00000003)"

    def recovery(value: str) -> str:
        return ("NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x4 (Drain and "
                f"Reset) to {value}")

    assert classify(nvlink("Fatal")).status == "NVLink errors"
    assert classify(nvlink("Nonfatal")).status == ""
    assert classify(recovery("0x0 (None)")).status == ""
    assert classify(recovery("0x2 (Node Reboot Required)")).status == "GPU driver errors"
    assert classify("NVRM: Xid (PCI:0009:01:00): 99999, of tomorrow").status == ""
    assert classify("XID 149.37 (err status 0x00000000) NETIR on GPU 3").device == "3"


@pytest.mark.parametrize(("text", "peer"), [
    ("NCCL WARN NET/IB : Got completion from peer 10.3.0.61<39430> with error 12, opcode 129",
     "10.3.0.61:39430"),
    ("RuntimeError: [pair.cc:598] Connection closed by peer [172.28.0.12]:43185",
     "172.28.0.12:43185"),
    ("socketProgress: Connection closed by remote peer node2<42830>", "node2:42830"),
    ("Connect to fe80::966d:ae03:a2:8cf0%ib1<17943> failed : Connection refused",
     "[fe80::966d:ae03:a2:8cf0%ib1]:17943"),
    ("The client socket has timed out after 1800s while trying to connect to (127.0.0.1, 48391).",
     "127.0.0.1:48391"),
    ("failed to connect to [::ffff:198.18.0.1]:3254 (errno: 110 - Connection timed out).",
     "198.18.0.1:3254"),
    ("ERROR connecting to 10.87.137.19: Connection refused [111]", "10.87.137.19"),
    ("recvValue failed on SocketImpl(fd=1, addr=[a]:48750, remote=[b.local]:20000): "
     "Connection reset by peer", "b.local:20000"),
    ("OSError: [Errno 104] Connection reset by peer", ""),
])
def test_whom_a_line_names_at_the_other_end(text: str, peer: str) -> None:
    assert classify(text).peer == peer


@pytest.mark.parametrize(("text", "device"), [
    ("NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus.", "0000:05:00"),
    ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.", "0000:29:00.0"),
    ("Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.", "0000:02:00.0"),
    ("for CUDA device ordinal 3: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error", "3"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", ""),
])
def test_which_gpu_a_line_names(text: str, device: str) -> None:
    assert classify(text).device == device


def test_a_carrier_gives_way_to_what_it_carries() -> None:
    watchdog = "[Rank 1] NCCL watchdog thread terminated with exception: "
    for inner, status in (("CUDA error: uncorrectable ECC error encountered", "ECC errors"),
                          ("CUDA error: an illegal memory access", "illegal memory access"),
                          ("Watchdog caught collective operation timeout", "NCCL timeout")):
        assert classify(watchdog + inner).status == status
    text = ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1331, unhandled system error"
            "\nLast error:\nsocketStartConnect: Connect to 10.0.0.2<45763> failed : Connection "
            "refused")
    assert classify(text)[:2] == ("connection refused", "connection-refused")


def test_a_peers_end_is_second_hand_while_a_fault_of_ones_own_is_not() -> None:
    for text in ("Connection closed by peer [10.0.0.1]:4", "remote process exited or there was a "
                 "network error", "Watchdog caught collective operation timeout"):
        assert classify(text).second_hand, text
    for text in ("ValueError: bad", "CUDA error: unknown error", "OSError: [Errno 5] Input/output "
                 "error", "Connection refused"):
        assert not classify(text).second_hand, text


def test_of_a_traceback_the_innermost_exception_decides() -> None:
    text = ('Traceback (most recent call last):\n  File "train.py", line 3, in step\n'
            '    raise ConnectionResetError("CUDA error: uncorrectable ECC error")\n'
            "ValueError: no such layer\n\nDuring handling of the above exception, another "
            'exception occurred:\n\nTraceback (most recent call last):\n  File "a.py", line 9\n'
            "    close()\nConnectionResetError: [Errno 104] Connection reset by peer\n")
    verdict = classify(text)
    assert verdict == Verdict("other software errors", "exception",
                              line="ValueError: no such layer")


def test_a_wrong_job_is_its_own_row() -> None:
    assert classify("unicron.events.errors.UsageError: no such shard").status == "wrong input"


# --- any text at all -----------------------------------------------------------------------------
@settings(deadline=None)
@given(st.text())
def test_any_text_gets_a_row_of_the_table_or_nothing(text: str) -> None:
    verdict = classify(text)
    assert verdict.status in {"", *TABLE}
    assert verdict.rule or verdict == NOTHING


@settings(deadline=None)
@given(st.sampled_from(LABELLED), st.lists(st.sampled_from(QUIET), max_size=4),
       st.lists(st.sampled_from(QUIET), max_size=4))
def test_lines_that_mean_nothing_change_no_verdict(
        line: dict[str, Any], before: list[str], behind: list[str]) -> None:
    assert classify("\n".join([*before, line["text"], *behind])).status == line["status"]


@settings(deadline=None)
@given(st.sampled_from([line for line in LABELLED if line["status"]]),
       st.integers(LINE_CHARS_MAX, 3 * LINE_CHARS_MAX))
def test_a_cause_far_inside_a_long_line_is_found(line: dict[str, Any], ahead: int) -> None:
    last = line["text"].splitlines()[-1]
    alone = classify(last)
    if len(line["text"].splitlines()) == 1 and len(last) < OVERLAP_CHARS:
        found = classify("." * ahead + " " + last + " " + "." * ahead)
        assert found.status == alone.status or alone.rule == "exception", (found, alone)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([word for rule in RULES for word in rule.words]), min_size=1,
                max_size=3), st.sampled_from(["", " ", "=", ":0", "a" * 50, "\n"]))
def test_time_is_linear_in_the_text_whatever_it_repeats(words: list[str], between: str) -> None:
    unit = between.join(words) + between

    def cost_s(num_chars: int) -> float:
        text = (unit * (num_chars // len(unit) + 1))[:num_chars]
        begun_s = time.process_time()
        classify(text)
        return time.process_time() - begun_s

    cost_s(1_000)
    assert cost_s(40_000) < 1.0  # measured: 0.04 s; a quadratic pattern takes minutes


def test_a_megabyte_in_one_line_is_judged_within_seconds() -> None:
    begun_s = time.process_time()
    assert classify("x" * 1_000_000 + " CUDA error: unknown error").status == "CUDA errors"
    assert time.process_time() - begun_s < 10.0  # measured: 0.4 s
