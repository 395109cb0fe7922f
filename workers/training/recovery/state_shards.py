"""Lists the state as shards: each live tensor, and the region of the whole model that it holds.

The regions come from Megatron's sharded metadata for checkpoints. The master copy and the moments
of a parameter have the region of the parameter. If Megatron's distributed optimizer holds only a
flat range of the parameter, they have the regions that make up this range. Names are those of the
whole model: `model.X`, `master.X`, `optimizer.exp_avg.X`, `buffer.X`; and with exact sums
`exponent.X`, one number for each parameter, equal on all its holders.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from math import prod
from operator import add
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.dist_checkpointing import mapping
from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import Tensor
from torch.nn import Parameter

from ..model.optimizers import parts, ranges, shards
from ..model.random_draws import EXPERT, LAYER, global_name
from ..model.trainee import Size, TrainingModel, state_bytes_beside
from ..model.training_state import MOMENTS
from .regions import State, cut, kind_of, torch_dtype
from .resharding import Dims, Region, Shard, flat_range, intersection

EXPONENT = "exponent"
Stacking = Mapping[str, bool]
"""Megatron's metadata of a sharded state: how it names the layers."""
UNSTACKED: Stacking = {"non_homogeneous_layers": True}
STACKED: Stacking = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""As in Megatron-LM's own checkpoints."""


class _Mapped(NamedTuple):
    """The region `inner` of a local tensor; adding `shift` gives the region in the tensor `key`."""

    key: str
    shape: Dims
    """The shape of the whole tensor."""
    inner: Region
    shift: Dims


class _Local(NamedTuple):
    """A local tensor: its shape, with as many dims as the whole tensor, and its mapped regions.
    `is_padded`: the whole tensor has padding, which depends on the layout."""

    shape: Dims
    mapped: list[_Mapped]
    is_padded: bool


class StackedName(NamedTuple):
    """Where a tensor is in Megatron's own checkpoints. They stack the layers of a model: `shape` is
    that of the tensor `key`, `offset` the first dims of the tensor's place in it."""

    key: str
    shape: Dims
    offset: Dims
    is_padded: bool


def list_shards(trainee: TrainingModel) -> State:
    """All shards of the state. Call it once per model, while the generation's groups exist."""
    found: State = {}
    locals_: dict[int, _Local] = {}
    for module in trainee.modules:
        for tensor, local in _sharded(module, UNSTACKED):
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
    if trainee.exact is not None:
        one = Region((0,), (1,))
        for index, param in enumerate(trainee.exact.params):
            key = f"{EXPONENT}.{locals_[id(param)].mapped[0].key}"
            exponent = trainee.exact.exponents[index : index + 1]
            found[Shard(key, kind_of(exponent, one.shape), one)] = exponent
    return found


def stacked_names(trainee: TrainingModel) -> dict[str, StackedName]:
    """By name: where each parameter and buffer is in Megatron's own checkpoints. Needs groups."""
    found: dict[str, StackedName] = {}
    for module in trainee.modules:
        unstacked = {id(tensor): local for tensor, local in _sharded(module, UNSTACKED)}
        for tensor, stacked in _sharded(module, STACKED):
            plain, part = unstacked[id(tensor)].mapped[0], stacked.mapped[0]
            num = len(part.shape) - len(plain.shape)
            assert part.shift[num:] == plain.shift, f"{part.key} has another place"
            found[plain.key] = StackedName(
                part.key, part.shape, part.shift[:num], stacked.is_padded
            )
    return found


def objects(trainee: TrainingModel) -> dict[str, Any]:
    """By key: what Megatron's checkpoints have of this stage beside tensors. Needs groups."""
    return {
        sharded.unique_key: sharded.data
        for module in trainee.modules
        for sharded in nested_values(module.sharded_state_dict(metadata=_metadata(STACKED)))
        if isinstance(sharded, mapping.ShardedObject)
    }


