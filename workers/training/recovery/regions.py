"""Tensors of the state by their regions in the whole model. Needs no Megatron."""

import torch
from torch import Tensor

from .resharding import Dims, Region, Shard

State = dict[Shard, Tensor]
"""Shards, and the live memory of each."""


def torch_dtype(kind: str) -> torch.dtype:
    """The dtype that a kind begins with."""
    found: torch.dtype = getattr(torch, kind.partition(" ")[0])
    return found


def kind_of(tensor: Tensor, shape: Dims) -> str:
    """The kind of a tensor with this shape and the dtype of `tensor`: `float32 6x64`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"


def shape_of(kind: str) -> Dims:
    """The shape of the whole tensor, from a shard's kind (`float32 6x64`)."""
    return tuple(int(size) for size in kind.partition(" ")[2].split("x") if size)


def cut(tensor: Tensor, held: Region, region: Region) -> Tensor:
    """A view of the part `region` of `tensor`; the whole of `tensor` is the region `held`."""
    if region == held:
        return tensor
    for dim, (begin, size) in enumerate(zip(*region, strict=True)):
        tensor = tensor.narrow(dim, begin - held.offset[dim], size)
    return tensor
