"""Random draws as a pure function of where in the training they happen, never of who draws."""

from __future__ import annotations

from typing import Any

import torch

_MASK = (1 << 64) - 1


def seed_of(*parts: int) -> int:
    """A 63-bit seed from integers, in order; splitmix64 over each (Steele et al., OOPSLA 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + (part & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Draw:
    """Where the training stands: which micro-batch of which iteration is being computed.

    Every generator of a forward pass is seeded from here, so that dropout is the same whichever
    rank computes the micro-batch, and a repeated one repeats exactly.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.iteration = 0
        self.micro_batch = 0

    def at(self, iteration: int, micro_batch: int) -> None:
        """Move to a micro-batch and seed torch (and Megatron's tracker on CUDA) for it."""
        self.iteration = iteration
        self.micro_batch = micro_batch
        torch.manual_seed(seed_of(self.seed, 1, iteration, micro_batch))
        if torch.cuda.is_available():
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(
                seed_of(self.seed, 2, iteration, micro_batch) >> 32, force_reset_rng=True
            )

    def at_layer(self, layer: Any, given: Any) -> None:
        """A layer begins: its dropout is the same on whichever stage it is. A pre-forward hook."""
        torch.manual_seed(
            seed_of(self.seed, 5, self.iteration, self.micro_batch, layer.layer_number)
        )

    def generator(self, layer: int, head: int, device: torch.device) -> torch.Generator:
        """A generator of its own for one head (counted over all ranks) of one layer."""
        generator = torch.Generator(device=device)
        generator.manual_seed(
            seed_of(self.seed, 3, self.iteration, self.micro_batch, layer, head)
        )
        return generator
