"""A sample of `make fuzz`, a few seconds of each area, and what shows that it would notice."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fuzz import api_document, main
from fuzz.areas import AREAS, Area, Case
from fuzz.mutation import plain_of
from unicron.control_plane.api.routes import ROUTES

SEED = 20
SAMPLE_NUM, SAMPLE_S = 300, 2.5


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_random_input_ends_in_a_result_or_in_one_line(area: Area, tmp_path: Path) -> None:
    counts = main.fuzz(area, SEED, SAMPLE_NUM, tmp_path, s_max=SAMPLE_S)
    assert counts.is_clean, "\n".join(counts.told)
    assert counts.cases >= 3


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


def test_a_case_depends_on_its_seed_only() -> None:
    data = {"a": [1, {"b": "c"}], "d": None}
    drawn = [plain_of(random.Random(f"7:{n}"), data) for n in range(50)]
    again = [plain_of(random.Random(f"7:{n}"), data) for n in range(50)]
    assert list(map(repr, drawn)) == list(map(repr, again))
    assert data == {"a": [1, {"b": "c"}], "d": None}
