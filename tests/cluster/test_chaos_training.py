"""A chaos training's faults depend only on its seed, and its picture only on its data."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import chaos_picture
import pytest
from chaos_faults import CALM_ITERATIONS, WEIGHTS, draw

ROUNDS, ITERATIONS = 100, 1000


def test_the_same_seed_draws_the_same_faults() -> None:
    script = draw(4, ROUNDS, ITERATIONS)
    assert script == draw(4, ROUNDS, ITERATIONS) != draw(5, ROUNDS, ITERATIONS)
    at = [fault.iteration for fault in script]
    assert at == sorted(at)
    assert len(at) == ROUNDS
    assert at[0] >= CALM_ITERATIONS
    assert at[-1] < ITERATIONS - CALM_ITERATIONS
    assert {fault.kind for fault in script} == set(WEIGHTS) == set(chaos_picture.COLOURS)


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is in the extra `draw`"
)
def test_the_same_run_gives_the_same_picture(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.svg", "two.svg", "one.png")]
    for file in files:
        chaos_picture.draw(
            chaos_picture.Curves(
                [3.0, 2.0, 1.0],
                [3.0, 2.0, 1.1],
                [3.0, 2.1, 1.1],
                [("exception", 1), ("exception", 2)],
            ),
            "3 iterations",
            [file],
        )
    one, two, png = (file.read_bytes() for file in files)
    assert one == two
    assert b"3 iterations" in one
    assert b"exception (2)" in one
    assert png.startswith(b"\x89PNG")
