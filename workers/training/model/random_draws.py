"""Random draws as a pure function of the position in training, independent of the rank."""

import hashlib
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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


def _seed_torch(seed: int) -> None:
    """torch.manual_seed also seeds unused devices, and formats a stack trace for each kind."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


class Draw:
    """The current micro-batch and iteration, from which all generators of a forward pass are
    seeded: a repeated micro-batch is bit-identical, on any rank."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.iteration = 0
        self.micro_batch = 0

    def at(self, iteration: int, micro_batch: int) -> None:
        """Set the current micro-batch and seed torch (and Megatron's tracker on CUDA) for it."""
        self.iteration = iteration
        self.micro_batch = micro_batch
        _seed_torch(seed_of(self.seed, 1, iteration, micro_batch))
        if torch.cuda.is_available():
            from megatron.core.parallel_state import get_tensor_model_parallel_rank
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            # Given, since a spec's model has no groups of experts. Experts are split as the rest.
            tp_rank = get_tensor_model_parallel_rank()
            model_parallel_cuda_manual_seed(
                seed_of(self.seed, 2, iteration, micro_batch) >> 32,
                tp_rank=tp_rank,
                ep_rank=0,
                etp_rank=tp_rank,
                force_reset_rng=True,
            )

    def at_layer(self, layer: Any, inputs: Any) -> None:
        """A pre-forward hook: seed torch for a layer, so that its dropout is equal on any stage."""
        _seed_torch(seed_of(self.seed, 5, self.iteration, self.micro_batch, layer.layer_number))

    def generator(self, layer: int, head: int, device: torch.device) -> torch.Generator:
        """The generator of one head (counted over all ranks) of one layer."""
        generator = torch.Generator(device=device)
        generator.manual_seed(seed_of(self.seed, 3, self.iteration, self.micro_batch, layer, head))
        return generator


# --- Initial weights ---
#
# A weight is drawn in blocks of the whole tensor, each seeded from the seed, the tensor's name and
# the block's row and column. A position of a layout draws the blocks that its part overlaps, so all
# layouts have the same weights.

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
EXPERT = ".local_experts."
_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
BLOCK_NUM = 256
"""Rows and columns of a block. Small, since a part draws whole blocks, and large enough that the
seeding of the generator is a small part of the time."""
_INTO_HIDDEN = (".linear_proj.weight", ".linear_fc2.weight")
"""The more layers, the smaller the standard deviation that Megatron uses for these weights."""


def global_name(module: Any, name: str) -> str:
    """The name in the whole model. The last stage's tied output layer has that of the embedding."""
    if name == OUTPUT and module.share_embeddings_and_output_weights:
        return EMBEDDING
    if found := LAYER.fullmatch(name):
        layer = module.decoder.layers[int(found[2])]
        return f"{found[1]}{layer.layer_number - 1}{found[3]}"
    return name


@contextmanager
def without_initialisation(config: Any) -> Generator[None]:
    """Within this context, a model is built with undefined weights. The methods are replaced, since
    with none Megatron does not mark the parameters that are split."""
    methods = {name: getattr(config, name) for name in _METHODS}
    vars(config).update(dict.fromkeys(_METHODS, torch.nn.Identity()))
    try:
        yield
    finally:
        vars(config).update(methods)


def draw(module: Any, config: Any, seed: int, *, tp: int) -> None:
    """Draw a chunk's weights, on the CPU, with Megatron's distributions."""
    for own, param in module.named_parameters():
        if param.dim() < 2:
            continue
        name = global_name(module, own)
        split = getattr(param, "partition_dim", -1) if config.tensor_model_parallel_size > 1 else -1
        shape, begin = list(param.shape), [0, 0]
        if split >= 0:
            assert param.partition_stride == 1
            begin[split] = tp * shape[split]
            shape[split] *= config.tensor_model_parallel_size
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        _draw_part(
            param.data,
            begin,
            shape,
            seed_of(seed, 4, int.from_bytes(digest, "big")),
            _method_of(config, name),
        )


def _draw_part(
    part: Tensor, begin: Sequence[int], shape: Sequence[int], seed: int, method: Any
) -> None:
    end = [first + num for first, num in zip(begin, part.shape, strict=True)]
    with torch.random.fork_rng(devices=[]):
        for row in range(begin[0] // BLOCK_NUM * BLOCK_NUM, end[0], BLOCK_NUM):
            for column in range(begin[1] // BLOCK_NUM * BLOCK_NUM, end[1], BLOCK_NUM):
                block = torch.empty(
                    min(BLOCK_NUM, shape[0] - row), min(BLOCK_NUM, shape[1] - column)
                )
                torch.default_generator.manual_seed(seed_of(seed, row, column))
                method(block)
                (top, bottom), (left, right) = (
                    (max(first, start), min(last, start + BLOCK_NUM))
                    for first, last, start in zip(begin, end, (row, column), strict=True)
                )
                part[top - begin[0] : bottom - begin[0], left - begin[1] : right - begin[1]].copy_(
                    block[top - row : bottom - row, left - column : right - column]
                )


def _method_of(config: Any, name: str) -> Any:
    if name.endswith(_INTO_HIDDEN):
        return config.output_layer_init_method
    return config.embedding_init_method if name.startswith("embedding.") else config.init_method
