"""The private parts of torch: all that Unicron reaches beside its public interface.

Every part is in all the versions of known_versions.py, if its function does not say otherwise.
"""

# pyright: reportPrivateUsage=false
import datetime
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch.distributed import distributed_c10d

from .parts import reaches

_C10D = "torch.distributed.distributed_c10d"
_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_FAKE = "torch.testing._internal.distributed.fake_pg"
_COMPILER = "torch._dynamo"
_RECORDER = "torch._C._distributed_c10d"


# --- The process groups that torch knows: in one object, which its own tests replace, too ---
SEPARATE_NUM_MIN = 1_000_000
"""Groups are named by a count. Two groups of a process must not have the same name."""


@dataclass
class _World:
    """The attributes of torch's `_World`."""

    group_count: int
    pg_names: dict[Any, Any]
    default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)
    pg_config_info: list[Any] = field(default_factory=list)


@reaches(
    _C10D,
    "_world",
    "_unregister_process_group",
    *(f"_World.{name}" for name in _World.__dataclass_fields__),
)
@contextmanager
def separate_groups() -> Generator[None]:
    """Within this context no process group exists at first, and new ones do not touch the live
    ones. At the end they are no longer usable."""
    live: Any = distributed_c10d._world
    # The number of names is part of the name of a group whose members alone create it.
    world: Any = _World(live.group_count + SEPARATE_NUM_MIN, dict(live.pg_names))
    distributed_c10d._world = world
    try:
        yield
    finally:
        distributed_c10d._world = live
        for group, name in world.pg_names.items():
            if group not in live.pg_names:
                distributed_c10d._unregister_process_group(name)


@reaches(_C10D, "_update_default_pg", "_unregister_all_process_groups")
def take_groups() -> list[Any]:
    """Take all groups out of torch, the newest first, as its `_abort_process_group` does."""
    world: Any = distributed_c10d._world
    groups = sorted(world.pg_names, key=world.pg_names.__getitem__, reverse=True)
    distributed_c10d._update_default_pg(None)
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    distributed_c10d._unregister_all_process_groups()
    restart_group_names()
    return groups


def restart_group_names() -> None:
    """Name the next group as the first of a process."""
    distributed_c10d._world.group_count = 0


@reaches(_C10D, "_set_pg_timeout")
def set_timeout(seconds: float, group: Any = None) -> None:
    """Set the timeout of the collectives of `group`, or of the world."""
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


@reaches(_C10D, "_get_default_store")
def world_store() -> Any:
    """The store with which torch's world was built."""
    return distributed_c10d._get_default_store()


@reaches(_FAKE, "FakeStore")
def fake_store() -> Any:
    """A store for the backend `fake`, whose groups have ranks, but no connections."""
    return import_module(_FAKE).FakeStore()


@reaches(_C10D, "_CoalescingManager.works")
def works_of(launched: Any) -> list[Any]:
    """The works of collectives that were launched together, by torch's `_coalescing_manager`."""
    works: list[Any] = launched.works
    return works


# --- The addresses of gloo ---
_STORAGE_BYTES = 128
"""Of a sockaddr_storage, with which an address begins."""


def gloo_address(key: str, value: bytes) -> tuple[str, int] | None:
    """The IP address and port on which a member of a gloo group listens, if a store has them in
    `value`; None: it is something else. Only gloo's own code has the format: under the number of
    the member the name of its host, its address, and 8 bytes for each pair. Source:
    gloo/transport/tcp/context.cc, Rank::bytes."""
    if not key.rpartition("/")[2].isdecimal():
        return None
    name_size = int.from_bytes(value[:8], sys.byteorder)
    begin = 16 + name_size
    size = int.from_bytes(value[begin - 8 : begin], sys.byteorder)
    if size < _STORAGE_BYTES or len(value) < begin + size or (len(value) - begin - size) % 8:
        return None
    address = value[begin : begin + size]
    family = int.from_bytes(address[:2], sys.byteorder)
    port = int.from_bytes(address[2:4])
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, address[8:24]), port
    return None


# --- The errors of NCCL ---


