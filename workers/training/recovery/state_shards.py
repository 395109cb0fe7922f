"""The state as pieces: every tensor of it, live, by which box of which whole tensor it is.

The boxes are Megatron's own sharded metadata, which it writes its checkpoints by. A parameter's
master and moments have its box, or boxes where Megatron's distributed optimizer has a flat range of
it. Names are those of a whole model: `model.X`, `master.X`, `optimizer.exp_avg.X`, `buffer.X`.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import add
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor
from torch.nn import Parameter

from ..model.optimizers import parts, ranges, shards
from ..model.random_draws import global_name
from ..model.trainee import Trainee
from ..model.training_state import MOMENTS
from .resharding import Box, Dims, Piece, flat_range, intersection

State = dict[Piece, Tensor]
"""Pieces, and the live memory of each."""


class _Region(NamedTuple):
    """A block of a local tensor: that of the whole tensor `key` which is further by `shift`."""

    key: str
    shape: Dims
    """Of the whole tensor."""
    inner: Box
    shift: Dims


class _Local(NamedTuple):
    """A local tensor: its shape, with as many dims as the whole one has, and what it is made of."""

    shape: Dims
    regions: list[_Region]


def of(trainee: Trainee) -> State:
    """Every piece of the state, in an order of its own. Once per trainee, while groups are up."""
    found: State = {}
    locals_: dict[int, _Local] = {}
    for module in trainee.modules:
        for tensor, local in _sharded(module):
            locals_[id(tensor)] = local
            kind = "model" if isinstance(tensor, Parameter) else "buffer"
            _add(found, kind, tensor.data, 0, local)
    for optimizer in trainee.optimizers:
        for param, begin, main, moments in _optimized(trainee, optimizer):
            local = locals_[id(param)]
            if main.dtype != param.dtype:
                _add(found, "master", main.data, begin, local)
            for moment in MOMENTS:
                _add(found, f"optimizer.{moment}", moments[moment], begin, local)
    return found


def stepped(trainee: Trainee) -> State:
    """Of a trainee that is not gathered: what it has of the state after its step."""
    found: State = {}
    params: dict[str, list[Piece]] = {}
    for piece, tensor in trainee.pieces.items():
        kind, _, key = piece.key.partition(".")
        if kind == "model":
            params.setdefault(key, []).append(piece)
        else:
            found[piece] = tensor
    moment = f"optimizer.{MOMENTS[0]}."
    for own in [piece for piece in found if piece.key.startswith(moment)]:
        for param in params[own.key.removeprefix(moment)]:
            if (box := intersection(param.box, own.box)) is not None:
                found[param._replace(box=box)] = cut(trainee.pieces[param], param.box, box)
    return found


def fill(into: State, whole: State) -> None:
    """Copy pieces out of a whole state. Raises ValueError where that has not all of them."""
    by_key: dict[tuple[str, str], list[Piece]] = {}
    for piece in whole:
        by_key.setdefault((piece.key, piece.kind), []).append(piece)
    for piece, tensor in into.items():
        num_missing = piece.box.num_elements
        for source in by_key.get((piece.key, piece.kind), ()):
            if (box := intersection(piece.box, source.box)) is not None:
                cut(tensor, piece.box, box).copy_(cut(whole[source], source.box, box))
                num_missing -= box.num_elements
        if num_missing:
            raise ValueError(f"the whole model lacks {piece}")


def kind_of(tensor: Tensor, shape: Dims) -> str:
    """What a tensor of this shape, of the type of `tensor`, is: `float32 6x64`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"


def _sharded(module: Any) -> Iterator[tuple[Tensor, _Local]]:
    """Each tensor that a chunk of the model keeps, and what it is of the whole."""
    # Layers by their number in the whole model; every group that is up will do, since it is used
    # for nothing but to say who of several holders writes.
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": dist.group.WORLD}
    for name, sharded in module.sharded_state_dict(metadata=metadata).items():
        match sharded:
            case ShardedTensor():
                made = [sharded]
            case ShardedTensorFactory():
                made = list(nested_values(sharded.build()))
            case ShardedObject(data=None):
                continue
            case _:
                raise ValueError(f"state that is no tensor is not carried: {sharded}")
        tensor: Any = sharded.data
        ahead = (1,) * made[0].prepend_axis_num
        # Megatron's own key may be that of another layer specification; but where it makes one
        # tensor of all layers, that is its name.
        key = made[0].key if ahead else global_name(module, name)
        yield tensor, _Local((*ahead, *tensor.shape),
                             [_region(key, part, tensor) for part in made])


def _region(key: str, part: ShardedTensor, tensor: Tensor) -> _Region:
    """`part` is a view of `tensor`, or `tensor` itself; a dim that is only the whole one's is 1."""
    view = part.data
    assert view is not None
    assert tensor.is_contiguous()
    assert view.stride() == tensor.stride()
    begin = int(view.storage_offset()) - int(tensor.storage_offset())
    offset = [0] * part.prepend_axis_num
    for step in tensor.stride():
        index, begin = divmod(begin, step)
        offset.append(index)
    ahead = (1,) * part.prepend_axis_num
    return _Region(key, tuple(part.global_shape),
                   Box(tuple(offset), (*ahead, *view.shape)),
                   tuple(a - b for a, b in zip(part.global_offset, offset, strict=True)))


def _add(found: State, kind: str, tensor: Tensor, begin: int, local: _Local) -> None:
    """Add `tensor`, which is the elements from `begin` on of a local tensor, or another's of it."""
    flat = tensor.view(-1)
    for held in flat_range(local.shape, begin, begin + flat.numel()):
        block, flat = flat[:held.num_elements].view(held.shape), flat[held.num_elements:]
        for key, shape, inner, shift in local.regions:
            part = intersection(held, inner)
            if part is None:
                continue
            piece = Piece(f"{kind}.{key}", kind_of(tensor, shape),
                          Box(tuple(map(add, part.offset, shift)), part.shape))
            assert piece not in found, f"{piece} twice in one place"
            found[piece] = cut(block, held, part)


def cut(tensor: Tensor, held: Box, box: Box) -> Tensor:
    """`box` of a tensor that is `held`, as a view."""
    if box == held:
        return tensor
    for dim, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, begin - held.offset[dim], size)
    return tensor


def _optimized(trainee: Trainee, optimizer: Any
               ) -> Iterator[tuple[Any, int, Tensor, dict[str, Tensor]]]:
    """Each parameter that is stepped here, from which of its elements on, as what tensor of the
    optimizer, and with what moments."""
    states = {id(main): found for part in parts(optimizer)
              for main, found in part.state.items()}
    owned, own = shards(optimizer), ranges(optimizer)
    for _, param in trainee.named_parameters():
        main = (owned.get(id(param)) if trainee.is_sharded else
                getattr(param, "main_param", param))
        if main is not None:
            begin = own[id(param)].start if trainee.is_sharded else 0
            yield param, begin, main, states[id(main)]
