"""A large GPT as lists of shards: what each member of a layout holds.

Names, shapes and splits as Megatron has them, in bf16 with fp32 masters and Adam's moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates
from unicron.workers.training.recovery.resharding import Region, Shard, ShardList

HIDDEN = 4096
VOCABULARY = 50_176
LAYER = (
    ("input_layernorm.weight", (HIDDEN,), None),
    ("self_attention.linear_qkv.weight", (3 * HIDDEN, HIDDEN), 0),
    ("self_attention.linear_qkv.bias", (3 * HIDDEN,), 0),
    ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1),
    ("self_attention.linear_proj.bias", (HIDDEN,), None),
    ("pre_mlp_layernorm.weight", (HIDDEN,), None),
    ("mlp.linear_fc1.weight", (4 * HIDDEN, HIDDEN), 0),
    ("mlp.linear_fc1.bias", (4 * HIDDEN,), 0),
    ("mlp.linear_fc2.weight", (HIDDEN, 4 * HIDDEN), 1),
    ("mlp.linear_fc2.bias", (HIDDEN,), None),
)
KINDS = {
    "model": "bfloat16",
    "master": "float32",
    "optimizer.exp_avg": "float32",
    "optimizer.exp_avg_sq": "float32",
}


def num_layers(num_shards: int, pp: int) -> int:
    """The layers of a model of which a stage has about `num_shards` shards."""
    return num_shards // (len(LAYER) * len(KINDS)) * pp


@lru_cache(maxsize=256)
def list_of(layers: int, axes: Axes, tp: int, pp: int) -> ShardList:
    """The list of the members with these ranks."""
    return ShardList(shard for kind in KINDS for shard in _shards(kind, layers, axes, tp, pp))


def list_at(layers: int, axes: Axes, place: int) -> ShardList:
    """The list of the member at a position."""
    at = coordinates(axes, place)
    return list_of(layers, axes, at.tp, at.pp)


def _shards(kind: str, layers: int, axes: Axes, tp: int, pp: int) -> Iterator[Shard]:
    def shard(name: str, shape: tuple[int, ...], split: int | None) -> Shard:
        offset, size = [0] * len(shape), [*shape]
        if split is not None:
            size[split] //= axes.tp
            offset[split] = size[split] * tp
        return Shard(
            f"{kind}.{name}",
            f"{KINDS[kind]} {'x'.join(map(str, shape))}",
            Region(tuple(offset), tuple(size)),
        )

    if pp == 0:
        yield shard("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), 0)
    each = layers // axes.pp
    for layer in range(pp * each, (pp + 1) * each):
        for name, shape, split in LAYER:
            yield shard(f"decoder.layers.{layer}.{name}", shape, split)
    if pp == axes.pp - 1:
        yield shard("decoder.final_layernorm.weight", (HIDDEN,), None)
        yield shard("output_layer.weight", (VOCABULARY, HIDDEN), 0)
