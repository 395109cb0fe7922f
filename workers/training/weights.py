"""The initial weights: the same whole tensors in every layout, of which each place has its part.

A weight is drawn whole, from the seed and the name that it has in the whole model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from .draw import seed_of

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
_INTO_HIDDEN = (".linear_proj.weight", ".linear_fc2.weight")
"""Megatron draws these narrower the more layers there are."""


def global_name(module: Any, name: str) -> str:
    """A parameter's or buffer's name in the whole model, of its name in one chunk of it.

    The last stage's copy of an embedding that is tied to the output is that embedding.
    """
    if name == OUTPUT and module.share_embeddings_and_output_weights:
        return EMBEDDING
    if found := _LAYER.fullmatch(name):
        layer = module.decoder.layers[int(found[2])]
        return f"{found[1]}{layer.layer_number - 1}{found[3]}"
    return name


@contextmanager
def undrawn(config: Any) -> Generator[None]:
    """What is built meanwhile has weights that nobody has drawn; biases and norms are constants.

    Megatron goes through the motions: told to initialise nothing, it forgets which parameters are
    split over tensor-parallel ranks.
    """
    drawn = {name: getattr(config, name) for name in _METHODS}
    vars(config).update(dict.fromkeys(_METHODS, _leave))
    try:
        yield
    finally:
        vars(config).update(drawn)


def _leave(whole: torch.Tensor) -> torch.Tensor:
    return whole


def draw(module: Any, config: Any, seed: int, *, tp: int) -> None:
    """Draw a chunk's weights, on the CPU, with Megatron's distributions."""
    for own, param in module.named_parameters():
        if param.dim() < 2:
            continue
        name = global_name(module, own)
        split = getattr(param, "partition_dim", -1) if config.tensor_model_parallel_size > 1 else -1
        shape = list(param.shape)
        if split >= 0:
            assert param.partition_stride == 1
            shape[split] *= config.tensor_model_parallel_size
        whole = torch.empty(shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, 4, _number_of(name)))
            _method_of(config, name)(whole)
        if split >= 0:
            whole = whole.chunk(config.tensor_model_parallel_size, split)[tp]
        param.data.copy_(whole)


def _method_of(config: Any, name: str) -> Any:
    if name.endswith(_INTO_HIDDEN):
        return config.output_layer_init_method
    return config.embedding_init_method if name.startswith("embedding.") else config.init_method


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