def flat_parameters(
    trainee: TrainingModel,
) -> Iterator[tuple[list[tuple[str, int]], Callable[[str, str, Tensor], State]]]:
    """For each of Megatron's gradient buffers: its parameters in their order, each with its name
    and its number of elements; and a function that lists the shards of (kind, name, values) for the
    values of a whole local parameter. Needs groups."""
    locals_ = {
        id(tensor): local
        for module in trainee.modules
        for tensor, local in _sharded(module, UNSTACKED)
    }
    for params in trainee.flat_parameters():
        named = {locals_[id(param)].mapped[0].key: param for param in params}

        def listed(kind: str, name: str, flat: Tensor, named: dict[str, Any] = named) -> State:
            listed_shards: State = {}
            _add(listed_shards, kind, flat, 0, locals_[id(named[name])])
            return listed_shards

        yield [(name, param.numel()) for name, param in named.items()], listed


def stepped(trainee: TrainingModel) -> State:
    """The shards that are valid after the optimizer step, before the parameters are gathered."""
    found: State = {}
    params: dict[str, list[Shard]] = {}
    for shard, tensor in trainee.shards.items():
        kind, _, key = shard.key.partition(".")
        if kind == "model":
            params.setdefault(key, []).append(shard)
        else:
            found[shard] = tensor
    moment = f"optimizer.{MOMENTS[0]}."
    for own in [shard for shard in found if shard.key.startswith(moment)]:
        for param in params[own.key.removeprefix(moment)]:
            if (region := intersection(param.region, own.region)) is not None:
                whole = trainee.shards[param]
                found[param._replace(region=region)] = cut(whole, param.region, region)
    return found


def fill(into: State, parts: Iterable[State]) -> None:
    """Copy the shards of `into` from a replica's parts. Raises ValueError if these lack some."""
    missing = {shard: shard.region.num_elements for shard in into}
    copied: set[tuple[Shard, Region]] = set()  # several parts hold a tensor that is not split
    for part in parts:
        by_key: dict[tuple[str, str], list[Shard]] = {}
        for shard in part:
            by_key.setdefault((shard.key, shard.kind), []).append(shard)
        for shard in missing:
            for source in by_key.get((shard.key, shard.kind), ()):
                region = intersection(shard.region, source.region)
                if region is None or (shard, region) in copied:
                    continue
                cut(into[shard], shard.region, region).copy_(
                    cut(part[source], source.region, region)
                )
                copied.add((shard, region))
                missing[shard] -= region.num_elements
        missing = {shard: num for shard, num in missing.items() if num}
        if not missing:
            return
    if missing:
        raise ValueError(f"no part of the model has {next(iter(missing))}")


def whole_size(shards: State, num_layers: int) -> Size:
    """The size of the whole model, from the shards of a part. If the part lacks some of the layers,
    they count like those that it has. Each parameter has Adam's moments on some member. A parameter
    of 16 bits also has a master copy."""
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    layers: set[str] = set()
    for key, kind in {(shard.key, shard.kind) for shard in shards}:
        what, _, name = key.partition(".")
        dtype, _, shape = kind.partition(" ")
        num = prod(map(int, shape.split("x") if shape else ()))
        item_bytes = torch_dtype(dtype).itemsize
        layer = LAYER.fullmatch(name)
        if layer is not None:
            layers.add(layer[2])
        counts = found[layer is not None]
        if what == "model":
            counts["params"] += num
            counts["bytes"] += num * (item_bytes + state_bytes_beside(item_bytes))
        elif what == "buffer":
            counts["bytes"] += num * item_bytes
    times = num_layers / max(1, len(layers))
    return Size(
        *(found[False][name] + round(found[True][name] * times) for name in ("params", "bytes"))
    )


def _metadata(stacking: Stacking) -> dict[str, Any]:
    # Any existing group will do: Megatron uses it only to choose the writer among several holders.
    return {**stacking, "dp_cp_group": dist.group.WORLD}


