"""The state of one process as plain data and tensors, encoded without pickle.

Tensors become shards of one dimension, for the share of an in-memory checkpoint; the rest becomes
msgpack. A class is never named in it: what cannot be encoded is refused.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ....events.decoding import from_msgpack
from ..recovery import resharding
from ..recovery.regions import State, kind_of, torch_dtype
from ..recovery.resharding import Region

_SCALARS = (bool, int, float, str, bytes, type(None))
_INT_BITS_MAX = 63
"""msgpack has integers of 64 bits."""


class NotEncodable(ValueError):
    """A value of the state cannot be encoded; `str()` names its place and its type."""


def encode(tree: object) -> tuple[State, bytes]:
    """The tensors of a tree as shards in live memory (copied if not contiguous), and the rest of it
    as msgpack. Raises NotEncodable."""
    encoder = _Encoder()
    plain = encoder.plain(tree, "state")
    return encoder.shards, msgspec.msgpack.encode(plain)


def decode(data: bytes, tensors: Mapping[str, Tensor], meshes: Sequence[Any] = ()) -> Any:
    """The tree that `encode` was given. `tensors`: by shard key. `meshes`: those of the distributed
    tensors in it. Raises ValueError."""
    try:
        return _Decoder(tensors, meshes).value(from_msgpack(data))
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise ValueError(f"state of a process that cannot be decoded: {error}") from None


def meshes_of(tree: object) -> list[Any]:
    """The device meshes of the distributed tensors in a tree."""
    found: list[Any] = []
    for tensor in _tensors(tree):
        if isinstance(tensor, DTensor) and tensor.device_mesh not in found:
            found.append(tensor.device_mesh)
    return found


def generators() -> dict[str, Any]:
    """The state of the random generators of torch, Python and numpy."""
    cuda: Any = torch.cuda
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cuda": cuda.get_rng_state() if cuda.is_available() else None,
    }


def set_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    if states["cuda"] is not None:
        cuda: Any = torch.cuda
        cuda.set_rng_state(states["cuda"])


class _Encoder:
    def __init__(self) -> None:
        self.shards: State = {}
        self._keys: dict[tuple[int, int, torch.dtype], str] = {}
        """By address, size and dtype: a tensor that is twice in the tree is stored once."""

    def plain(self, value: Any, at: str) -> Any:
        if type(value) in _SCALARS and not (
            type(value) is int and value.bit_length() > _INT_BITS_MAX
        ):
            return value
        match value:
            case DTensor():
                return [
                    "dtensor",
                    self.plain(value.to_local(), at),
                    list(value.shape),
                    list(value.stride()),
                    *_mesh_name(value.device_mesh),
                    [self._placement(one, at) for one in value.placements],
                ]
            case Tensor():
                return self._tensor(value, at)
            case torch.Size():
                return ["size", *value]
            case tuple() | list() | set():
                kind = (
                    "tuple"
                    if isinstance(value, tuple)
                    else "list"
                    if isinstance(value, list)
                    else "set"
                )
                return [
                    kind,
                    *(self.plain(one, f"{at}[{index}]") for index, one in enumerate(value)),
                ]
            case Mapping():
                return [
                    "dict",
                    *(
                        [self.plain(key, at), self.plain(one, f"{at}.{key}")]
                        for key, one in value.items()
                    ),
                ]
            case torch.dtype():
                return ["dtype", str(value).removeprefix("torch.")]
            case numpy.ndarray() if value.dtype.hasobject is False:
                return ["array", value.dtype.str, list(value.shape), value.tobytes()]
            case numpy.generic():
                return ["array", value.dtype.str, [], value.tobytes()]
            case BytesIO():
                return ["file", value.getvalue()]
            case int():  # also an enumeration, and more than 64 bits
                return ["int", str(int(value))]
            case _:
                of = type(value)
                raise NotEncodable(f"{at} is a {of.__module__}.{of.__qualname__}")

    def _tensor(self, tensor: Tensor, at: str) -> list[Any]:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise NotEncodable(f"{at} is a tensor of type {type(tensor).__name__}, {tensor.layout}")
        flat = tensor.detach().contiguous().view(-1)
        where = (flat.data_ptr(), flat.numel(), flat.dtype)
        key = self._keys.get(where) or str(len(self._keys))
        if flat.numel() and where not in self._keys:
            self._keys[where] = key
            num = (flat.numel(),)
            self.shards[resharding.Shard(key, kind_of(flat, num), Region((0,), num))] = flat
        return [
            "tensor",
            key if flat.numel() else "",
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.device.type,
        ]

    def _placement(self, placement: Any, at: str) -> int:
        """The dimension that is sharded; -1: replicated."""
        if type(placement) is Shard:
            return placement.dim
        if type(placement) is Replicate:
            return -1
        raise NotEncodable(f"{at} is placed as {placement}")


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], meshes: Sequence[Any]) -> None:
        self._tensors, self._meshes = tensors, {_mesh_name(mesh): mesh for mesh in meshes}
        self._kinds: dict[str, Callable[..., Any]] = {
            "tuple": lambda *items: tuple(map(self.value, items)),
            "list": lambda *items: list(map(self.value, items)),
            "set": lambda *items: set(map(self.value, items)),
            "size": lambda *sizes: torch.Size(sizes),
            "dict": lambda *items: {self.value(key): self.value(one) for key, one in items},
            "dtype": torch_dtype,
            "file": BytesIO,
            "int": int,
            "array": _array,
            "tensor": self._tensor,
            "dtensor": self._dtensor,
        }

    def value(self, plain: Any) -> Any:
        return self._kinds[plain[0]](*plain[1:]) if isinstance(plain, list) else plain

    def _tensor(self, key: str, dtype: str, shape: list[int], device: str) -> Tensor:
        if not key:
            return torch.empty(shape, dtype=torch_dtype(dtype), device=device)
        return self._tensors[key].view(shape).to(device)

    def _dtensor(
        self,
        local: Any,
        shape: list[int],
        stride: list[int],
        name: Any,
        sizes: list[int],
        ranks: list[int],
        placements: list[int],
    ) -> Tensor:
        mesh = self._meshes[tuple(name), tuple(sizes), tuple(ranks)]
        return DTensor.from_local(
            self.value(local),
            mesh,
            [Replicate() if dim < 0 else Shard(dim) for dim in placements],
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _mesh_name(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """What identifies a device mesh in another process of the same place."""
    return (
        tuple(mesh.mesh_dim_names or ()),
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
    )


def _tensors(tree: object) -> Iterator[Tensor]:
    match tree:
        case Tensor():
            yield tree
        case Mapping():
            for value in tree.values():
                yield from _tensors(value)
        case tuple() | list():
            for value in tree:
                yield from _tensors(value)
        case _:
            pass
