"""The share of the state that a member saves: each element of the state is in one member's share.

Pure: it depends only on the layout, the member's place in it, and the places that save. So members
need not communicate, and checkpoints on disk and in memory have the same shares.
"""

from collections.abc import Collection, Iterator, Sequence
from math import prod

from torch import Tensor

from ....events.spec.parallelism import Coordinates, num_positions, position_of
from ..model import training_state
from ..model.optimizers import parts
from ..model.trainee import TrainingModel
from ..model.training_state import MOMENTS
from ..recovery.regions import State, cut, kind_of, shape_of
from ..recovery.resharding import Region, Shard, intersection
from ..recovery.state_shards import EXPONENT

_FIRST_MOMENT = f"optimizer.{MOMENTS[0]}"
_KINDS = ("model", "buffer", EXPONENT, "master", *(f"optimizer.{moment}" for moment in MOMENTS))


def own_share(trainee: TrainingModel, saving: Collection[int] | None = None) -> State:
    """The shards that this member saves, as views of its live memory. `saving`: the positions of
    the members that save; None: all. Each element of the state is in exactly one of their shares.

    Shards that several of them hold are dealt evenly by bytes, large ones by rows. If the optimizer
    is sharded, the owners of its moments, who have its value before the gather, save a parameter.
    """
    axes, at = trainee.axes, trainee.at
    alive = set(range(num_positions(axes)) if saving is None else saving)
    if trainee.place not in alive:
        return {}
    groups: dict[tuple[int, ...], State] = {}
    replicated = _replicated(trainee.shards) if axes.tp > 1 else set()
    for shard, tensor, replicas in _held(trainee):
        is_everywhere = shard.key.startswith(f"{EXPONENT}.") or name_of(shard.key) in replicated
        splits = range(axes.tp) if is_everywhere else (at.tp,)
        places = {
            position_of(axes, Coordinates(tp=tp, pp=at.pp, dp=dp))
            for tp in splits
            for dp in replicas
        }
        groups.setdefault(tuple(sorted(places & alive)), {})[shard] = tensor
    share: State = {}
    for holders, held in groups.items():
        share.update(_dealt(held, holders.index(trainee.place), len(holders)))
    return share


def whole_share(trainee: TrainingModel) -> State:
    """The state of a whole replica as one shard for each tensor; needs no `with_shards`."""
    assert trainee.is_plain, "it has only a part of the state"
    return {
        Shard(
            key,
            kind_of(tensor, tuple(tensor.shape)),
            Region((0,) * tensor.dim(), tuple(tensor.shape)),
        ): tensor
        for key, tensor in training_state.tensors(trainee).items()
    }


def name_of(key: str) -> str:
    """The parameter or buffer of a key."""
    return next(key.removeprefix(f"{kind}.") for kind in _KINDS if key.startswith(f"{kind}."))


def rows(tensor: Tensor, region: Region, first: int, last: int) -> tuple[Region, Tensor]:
    """The rows `first` to `last` of a shard: its region and memory. A scalar has one row."""
    if not region.shape:
        return region, tensor
    part = Region((region.offset[0] + first, *region.offset[1:]), (last - first, *region.shape[1:]))
    return part, cut(tensor, region, part)


def num_rows(region: Region) -> int:
    """A scalar has one."""
    return region.shape[0] if region.shape else 1


def _replicated(shards: State) -> set[str]:
    """Names of parameters and buffers that every tensor-parallel rank holds whole."""
    num: dict[tuple[str, str], int] = {}
    for key, kind, region in shards:
        if key.startswith(("model.", "buffer.")):
            num[key, kind] = num.get((key, kind), 0) + region.num_elements
    return {name_of(key) for (key, kind), held in num.items() if held == prod(shape_of(kind))}


def _held(trainee: TrainingModel) -> Iterator[tuple[Shard, Tensor, Sequence[int]]]:
    """The shards of this member, each with the data-parallel ranks that hold it; without the last
    stage's copy of the tied embedding, which the first stage saves."""
    named = dict(trainee.named_parameters())
    shards = {
        shard: tensor
        for shard, tensor in trainee.shards.items()
        if not getattr(named.get(name_of(shard.key)), "shared", False)
    }
    everywhere = range(trainee.axes.dp)
    if not trainee.is_sharded:
        yield from ((shard, tensor, everywhere) for shard, tensor in shards.items())
        return
    own = {
        tensor.untyped_storage().data_ptr()
        for part in parts(trainee.optimizer)
        for main, state in part.state.items()
        for tensor in (main, *(state[moment] for moment in MOMENTS))
    }
    params: dict[str, list[Shard]] = {}
    for shard, tensor in shards.items():
        name = name_of(shard.key)
        if shard.key.startswith("model.") and named[name].requires_grad:
            params.setdefault(name, []).append(shard)
        elif shard.key.startswith(("model.", "buffer.", f"{EXPONENT}.")):
            yield shard, tensor, everywhere
    for shard, tensor in shards.items():
        if not shard.key.startswith(("master.", "optimizer.")):
            continue
        is_mirror = tensor.untyped_storage().data_ptr() not in own
        dp, num = trainee.at.dp - is_mirror, trainee.axes.dp
        owners = (dp % num,) if trainee.mirror is None else (dp % num, (dp + 1) % num)
        yield shard, tensor, owners
        if shard.key.startswith(f"{_FIRST_MOMENT}."):
            for param in params[name_of(shard.key)]:
                if (region := intersection(param.region, shard.region)) is not None:
                    yield (
                        param._replace(region=region),
                        cut(shards[param], param.region, region),
                        owners,
                    )


def _dealt(held: State, index: int, num: int) -> State:
    """The part of `held` for holder `index` of `num`: consecutive rows, about 1/num of the bytes.
    All holders have the same shards."""
    share: State = {}
    begin, total = 0, sum(tensor.nbytes for tensor in held.values())
    for shard, tensor in sorted(held.items(), key=lambda item: item[0]):
        if not tensor.nbytes:
            continue
        num_all = num_rows(shard.region)
        first, last = (
            min(max((total * part // num - begin) * num_all // tensor.nbytes, 0), num_all)
            for part in (index, index + 1)
        )
        if first < last:
            region, view = rows(tensor, shard.region, first, last)
            share[shard._replace(region=region)] = view
        begin += tensor.nbytes
    return share