@reaches(_RECORDER, "ProcessGroup._get_backend")
def error_of_group(group: Any, device: Any) -> str:
    """The error that torch has found in this group (`Backend.get_error`, which is public); "":
    none, or its backend has none."""
    try:
        error: str = group._get_backend(device).get_error().name
    except (AttributeError, RuntimeError):
        return ""
    return "" if error == "SUCCESS" else f"torch: {error}"


@reaches(_RECORDER, "ProcessGroup._get_backend")
def communicator_of_group(group: Any, device: Any) -> int:
    """The address of NCCL's communicator on the current device; 0: there is none yet, it was
    aborted, or this torch does not tell it. The part is `ProcessGroupNCCL._comm_ptr`, which only
    builds with NCCL have."""
    try:
        return int(group._get_backend(device)._comm_ptr())
    except (AttributeError, RuntimeError):
        return 0


# --- The collectives of a group ---
COLLECTIVES: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
"""Methods of a ProcessGroup, as far as this torch has them."""
reaches(_RECORDER, *(f"ProcessGroup.{name}" for name in COLLECTIVES if name.startswith("_")))


# --- The flight recorder ---


@reaches(_RECORDER, "_dump_fr_trace_json or _dump_nccl_trace_json")
def recorded_collectives(*, only_active: bool) -> bytes:
    """The flight recorder as JSON: NCCL's collectives if torch has and used NCCL, else gloo's."""
    c10d = import_module(_RECORDER)
    data = b""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        data = dump(includeCollectives=True, onlyActive=only_active) if dump is not None else b""
        if b'"record_id"' in data:
            break
    return data or b"{}"


# --- The compiler ---


@reaches(_COMPILER, "OptimizedModule")
@reaches("torch.nn", "Module._compiled_call_impl")
def is_compiled(module: Any) -> bool:
    """Whether this module was compiled by torch.compile, or in place by its method `compile`."""
    return (
        isinstance(module, import_module(_COMPILER).OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
    )


@reaches(
    "torch._dynamo.callback",
    "callback_handler",
    "CompilationCallbackHandler.register_start_callback",
    "CompilationCallbackHandler.register_end_callback",
)
def on_compiling(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Call these when torch.compile begins and has ended to compile, forward or backward, in the
    thread that does it. `torch._dynamo.reset` forgets them."""
    handler = import_module("torch._dynamo.callback").callback_handler

    def calls(wanted: Callable[[], None]) -> Callable[[object], None]:
        return lambda args: wanted()

    handler.register_start_callback(calls(begins))
    handler.register_end_callback(calls(ends))


# --- The data loader ---


@reaches("torch._utils", "ExceptionWrapper.reraise")
def kept_exception(where: str) -> Any:
    """The exception that is being handled, in a form that another process can `reraise()`."""
    return import_module("torch._utils").ExceptionWrapper(where=where)


@reaches("torch.utils.data._utils.pin_memory", "pin_memory")
def pinned(batch: Any) -> Any:
    """A batch in pinned memory, as a DataLoader with `pin_memory` gives it."""
    return import_module("torch.utils.data._utils.pin_memory").pin_memory(batch)


# --- Files of checkpoints ---


@reaches(_FILES, "_StorageInfo")
def storage_info(file: str, offset: int, length: int) -> Any:
    """Where a chunk is, as `.metadata` of torch.distributed.checkpoint has it."""
    return import_module(_FILES)._StorageInfo(file, offset, length)


@reaches(_METADATA, "_MEM_FORMAT_ENCODING")
@reaches("torch.serialization", "_get_layout")
def classes_of_metadata() -> Mapping[tuple[str, str], Any]:
    """What a pickle of `.metadata` names of torch's private parts. None of these runs code."""
    names = (
        (_FILES, "_StorageInfo"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    )
    return {(module, name): getattr(import_module(module), name) for module, name in names}


@reaches("torch._utils", "_rebuild_tensor_v2")
def tensor_of_pickle(module: str, name: str) -> Any:
    """The function by which a pickle of torch.save makes a tensor, if this is its name."""
    is_it = (module, name) == ("torch._utils", "_rebuild_tensor_v2")
    return import_module(module)._rebuild_tensor_v2 if is_it else None
