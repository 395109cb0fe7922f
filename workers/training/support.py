"""A loop held against the support table when it starts: what of it does not heal in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...events.parallel import Parallel
from ...events.support import ROWS, Row


class Loop(NamedTuple):
    """What a script has built: Megatron's own objects, and the layouts in which it may be."""

    config: Any
    ddp: Any
    optimizer: Any
    parallel: Parallel
    modules: Sequence[Any]


def unsupported(config: Any, ddp: Any = None, optimizer: Any = None, *,
                parallel: Parallel | None = None, modules: Sequence[Any] = ()) -> list[Row]:
    """The rows that this loop asks for, and that are not exact for a script's; in their order.

    `config` is a TransformerConfig, `ddp` a DistributedDataParallelConfig, `optimizer` an
    OptimizerConfig, `modules` what is wrapped in DDP. Whether Transformer Engine or a compiler is
    in it only modules say: Megatron's default names the first also where it is not used.
    """
    loop = Loop(config, ddp, optimizer, parallel or Parallel(), modules)
    return [row for row in ROWS if row.loop.grade != "exact" and ASKED[row.what](loop)]


def _any(found: Any, *names: str) -> bool:
    return any(bool(getattr(found, name, False)) for name in names)


def _is_many(found: Any, name: str) -> bool:
    num: int | None = getattr(found, name, 1)
    return num is not None and num > 1


def _parts(loop: Loop) -> list[Any]:
    return [part for module in loop.modules for part in module.modules()]


def _is_of(part: Any, package: str) -> bool:
    return any(kind.__module__.split(".")[0] == package for kind in type(part).__mro__)


def _is_compiled(part: Any) -> bool:
    return (isinstance(part, torch._dynamo.OptimizedModule)
            or getattr(part, "_compiled_call_impl", None) is not None)


def _is_fsdp(loop: Loop) -> bool:
    return (_any(loop.ddp, "use_megatron_fsdp", "use_custom_fsdp")
            or getattr(loop.ddp, "data_parallel_sharding_strategy", "no_shard") != "no_shard"
            or any("FullySharded" in kind.__name__ or kind.__name__ == "FSDPModule"
                   for module in loop.modules for kind in type(module).__mro__))


def _sums_in_16_bits(loop: Loop) -> bool:
    return (loop.ddp is not None and not loop.ddp.grad_reduce_in_fp32
            and _any(loop.config, "bf16", "fp16"))


ASKED: Mapping[str, Callable[[Loop], bool]] = {
    "context parallel": lambda loop: (_is_many(loop.config, "context_parallel_size")
                                      or _any(loop.config, "hybrid_context_parallel")),
    "expert parallel": lambda loop: _is_many(loop.config, "expert_model_parallel_size"),
    "experts": lambda loop: _any(loop.config, "num_moe_experts"),
    "distributed optimizer, mirrored": lambda loop: loop.parallel.optimizer == "mirrored",
    "overlapped reduction, other layouts": lambda loop: (
        _any(loop.ddp, "overlap_grad_reduce") and not loop.parallel.is_plain),
    "overlapped parameter gather": lambda loop: any(
        _any(found, "overlap_param_gather", "overlap_param_gather_with_optimizer_step")
        for found in (loop.ddp, loop.optimizer)),
    "several instances of the distributed optimizer": lambda loop: _is_many(
        loop.ddp, "num_distributed_optimizer_instances"),
    "FSDP": _is_fsdp,
    "Transformer Engine": lambda loop: (
        _any(loop.config, "tp_comm_overlap")
        or _any(loop.optimizer, "use_precision_aware_optimizer")
        or any(_is_of(part, "transformer_engine") for part in _parts(loop))),
    "FP8 or FP4": lambda loop: (_any(loop.config, "fp8", "fp4", "fp8_param", "fp4_param")
                                or _any(loop.ddp, "fp8_param_gather")),
    "CUDA graphs": lambda loop: (_any(loop.config, "enable_cuda_graph", "external_cuda_graph")
                                 or loop.config.cuda_graph_impl != "none"),
    "torch.compile": lambda loop: any(_is_compiled(part) for part in _parts(loop)),
    "registered communication buffers": lambda loop: _any(loop.ddp, "nccl_ub"),
    "offloading to the CPU": lambda loop: (
        _any(loop.config, "cpu_offloading", "fine_grained_activation_offloading")
        or _any(loop.optimizer, "optimizer_cpu_offload")),
    "dropout across a change of TP or PP": lambda loop: (
        _any(loop.config, "attention_dropout", "hidden_dropout")
        and len(list(loop.parallel.shapes())) > 1),
    "gradients scaled by the number of replicas": lambda loop: (
        not loop.config.calculate_per_token_loss or _any(loop.ddp, "average_in_collective")),
    "gradients summed in 16 bits": _sums_in_16_bits,
    "an optimizer other than Adam": lambda loop: (
        loop.optimizer is not None and loop.optimizer.optimizer != "adam"),
}
