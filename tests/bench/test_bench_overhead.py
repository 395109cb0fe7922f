"""The overhead bench measures pairs of iterations in real ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from bench.overhead import main
from loop_driver import drive_loop
from nursery import Nursery

LIMIT_S = 240.0


def test_the_example_is_changed(tmp_path: Path) -> None:
    script = main.trained(tmp_path, main.CASES["overhead_128_tokens"]).read_text()
    assert "ROWS, SAMPLES = 512, 64, 2" in script


def test_each_case_is_a_valid_job(tmp_path: Path) -> None:
    with closing(Nursery(tmp_path / "zygote.log")) as nursery:
        for name, case in main.CASES.items():
            driver = drive_loop(
                tmp_path / name,
                nursery,
                [],
                iterations=2,
                micro_batches=main.MICRO_BATCHES,
                **case.loop,
            )
            driver.close()
            loop = msgspec.json.decode(msgspec.json.encode(driver.spec.loop))
            loop |= loop["parallel"]
            assert {key: loop[key] for key in case.loop} == case.loop


@pytest.mark.thorough
def test_each_pair_has_an_iteration_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "LIMIT_S", LIMIT_S)
    for name in main.HUGE_PAGES:
        monkeypatch.setenv(name, "")  # set again as before at the end
    pairs = main.measured(tmp_path, main.CASES["overhead_128_tokens"]._replace(num_pairs=4))
    assert len(pairs) == 4
    # Both run the same passes, so neither takes a small part of the other.
    assert all(0.3 < unicron_s / stock_s < 3 for unicron_s, stock_s in pairs)


@pytest.mark.thorough
def test_each_pair_has_a_counted_and_an_uncounted_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "LIMIT_S", LIMIT_S)
    for name in main.HUGE_PAGES:
        monkeypatch.setenv(name, "")
    pairs = main.measured(tmp_path, main.CASES["counted_tp2dp2"]._replace(num_pairs=3))
    assert len(pairs) == 3
    assert all(0.3 < counted_s / uncounted_s < 3 for counted_s, uncounted_s in pairs)
