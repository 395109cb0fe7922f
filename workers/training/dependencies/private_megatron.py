"""The private parts of megatron-core: all that Unicron reaches beside its public interface.

Every part is in all the versions of known_versions.py, if its function does not say otherwise.
"""

# pyright: reportPrivateUsage=false
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import BufferType
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from .parts import reaches
from .private_torch import works_of

_STATE = "megatron.core.parallel_state"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_STAGES = "megatron.core.pipeline_parallel.p2p_communication"
_RANDOM = "megatron.core.tensor_parallel.random"
_GROUP = "_ParamAndGradBucketGroup"


# --- Megatron's group globals, which a script reads through `parallel_state` (mpu) ---
#
# They belong to one generation. At its end, `clear_globals` clears them, and the world sizes and
# ranks that Megatron caches. A script that reads them anew each time gets current values.

_BY_ROLE = {
    "tp": ("_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    "pp": ("_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    "mp": ("_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    "dp": ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS"),
    "dp_cp": ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"),
    "intra_dp_cp": ("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", ""),
    "intra_expt_dp": ("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", ""),
    "intra_dist_opt": ("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", ""),
    "cp": ("_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    "embd": ("_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS"),
    "pos_embd": ("_POSITION_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GLOBAL_RANKS"),
    "tp_cp": ("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", ""),
    "ep": ("_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    "expt_tp": ("_EXPERT_TENSOR_PARALLEL_GROUP", ""),
    "expt_dp": ("_EXPERT_DATA_PARALLEL_GROUP", ""),
    "tp_ep": ("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", ""),
    "tp_ep_pp": ("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", ""),
}
_GTP = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "intra_dp_cp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "intra_expt_dp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
    "_GTP_WEIGHT_REMAT_GROUP": "cp",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP": "cp",
}
"""From 0.19 on, Megatron can also shard weights over replicas. Here a group of those has one
member, so that groups with and without them are the same."""
_SINCE_16 = "_EXPERT_MODEL_PARALLEL_RANKS"


@reaches(
    _STATE,
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_GLOBAL_MEMORY_BUFFER",
    "_set_global_memory_buffer",
    *(name for names in _BY_ROLE.values() for name in names if name not in ("", _SINCE_16)),
)
def publish_globals(groups: Any, chunks: int) -> None:
    """Set Megatron's globals from the generation's ProcessGroupCollection; `chunks`: model chunks
    per pipeline stage. 0.15 does not have `_EXPERT_MODEL_PARALLEL_RANKS`, and does not read it."""
    for role, (group_name, ranks_name) in _BY_ROLE.items():
        group = getattr(groups, role)
        setattr(parallel_state, group_name, group)
        if ranks_name and group is not None:
            setattr(parallel_state, ranks_name, dist.get_process_group_ranks(group))
    for group_name, role in _GTP.items():
        if hasattr(parallel_state, group_name):
            setattr(parallel_state, group_name, getattr(groups, role))
    parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = (
        chunks if chunks > 1 and groups.pp.size() > 1 else None
    )
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def publish_read_globals(*, tp: Any, dp_cp: Any) -> None:
    """Set the globals that Megatron reads even if it is given a ProcessGroupCollection: its cross
    entropy the first, its sharded metadata of a tied embedding the second."""
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tp
    parallel_state._DATA_PARALLEL_GROUP_WITH_CP = dp_cp


def clear_globals() -> None:
    """Clear Megatron's group globals, also those that its own destroy function leaves set."""
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


@contextmanager
def globals_restored() -> Generator[None]:
    """At the end of this context, Megatron's globals are as they were."""
    saved = dict(vars(parallel_state))
    try:
        yield
    finally:
        parallel_state.__dict__.update(saved)


# --- DDP: its flat buffers, their buckets, and the groups of buckets that are reduced together ---


@reaches(_DDP, "DistributedDataParallel.buffers", "DistributedDataParallel.expert_parallel_buffers")
def buffers_of(ddp: Any) -> list[Any]:
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


@reaches(
    _DDP,
    "DistributedDataParallel.bucket_groups",
    "DistributedDataParallel.expert_parallel_bucket_groups",
)
def bucket_groups_of(ddp: Any) -> list[Any]:
    """The units of the gradient reduction of one model chunk, in its order."""
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


@reaches(_DDP, "DistributedDataParallel.overlap_param_gather_with_optimizer_step")
def gather_after_step(ddp: Any) -> None:
    ddp.overlap_param_gather_with_optimizer_step = True


@reaches(
    _BUFFER,
    "BufferType.GRAD",
    "_ParamAndGradBuffer._get",
    "_ParamAndGradBuffer.grad_data",
    "_ParamAndGradBuffer.param_index_map",
    "_ParamAndGradBuffer.buckets",
    "_ParamAndGradBuffer.params",
    "_ParamAndGradBucket.grad_data",
    "_ParamAndGradBucket.offset",
)
def set_gradient(buffer: Any, new: Tensor) -> None:
    """Make `new` the memory of the gradients of a flat buffer. On the meta device it has none."""
    buffer.grad_data = new
    for bucket in buffer.buckets:
        bucket.grad_data = new[bucket.offset : bucket.offset + bucket.grad_data.numel()]
    for param in buffer.params:
        start, _, _ = buffer.param_index_map[param]
        param.main_grad = buffer._get(param.data.shape, start, BufferType.GRAD)


@reaches(_BUFFER, "_ParamAndGradBuffer.param_data", "_ParamAndGradBucket.param_data")
def release_parameters(buffer: Any) -> None:
    """Drop the memory of the parameters of a flat buffer."""
    buffer.param_data = None
    for bucket in buffer.buckets:
        bucket.param_data = None


@reaches(_BUFFER, f"{_GROUP}.cached_grad_buffer_shard_list")
def forget_gradient_views(group: Any) -> None:
    """Drop the views of the gradients' memory that a bucket group keeps."""
    group.cached_grad_buffer_shard_list = [None] * len(group.buckets)


@reaches(_BUFFER, f"{_GROUP}.cached_param_buffer_shard_list")
def forget_parameter_views(group: Any) -> None:
    """Drop the views of the parameters' memory of a bucket group that is no longer used."""
    group.cached_param_buffer_shard_list = []


@reaches(_BUFFER, f"{_GROUP}.grad_reduce_handle")
def reduction_works(group: Any) -> list[Any]:
    """The launched collectives of a bucket group's reduction."""
    return works_of(group.grad_reduce_handle)


@reaches(
    _BUFFER,
    f"{_GROUP}.is_last_microbatch",
    f"{_GROUP}.per_param_grad_ready_counts or {_GROUP}.params_with_grad",
)
def reset_reduction(group: Any) -> None:
    """Clear a failed reduction from a bucket group, which does not expect a failure. What it counts
    is `params_with_grad` until 0.15, `per_param_grad_ready_counts` since 0.16."""
    group.grad_reduce_handle = None
    group.is_last_microbatch = True
    if hasattr(group, "params_with_grad"):
        group.params_with_grad = set()
    else:
        group.per_param_grad_ready_counts = {}


@reaches(_BUFFER, f"{_GROUP}.param_gather_handle")
def take_gather_works(group: Any) -> list[Any]:
    """The launched collectives of a bucket group's gather, which the group forgets."""
    if group.param_gather_handle is None:
        return []
    works = works_of(group.param_gather_handle)
    group.param_gather_handle = None
    return works


@reaches(_BUFFER, f"{_GROUP}.param_gather_dispatched")
def set_gathered(group: Any, *, is_gathered: bool) -> None:
    """Whether the next forward finds the parameters of a bucket group gathered."""
    group.param_gather_dispatched = is_gathered


@reaches(_BUFFER, f"{_GROUP}.finish_param_sync")
def finish_gather(ddp: Any) -> None:
    """Gather a chunk's parameters as its forward does: each bucket group launches the next one."""
    for groups in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups):
        for group in reversed(groups):
            group.finish_param_sync()


@reaches(_BUFFER, "_ParamAndGradBucket.gradient_scaling_factor")
def divide_no_gradients(ddp: Any) -> None:
    """Let the reduction of a model chunk only add gradients up."""
    for buffer in buffers_of(ddp):
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor = 1.0


# --- The distributed optimizer ---

_PARAMS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


@reaches(_OPTIMIZER, *(f"DistributedOptimizer.{name}" for pair in _PARAMS for name in pair))
def shards_of(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Each parameter of which a DistributedOptimizer has a shard, and the shard, in flat fp32."""
    for wholes, shards in _PARAMS:
        for params, owned in zip(
            getattr(optimizer, wholes), getattr(optimizer, shards), strict=True
        ):
            yield from zip(params, owned, strict=True)


@reaches(
    _OPTIMIZER,
    "DistributedOptimizer.model_param_gbuf_map",
    "DistributedOptimizer._get_model_param_range_map",
)
def ranges_of(optimizer: Any) -> Iterator[tuple[Any, slice]]:
    """Each parameter of which a DistributedOptimizer has a shard, and the shard's elements."""
    for param in optimizer.model_param_gbuf_map:
        own = optimizer._get_model_param_range_map(param)["param"]
        yield param, slice(own.start, own.end)


@reaches(_OPTIMIZER, "DistributedOptimizer.shard_float16_groups")
def release_shards(optimizer: Any) -> None:
    """Free the 16-bit shards of an optimizer; one that is not sharded has none."""
    for group in getattr(optimizer, "shard_float16_groups", ()):
        for shard in group:
            shard.data = shard.data.new_empty(0)


@reaches(_BUFFER, "_ParamAndGradBuffer.data_parallel_group")
@contextmanager
def data_parallel_groups(buffers: Sequence[Any], of: Callable[[Any], Any]) -> Generator[None]:
    """Within this context an optimizer is built on these buffers with `of(group)` in place of their
    data-parallel group. The masters of their parameters are restored at the end."""
    groups = [buffer.data_parallel_group for buffer in buffers]
    mains = {param: vars(param).get("main_param") for buffer in buffers for param in buffer.params}
    for buffer, group in zip(buffers, groups, strict=True):
        buffer.data_parallel_group = of(group)
    try:
        yield
    finally:
        for buffer, group in zip(buffers, groups, strict=True):
            buffer.data_parallel_group = group
        for param, main in mains.items():
            param.main_param = main


# --- The messages between pipeline stages ---


@reaches(_STAGES, "P2PCommunicator._communicate")
class StageMessages(P2PCommunicator):  # type: ignore[misc, unused-ignore]
    """Megatron's sends and receives between stages. All of them go through `exchange`."""

    def _communicate(self, **given: Any) -> Any:
        return self.exchange(given)

    def exchange(self, given: dict[str, Any]) -> Any:
        """Send the tensors `tensor_send_next` and `tensor_send_prev`, and receive what `recv_prev`
        and `recv_next` ask for. Returns the received tensors of the previous and of the next stage,
        and None or, unless `wait_on_reqs`, the requests to wait for."""
        return super()._communicate(**given)


# --- Random numbers, and Megatron-LM ---


@reaches(
    _RANDOM,
    "_CUDA_RNG_STATE_TRACKER",
    "_CUDA_RNG_STATE_TRACKER_INITIALIZED",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
)
def replace_generators(
    tracker: Any, get_state: Callable[..., Tensor], set_state: Callable[..., None]
) -> None:
    """Replace Megatron's tracker of the GPU's generators, and its access to their state."""
    from megatron.core.tensor_parallel import random

    random._CUDA_RNG_STATE_TRACKER = tracker
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state


def make_tensorboard_writer(global_vars: Any, args: Any) -> None:
    """Let Megatron-LM make its TensorBoard writer. `global_vars` is its module, which is not in
    megatron-core: 0.16 and 0.17, which megatron_lm/versions.py checks."""
    global_vars._set_tensorboard_writer(args)
