"""Where a rank trains that was given a GPU."""

from __future__ import annotations

import pytest
import torch
from unicron.workers.training.model import cpu_device


def test_a_rank_that_was_given_a_gpu_does_not_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA fails, as with a wrong index or a broken driver. The error is torch's own."""
    if torch.cuda.is_available():
        pytest.skip("CUDA works here")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        cpu_device.prepare_device()
