"""Dead letters: kept whole in bounded files, listed, dropped and replayed by an operator."""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cli_process import in_process
from structlog.testing import capture_logs
from unicron.control_plane.service.dead_letters import (
    DATA_BYTES_MAX,
    FILE_BYTES_MAX,
    HEAD_BYTES,
    KEPT_BYTES_MAX,
    DeadLetters,
)
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import Identities
from unicron.events.log.port import Rejected
from unicron.events.records.reports import DeadLettersHandled, NodeJoined

from .test_intake import CLUSTER, get, joined, nested, push, reported, signed, wait_for_node
from .test_serve import control_plane
from .test_serve import records as records_of


def rejected(num_bytes: int, why: str = "junk") -> Rejected:
    return Rejected(why=why, source="n1/1", data=num_bytes * b"x")


def test_an_entry_is_kept_whole_up_to_a_bound(tmp_path: Path) -> None:
    letters = DeadLetters(tmp_path / "l.jsonl")
    sizes = [DATA_BYTES_MAX, DATA_BYTES_MAX + 1, 10]
    letters.keep([rejected(size) for size in sizes])
    assert [len(letter.data) for letter in letters.all()] == [DATA_BYTES_MAX, HEAD_BYTES, 10]
    assert [letter.num_bytes for letter in letters.all()] == sizes
    letters.keep([rejected(DATA_BYTES_MAX)] * 9)  # a flood is not kept whole
    num = KEPT_BYTES_MAX // DATA_BYTES_MAX
    assert [letter.is_whole for letter in letters.all()[3:]] == [True] * num + [False] * (9 - num)


def test_a_full_store_drops_its_oldest_and_numbers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    letters = DeadLetters(path)
    for _ in range(300):
        letters.keep([rejected(DATA_BYTES_MAX)])
    numbers = [letter.number for letter in letters.all()]
    assert numbers == list(range(301 - letters.num, 301))
    assert 2 * FILE_BYTES_MAX > sum(file.stat().st_size for file in tmp_path.iterdir()) > 5 << 20
    letters.remove({numbers[0], numbers[-1]})
    again = DeadLetters(path)
    assert [letter.number for letter in again.all()] == numbers[1:-1]
    assert again.num == letters.num == len(numbers) - 2
    again.keep([rejected(1)])
    assert again.all()[-1].number == 300


def test_a_store_that_cannot_be_written_is_told_and_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    path.mkdir()
    counted: list[int] = []
    letters = DeadLetters(path, counted.append)
    letters.keep([rejected(1)] * 7)
    assert (letters.num, counted) == (0, [7])
    with pytest.raises(IsADirectoryError):
        letters.all()