def _sharded(module: Any, stacking: Stacking) -> Iterator[tuple[Tensor, _Local]]:
    """Each tensor of a model chunk, with its mapping to the whole model."""
    for name, sharded in module.sharded_state_dict(metadata=_metadata(stacking)).items():
        match sharded:
            case mapping.ShardedTensor():
                made = [sharded]
            case mapping.ShardedTensorFactory():
                made = list(nested_values(sharded.build()))
            case mapping.ShardedObject(data=data) if _is_empty(data):
                continue
            case _:
                raise ValueError(f"state that is not a tensor is not supported: {sharded}")
        tensor: Any = sharded.data
        # Megatron stacks the experts of a layer into one tensor. In the exchange of state each is a
        # tensor of its own.
        num_stacked = 1 if EXPERT in name and stacking is not STACKED else 0
        ahead = (1,) * (made[0].prepend_axis_num - num_stacked)
        # Use Megatron's key only if Megatron stacks all layers into one tensor. Otherwise its key
        # may be the name from another layer specification, so use the global name.
        key = made[0].key if ahead or stacking is STACKED else global_name(module, name)
        yield (
            tensor,
            _Local(
                (*ahead, *tensor.shape),
                [_map(key, part, tensor, num_stacked) for part in made],
                any(part.allow_shape_mismatch for part in made),
            ),
        )


def _is_empty(extra_state: Any) -> bool:
    """Whether the `_extra_state` of a module has nothing in it: Transformer Engine without FP8 has
    an empty tensor, older versions of it an empty BytesIO or None."""
    match extra_state:
        case Tensor():
            return not extra_state.numel()
        case BytesIO():
            return not extra_state.getbuffer().nbytes
        case _:
            return extra_state is None


def _map(key: str, part: mapping.ShardedTensor, tensor: Tensor, num_left_out: int) -> _Mapped:
    """Map `part` (`tensor` or a view of it). Dims that only the whole tensor has get size 1; the
    first `num_left_out` of them are left out."""
    view = part.data
    assert view is not None
    assert tensor.is_contiguous()
    assert view.stride() == tensor.stride()
    begin = int(view.storage_offset()) - int(tensor.storage_offset())
    num_ahead = part.prepend_axis_num - num_left_out
    offset = [0] * num_ahead
    for step in tensor.stride():
        index, begin = divmod(begin, step)
        offset.append(index)
    return _Mapped(
        key,
        tuple(part.global_shape[num_left_out:]),
        Region(tuple(offset), ((1,) * num_ahead + tuple(view.shape))),
        tuple(a - b for a, b in zip(part.global_offset[num_left_out:], offset, strict=True)),
    )


def _add(found: State, kind: str, tensor: Tensor, begin: int, local: _Local) -> None:
    """Add the shards of `tensor`, which holds the elements of a local tensor from index `begin` on,
    or the optimizer state of these elements."""
    flat = tensor.view(-1)
    for held in flat_range(local.shape, begin, begin + flat.numel()):
        block, flat = flat[: held.num_elements].view(held.shape), flat[held.num_elements :]
        for key, shape, inner, shift in local.mapped:
            part = intersection(held, inner)
            if part is None:
                continue
            shard = Shard(
                f"{kind}.{key}",
                kind_of(tensor, shape),
                Region(tuple(map(add, part.offset, shift)), part.shape),
            )
            assert shard not in found, f"{shard} twice in one model"
            found[shard] = cut(block, held, part)


def _optimized(
    trainee: TrainingModel, optimizer: Any
) -> Iterator[tuple[Any, int, Tensor, dict[str, Tensor]]]:
    """Each parameter, the first element that the optimizer updates, its own tensor, the moments."""
    states = {id(main): found for part in parts(optimizer) for main, found in part.state.items()}
    owned, own = shards(optimizer), ranges(optimizer)
    for _, param in trainee.named_parameters():
        main = owned.get(id(param)) if trainee.is_sharded else getattr(param, "main_param", param)
        if main is not None:
            begin = own[id(param)].start if trainee.is_sharded else 0
            yield param, begin, main, states[id(main)]
