"""`make gpu-check` as tests: each is skipped without CUDA."""

from __future__ import annotations

import pytest
import torch
from gpu.main import CHECKS, NO_CUDA, run
from gpu.result import CUDA

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason=NO_CUDA)


@pytest.mark.parametrize("name", CHECKS)
def test_on_the_gpu(name: str) -> None:
    outcome = run(name, CUDA)
    if outcome.word == "not possible":
        pytest.skip(outcome.why)
    assert outcome.word == "ok", outcome.why
    assert outcome.rows
