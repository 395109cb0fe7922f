"""A sample of `make fuzz`, a few seconds of each area, and what shows that it would notice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.recovery.rows import Row
from fuzz import api_document, main
from fuzz import counts as fuzz_counts
from fuzz.areas import Area, Case
from fuzz.bounds import Bounds
from fuzz.mutation import plain_of
from unicron.control_plane.api.routes import ROUTES

SEED = 20
SAMPLE_NUM, SAMPLE_S = 300, 0.75


@pytest.mark.parametrize("area", main.AREAS, ids=lambda area: area.name)
def test_random_input_ends_in_a_result_or_in_one_line(area: Area, tmp_path: Path) -> None:
    counts = main.fuzz(area, SEED, SAMPLE_NUM, tmp_path, s_max=SAMPLE_S)
    assert counts.is_clean, "\n".join(counts.told)
    assert counts.cases >= main.CASES_NUM_MIN


@pytest.mark.thorough
def test_no_request_of_the_openapi_document_gets_a_wrong_answer(tmp_path: Path) -> None:
    """One more kind of random input to the API: `make fuzz-api` has more of it."""
    found = api_document.fuzz(tmp_path, examples=5, seed=SEED)
    assert found["exit_code"] == 0, found["output"]
    assert found["complete"]
    assert found["operations"]["tested"] == len(ROUTES) - 1, "all but that of the document"
    assert found["test_cases"]["generated"] > 1_000


def test_a_traceback_a_server_error_and_a_hang_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "CASE_S_MAX", 0.2)

    @contextmanager
    def opened(folder: Path) -> Iterator[Case]:
        def case(rng: random.Random) -> int:
            match next(numbers):
                case 0:
                    raise KeyError("planted")
                case 1:
                    return 503
                case 2:
                    time.sleep(5)
            return 200

        yield case
        raise AssertionError("planted at the end")

    numbers = iter(range(9))
    counts = main.fuzz(Area("planted", opened), 1, 4, tmp_path)
    assert (counts.cases, counts.tracebacks, counts.server_errors, counts.hangs) == (4, 2, 1, 1)
    assert not counts.is_clean
    assert "SEED=1 ONLY=planted:0" in counts.told[0]


def test_a_reader_that_ends_or_grows_is_noticed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as reader:
        bounds = Bounds(reader.pid, tmp_path, memory_bytes=64 << 20, log_bytes=1000)
        bounds.check()
        (tmp_path / "log").write_bytes(bytes(1001))
        with pytest.raises(AssertionError, match="the logs have 1001 bytes"):
            bounds.check()
        (tmp_path / "log").unlink()
        reader.kill()
        reader.wait(10)
        with pytest.raises(AssertionError, match="the reader has ended"):
            bounds.check()
    own = Bounds(os.getpid(), memory_bytes=16 << 20)
    own.check()
    assert len(b"x" * (64 << 20))
    with pytest.raises(AssertionError, match="MB of memory, above"):
        own.check()


def test_runs_at_one_commit_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, commit = tmp_path / "fuzz.json", ["a" * 8]
    monkeypatch.setattr(fuzz_counts, "describe", lambda: {"commit": commit[0]})

    def run(area: str, seed: int, cases: int, uncaught: int = 0) -> int:
        counts = main.Counts(area, cases=cases, tracebacks=uncaught)
        return fuzz_counts.add_up(main.rows_of(counts, seed), file)

    assert [run("page", 1, 100), run("page", 2, 50, 1), run("inbox", 1, 7)] == [100, 150, 157]
    assert run("page", 2, 60, 2) == 167, "the same cases again count once"
    rows = [Row(**one) for one in json.loads(file.read_text())]
    text = fuzz_counts.markdown(rows)
    assert "| page | 1, 2 | 160 | 2 | 0 | 0 |" in text
    assert text.endswith("| all |  | 167 | 2 | 0 | 0 |")
    commit[0] = "b" * 8
    assert run("page", 3, 1) == 1, "other code has other counts"


def test_a_case_depends_on_its_seed_only() -> None:
    data = {"a": [1, {"b": "c"}], "d": None}
    drawn = [plain_of(random.Random(f"7:{n}"), data) for n in range(50)]
    again = [plain_of(random.Random(f"7:{n}"), data) for n in range(50)]
    assert list(map(repr, drawn)) == list(map(repr, again))
    assert data == {"a": [1, {"b": "c"}], "d": None}
