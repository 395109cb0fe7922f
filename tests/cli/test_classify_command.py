"""`unicron classify`: text and JSON output, and refused inputs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from unicron.cli.app import run_command
from unicron.cli.commands import classify as classify_command
from unicron.control_plane.incidents.severity import HANDLING
from unicron.events.bounded_file import HEAD_BYTES

DATA = Path(__file__).parents[1] / "data"
UNICRON = Path(sys.executable).parent / "unicron"
LIMIT_S = 60
LOG = """\
[1.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=7, GPU has fallen off the bus.
iteration 12/ 100 | lm loss: 2.1
Traceback (most recent call last):
  File "train.py", line 3, in step
    raise RuntimeError("CUDA error: of source code")
RuntimeError: [pair.cc:598] Connection closed by peer [172.28.0.12]:43185
RuntimeError: [pair.cc:598] Connection closed by peer [172.28.0.13]:43185
"""
PAGE = """\
7 lines: 3 of a fault, 4 that mean nothing

SEVERITY  STATUS             RULE              LINES  FIRST
SEV1      GPU driver errors  xid-79                1      1
          [1.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=7, GPU has fallen off the bus.
SEV3      connection reset   connection-reset      2      6
          (peer) RuntimeError: [pair.cc:598] Connection closed by peer [172.28.0.12]:43185

SEV1       reconfigure: the slot that a device error names, or the lost node, is taken out, and the
           plan is made anew; if only the process says so, the rank is tried on another slot
SEV3       reattempt in place: the communicators are built again, every process lives; else the
           processes are started again, as SEV2
(peer)     reports the end of another process, or a wait for it: find the cause there
"""
Capture = pytest.CaptureFixture[str]


def written(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "LOG"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def answers(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_log_is_listed_by_severity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    written(tmp_path, LOG)
    monkeypatch.chdir(tmp_path)
    assert run_command(["classify", "LOG"]) == 0
    assert capsys.readouterr().out == PAGE


@pytest.mark.parametrize(("num", "is_shown"), [(2, False), (3, True)])
def test_a_peer_that_most_lines_name_is_shown(
    tmp_path: Path, capsys: Capture, num: int, *, is_shown: bool
) -> None:
    """Six ranks report the completion error of one node, and one rank that of another."""
    line = (
        "gpu{}:11:22 [0] NCCL WARN NET/IB : Got completion from peer 10.168.207.{}<4{}> with "
        "status=12 opcode=1 len=0 vendor err 129 (Send)\n"
    )
    log = "".join(line.format(rank, 19, rank) for rank in range(num)) + line.format(9, 7, 9)
    assert run_command(["classify", written(tmp_path, log)]) == 0
    told = f"peer       10.168.207.19 is named by {num} lines: look at that node first"
    assert (told in capsys.readouterr().out) is is_shown


def test_whether_a_fault_can_pass_is_told_as_json(tmp_path: Path, capsys: Capture) -> None:
    log = "OSError: [Errno 28] No space left on device\nKeyError: 'rate'\n"
    assert run_command(["classify", written(tmp_path, log), "-o", "json"]) == 0
    assert [line.get("can_pass", False) for line in answers(capsys)] == [True, False]


def test_each_line_of_a_log_as_json(tmp_path: Path, capsys: Capture) -> None:
    assert run_command(["classify", written(tmp_path, LOG), "-o", "json"]) == 0
    told = answers(capsys)
    assert [line["status"] for line in told] == [
        "GPU driver errors",
        "none",
        "none",
        "none",
        "none",
        "connection reset",
        "connection reset",
    ]
    assert told[0] == {
        "text": LOG.splitlines()[0],
        "status": "GPU driver errors",
        "severity": "SEV1",
        "rule": "xid-79",
        "line": LOG.splitlines()[0],
        "code": 79,
        "device": "0000:4e:00",
    }
    assert told[1] == {
        "text": LOG.splitlines()[1],
        "status": "none",
        "severity": "NONE",
        "rule": "iteration",
        "line": LOG.splitlines()[1],
    }
    assert told[5]["peer"] == "172.28.0.12:43185"
    assert told[5]["second_hand"] is True


@pytest.mark.parametrize("name", ["error_lines.jsonl", "error_lines_more.jsonl"])
def test_each_json_line_gets_one_answer(name: str, capsys: Capture) -> None:
    asked = [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]
    assert run_command(["classify", str(DATA / name), "-o", "json"]) == 0
    told = answers(capsys)
    for one, answer in zip(asked, told, strict=True):
        assert (answer["text"], answer["status"]) == (one["text"], one["status"] or "none")
        assert answer["severity"] == one["severity"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x1f\x8b\x08\0", "is not text"),
        ("CUDA".encode("utf-16"), "is not text"),
        (b"\x7fELF\0\0", "is not text"),
    ],
)
def test_an_unreadable_file_is_refused_with_a_hint(
    content: str | bytes, words: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run_command(["classify", written(tmp_path, content), "-o", "json"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    "line",
    [
        '{"body": "no"}',
        '{"level": "info", "event": "x"}',
        '{"msg": 3}',
        "{}",
        '{"text": NaN}',
        '{"text": "cut}',
        '{"a": ' * 20_000 + "}",
        '{"text": ["CUDA"]}',
        "{",
        "{'text': 'x'}",
    ],
)
def test_a_json_line_without_text_is_no_error(line: str, tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, f'{line}\n{{"text": "CUDA error: x", "rate": Infinity}}\n')
    assert run_command(["classify", path, "-o", "json"]) == 0
    first, second = answers(capsys)
    assert (first["text"], first["status"]) == ("x" if '"event"' in line else line, "none")
    assert (second["text"], second["status"]) == ("CUDA error: x", "CUDA errors")


def test_a_page_explains_a_severity_like_the_guide(tmp_path: Path, capsys: Capture) -> None:
    run_command(["classify", written(tmp_path, LOG)])
    text = " ".join(capsys.readouterr().out.split())
    guide = (DATA.parent.parent / "docs/guides/detection.md").read_text(encoding="utf-8")
    for severity in ("SEV1", "SEV3"):
        first = HANDLING[severity][0]
        assert f"{severity} {first}" in text
        assert f"| {severity} | {first} |" in guide


NAMES = ("event", "msg", "message", "log", "error", "exception")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *(({"level": 3, name: "CUDA error: x"}, "CUDA errors") for name in NAMES),
        ({"error": "CUDA error: an illegal memory access"}, "illegal memory access"),
        (
            {
                "event": "it ended",
                "msg": 1,
                "exception": "Traceback (most recent call last):\n"
                "RuntimeError: CUDA error: unknown error",
            },
            "CUDA errors",
        ),
    ],
)
def test_the_text_key_of_a_json_line_has_several_names(
    line: dict[str, Any], status: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run_command(["classify", written(tmp_path, json.dumps(line) + "\n"), "-o", "json"]) == 0
    assert [answer["status"] for answer in answers(capsys)] == [status]


def test_empty_standard_input_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"")))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run_command(["classify", "-"]) == 0
    assert capsys.readouterr().out == "0 lines: 0 of a fault, 0 that mean nothing\n"


def test_head_and_tail_of_a_very_long_line_are_classified(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, "x" * (50 << 20) + " CUDA error: unknown error\nnext\n")
    assert run_command(["classify", path, "-o", "json"]) == 0
    told = capsys.readouterr()
    assert [json.loads(line)["status"] for line in told.out.splitlines()] == ["CUDA errors", "none"]


def test_the_page_ends_behind_very_many_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(classify_command, "FAULT_LINES_NUM_MAX", 3)
    path = written(tmp_path, "fine\n" + "CUDA error: x\n" * 3 + "NVRM: Xid (PCI:0): 79\nfine\n")
    assert run_command(["classify", path]) == 0
    page = capsys.readouterr().out
    assert page.startswith("4 lines: 3 of a fault, 1 that mean nothing\n")
    told = " ".join(page.partition("\n\n")[0].split())
    assert told.endswith("left out what follows: -o json classifies all of it")
    assert "xid-79" not in page
    assert run_command(["classify", path, "-o", "json"]) == 0
    assert len(answers(capsys)) == 6


@pytest.mark.thorough
def test_a_flood_of_fault_lines_is_bounded(tmp_path: Path, capsys: Capture) -> None:
    """1.3 million lines took more than a minute, with nothing on the screen."""
    num = 400_000
    path = written(
        tmp_path,
        b"".join(
            b"RuntimeError: CUDA error: unknown error %d, node n%d\n" % (number, number % 64)
            for number in range(num)
        ),
    )
    begun_s = time.process_time()
    assert run_command(["classify", path]) == 0
    assert time.process_time() - begun_s < 10
    page = capsys.readouterr().out
    most = classify_command.FAULT_LINES_NUM_MAX
    assert page.startswith(f"{most} lines: {most:,} of a fault")
    assert "left out   what follows" in page


@pytest.mark.parametrize("name", ["none", ".", "none/inside"])
def test_a_missing_file_or_a_folder_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["classify", name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_standard_input_with_arbitrary_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    told = b"\xff\xfe CUDA error: x\r\n\n" + json.dumps({"text": "a\ud800\n"}).encode() + b"\nend"
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(told)))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run_command(["classify", "-o", "json"]) == 0
    assert [line["status"] for line in answers(capsys)] == ["CUDA errors", "none", "none", "none"]


def test_an_endless_log_is_streamed_until_the_reader_closes() -> None:
    source = subprocess.Popen(["yes", "CUDA error: unknown error"], stdout=subprocess.PIPE)
    judge = subprocess.Popen(
        [str(UNICRON), "classify", "-o", "json"],
        stdin=source.stdout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert source.stdout is not None
    assert judge.stdout is not None
    assert judge.stderr is not None
    source.stdout.close()
    try:
        assert json.loads(judge.stdout.readline())["status"] == "CUDA errors"
        judge.stdout.close()
        assert judge.wait(LIMIT_S) == 0
        assert judge.stderr.read() == b""
    finally:
        for process in (source, judge):
            process.kill()
            process.wait(LIMIT_S)
        judge.stderr.close()


def test_what_was_dropped_of_an_output_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound of outputs leaves a hole of any size; to read 1 TB of zeros takes hours."""
    path, lines = tmp_path / "output", [b"begun", b"torch.OutOfMemoryError: CUDA out of memory."]
    with path.open("wb") as file:
        file.write(lines[0].ljust(HEAD_BYTES))
        file.seek(1 << 40)
        file.write(lines[1] + b"\n")
    assert run_command(["classify", str(path), "-o", "json"]) == 0
    found = [json.loads(line)["text"].strip() for line in capsys.readouterr().out.splitlines()]
    assert found == [line.decode() for line in lines]
