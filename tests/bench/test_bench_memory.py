"""The bench of memory: the names of its cases, and the sizes that they stand for."""

from __future__ import annotations

import argparse

import pytest
from bench.memory import main, trial
from bench.restore.trial import LAYER_PARAMS, PARAM_BYTES


def test_a_case_may_have_a_size() -> None:
    assert main.case_of("dp2-4gb_copying") in main.CASES
    assert main.case_of("tp2_start") in main.CASES
    assert main.case_of("dp2-0.5gb_start") == "dp2-0.5gb_start"
    for name in ("dp2_start_4gb", "dp2-gb_start", "dp3-4gb_start", "dp2"):
        with pytest.raises(argparse.ArgumentTypeError, match="a case is one of"):
            main.case_of(name)


@pytest.mark.parametrize("gb", [1.0, trial.STATE_GB, 4.0])
def test_the_model_has_the_state_of_the_case(gb: float) -> None:
    layers = trial.model_of(gb)["num_layers"]
    assert layers * LAYER_PARAMS * PARAM_BYTES == pytest.approx(gb * 1e9, rel=0.1)