def test_a_full_disk_leaves_no_cut_line(tmp_path: Path) -> None:
    letters = DeadLetters(path := tmp_path / "l.jsonl")
    letters.keep([rejected(1)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
        with capture_logs() as logged:
            letters = DeadLetters(path)
            letters.keep([rejected(1_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [line["not_kept"] for line in logged] == ["No space left on device"]
    letters.keep([rejected(2)])
    assert [letter.num_bytes for letter in letters.all()] == [1, 2]
    assert letters.num == 2


def line(data: bytes, num_bytes: int = 0, why: str = "it was") -> bytes:
    """A letter as release 0.3 wrote it."""
    return json.dumps(
        {
            "at": 1_700_000_000.0,
            "why": why,
            "source": "n7/1",
            "num_bytes": num_bytes or len(data),
            "data": base64.b64encode(data).decode(),
        }
    ).encode()


class Operator:
    """Runs `unicron log dead-letters` with the folder's token."""

    def __init__(self, state: Path) -> None:
        self._env = {
            **{key: value for key, value in os.environ.items() if key[:8] != "UNICRON_"},
            "UNICRON_STATE": str(state),
            "NO_COLOR": "1",
        }

    def __call__(self, words: str) -> tuple[int, str, list[str]]:
        done = in_process(tuple(words.split()), None, self._env)
        return done.returncode, done.stdout, done.stderr.splitlines()

    def letters(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self("log dead-letters -o json")[1])["letters"]
        return found


def refuses_what_is_wrong(operator: Operator) -> None:
    refusals = {
        2: "dead letter 2 stays one: it is unreadable: ",
        3: "dead letter 3 stays one: the log has report 1 of n1/1 already",
        4: "dead letter 4 stays one: it is unreadable: ",
        5: "dead letter 5 stays one: the log lacks the report before it, 8 of n8/1",
        6: "dead letter 6 stays one: only its first 3 bytes were kept",
        1: "there is no dead letter 1",
    }
    for number, why in refusals.items():
        code, out, said = operator(f"log dead-letters --replay {number}")
        assert (code, out, len(said)) == (2, "", 2), said
        assert said[0].startswith(f"error: {why}")
    for words, why in {
        "--drop 1": "there is no dead letter 1",
        "--drop 2 --drop 99": "there is no dead letter 99",
        "--drop x": "--drop 'x' is not the number of a dead letter",
        "--drop all --drop 2": "--drop 'all' is not the number of a dead letter",
        "--drop 2 --replay 3": "--drop and --replay do not go together",
        "--reason x": "--reason is for --drop and --replay",
    }.items():
        code, _, said = operator(f"log dead-letters {words}")
        assert (code, said[0], len(said)) == (2, f"error: {why}", 2)


def test_an_operator_lists_drops_and_replays(own_server: Server, tmp_path: Path) -> None:
    state = tmp_path / "state"
    operator, path = Operator(state), state / "dead-letters.jsonl"
    with control_plane(state, own_server.url, cluster=CLUSTER) as running:
        running.wait_leading()
        assert operator("log dead-letters") == (0, "no dead letters\n", [])
        assert "dead" not in operator("status")[1]
        identities = Identities((state / "secret").read_bytes(), CLUSTER)
        healthy = signed(identities, reported(joined("n1"), "n1/1"))
        push(own_server, [healthy])
        wait_for_node(own_server, "n1")
        running.process.terminate()
        assert running.end() == 0
    good = signed(identities, reported(joined("n7"), "n7/1"))
    later = signed(identities, reported(joined("n8"), "n8/1", 9))
    lines = [good, nested(500)[:1024], healthy, b"\xff\x1b[2J", later, b"cut"]
    path.write_bytes(
        b"\n".join([*(line(data) for data in lines[:-1]), line(b"cut", 9_999), b"{damaged", b""])
    )
    with control_plane(state, own_server.url, cluster=CLUSTER) as running:
        running.wait_leading()
        push(own_server, [b"junk\x1b[2J" * 20])
        while len(operator.letters()) < 7:
            time.sleep(0.05)
        assert "7 dead letters: unicron log dead-letters" in operator("status")[1]
        assert json.loads(operator("status -o json")[1])["cluster"]["dead_letters"] == 7
        assert "unicron_dead_letters 7.0" in get(running, "/metrics").decode()
        code, out, _ = operator("log dead-letters")
        rows = out.splitlines()
        assert (code, len(rows), rows[1].split()[:4]) == (
            *(0, 8),
            ["1", "2023-11-14T22:13:20.000Z", "n7/1", str(len(good))],
        )
        assert "9,999 (cut)" in rows[6]

        code, out, said = operator("log dead-letters --replay 1 --replay 99 --reason upgraded")
        assert out == "dead letter 1 is in the intake again, as report 1 of n7/1\n"
        assert code == 2
        assert "99" in said[0]
        wait_for_node(own_server, "n7")
        refuses_what_is_wrong(operator)
        assert [letter["number"] for letter in operator.letters()] == [2, 3, 4, 5, 6, 7]
        assert operator("log dead-letters --drop 3 --drop 5 --reason old")[1] == (
            "dropped 2 dead letters\n"
        )
        assert operator("log dead-letters --drop all")[1] == "dropped 4 dead letters\n"
        assert operator("log dead-letters --drop all")[1] == "dropped 0 dead letters\n"
        assert not operator.letters()
        (state / "dead-letters.1.jsonl").unlink(missing_ok=True)
        (state / "dead-letters.1.jsonl").mkdir()
        for words in ("", " --drop 1", " --replay 1"):
            code, out, said = operator(f"log dead-letters{words}")
            assert (code, out) == (1, "")
            assert said[0].startswith("error: the dead letters cannot be read: "), said
    found = records_of(own_server.url, CLUSTER)
    assert [
        (body.act, body.num, body.numbers, body.who, body.reason)
        for body in (record.body for record in found)
        if isinstance(body, DeadLettersHandled)
    ][:2] == [
        ("replayed", 1, (1,), "owner", "upgraded"),
        ("dropped", 2, (3, 5), "owner", "old"),
    ]
    assert {r.body.node for r in found if isinstance(r.body, NodeJoined)} == {"n1", "n7"}
