"""Deterministic kernels, for `reproducible: bitwise`: each gives the same bits at each call."""

import os

import structlog
import torch

from ....events.errors import UsageError
from ....events.spec.job import Reproducible

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
log = structlog.get_logger()


def require() -> None:
    """Choose deterministic kernels in this process. Called before CUDA is used and the model is
    built; it may be called again. An operator that has none then raises RuntimeError."""
    os.environ.update(VARIABLES)
    os.environ.setdefault("NCCL_ALGO", "Ring")  # tensor-parallel ranks add up activations in fp
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def decline(asked: Reproducible, why: str) -> None:
    """What trains here cannot be `bitwise`: log it once, and permit all kernels again. Raises
    UsageError if it is `required`; does nothing if only `rounding` was asked for."""
    if asked == "rounding":
        return
    if asked == "required":
        raise UsageError(
            f"reproducible: required cannot be kept: {why}",
            "docs/guides/reproducible.md lists what can; with bitwise in place of "
            "required it trains with rounding",
        )
    log.warning("gradients are summed with rounding, not bit for bit", why=why)
    torch.use_deterministic_algorithms(False)
