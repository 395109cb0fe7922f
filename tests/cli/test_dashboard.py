"""`unicron open` and `unicron view`: what they print, serve and refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tests" / "data" / "demo.jsonl"
UNICRON = Path(sys.executable).parent / "unicron"
WAIT_S_MAX = 120


def call(url: str, path: str, secret: str = "", body: object = None) -> tuple[int, Any]:
    asked = urllib.request.Request(
        url + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"}
        | ({"Authorization": f"Bearer {secret}"} if secret else {}),
    )
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_S_MAX) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def viewing(*words: str) -> Iterator[tuple[str, str]]:
    """The URL of `unicron view`, and the secret of a session."""
    with subprocess.Popen(
        [UNICRON, "view", *words, "--print"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url, _, code = process.stdout.readline().strip().partition("/#code=")
        try:
            status, session = call(url, "/v1/sessions", body={"code": code})
            assert status == 200, session
            yield url, session["secret"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S_MAX) == 0


def test_a_file_is_shown_and_nothing_can_be_changed() -> None:
    with viewing(str(DEMO)) as (url, secret):
        assert call(url, "/v1/health", secret)[1]["file"] == "demo.jsonl"
        state = call(url, "/v1/state", secret)[1]
        assert (state["cluster"]["seq"], len(state["tasks"])) == (97, 1)
        assert call(url, "/v1/state?at=30", secret)[1]["cluster"]["seq"] == 30
        assert call(url, "/v1/timeline", secret)[1]["last_seq"] == 97
        assert call(url, "/v1/history", secret)[1]["total"]["records"] == 97
        assert call(url, "/v1/plan/dry-run", secret, {})[0] == 200
        for path in ("/v1/freeze", "/v1/tasks/5/cancel", "/v1/sessions/codes"):
            status, problem = call(url, path, secret, {})
            assert (status, problem["detail"]) == (
                409,
                "this is a log of the past: nothing can be changed",
            )
        assert call(url, "/v1/state")[0] == 401


def broken(path: Path, name: str) -> Path:
    lines = DEMO.read_bytes().splitlines(keepends=True)
    texts = {
        "cut": b"".join(lines[:40]),
        "edited": b"".join(lines).replace(b"alpha", b"gamma"),
        "future": b"".join(lines).replace(b'"version":1', b'"version":9', 1),
        "text": b"hello\n",
        "empty": b"",
    }
    file = path / name
    if name == "folder":
        file.mkdir()
    elif name in texts:
        file.write_bytes(texts[name])
    return file


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut", "truncated"),
        ("edited", "was changed"),
        ("future", "format version 9"),
        ("text", "not an exported log"),
        ("empty", "is empty"),
        ("missing", "No such file"),
        ("folder", "has no log"),
    ],
)
def test_what_is_no_log_is_refused_in_a_line(tmp_path: Path, name: str, said: str) -> None:
    done = subprocess.run(
        [UNICRON, "view", broken(tmp_path, name), "--print"],
        text=True,
        capture_output=True,
        check=False,
        timeout=WAIT_S_MAX,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "hint" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
