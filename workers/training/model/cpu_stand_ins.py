"""Stand-ins on a machine without CUDA for what Megatron takes from the GPU's libraries.

Recomputation saves and restores the GPU's random generators, and sequence parallelism needs a norm
of Transformer Engine or Apex. With CUDA, this module changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from . import cpu_device


class _Tracker:
    """Megatron's RNG tracker. It has states only while a model is built. Later, model-parallel
    ranks draw from the CPU's only generator, which is seeded for each micro-batch. The signatures
    are those of Megatron's tracker."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        self._states = {}

    def add(self, name: str, seed: int) -> None:
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Generator[None]:
        if name not in self._states:
            yield
            return
        current = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(current)

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        pass


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _get_state(*device: Any, **options: Any) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, *device: Any, **options: Any) -> None:
    torch.set_rng_state(state)


_norm = WrappedTorchNorm.__new__


def _marked_norm(cls: type, config: Any, *given: Any, **options: Any) -> Any:
    """A norm of torch whose parameters are marked as those of Transformer Engine and Apex are: in
    sequence parallelism Megatron adds up their gradients over the tensor-parallel ranks."""
    own = copy.copy(config)
    own.sequence_parallel = False  # Megatron refuses it, because nothing would mark the parameters
    norm = _norm(cls, own, *given, **options)
    for param in norm.parameters():
        vars(param)["sequence_parallel"] = config.sequence_parallel
    return norm


_apply = random.CheckpointFunction.apply


def _checkpoint(function: Callable[..., Any], *given: Any) -> Any:
    """Megatron's checkpoint. The backward calls the function without torch's modes."""
    def run(*inputs: Any) -> Any:
        with cpu_device.cpu_mode():
            return function(*inputs)

    return _apply(run, *given)


def install() -> None:
    """Install the stand-ins if there is no CUDA. It may be called again."""
    if torch.cuda.is_available():
        return
    torch.cuda.manual_seed = _seed
    random._CUDA_RNG_STATE_TRACKER = _Tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = _get_state
    random._set_cuda_rng_state = _set_state
    random.CheckpointFunction.apply = _checkpoint
    WrappedTorchNorm.__new__ = _marked_norm
