"""A script's own loop held against the support table, by Megatron's real configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from unicron.events.spec.parallelism import Parallel
from unicron.events.spec.support import ROWS
from unicron.workers.training.adopt.custom_loop import ROW_CHECKS, unsupported

PLAIN: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
                         "hidden_dropout": 0.0, "attention_dropout": 0.0,
                         "calculate_per_token_loss": True, "use_cpu_initialization": True}
CASES: dict[str, list[dict[str, Any]]] = {
    "context parallel": [{"config": {"context_parallel_size": 2}}],
    "expert parallel": [{"config": {"num_moe_experts": 4, "expert_model_parallel_size": 2}}],
    "experts": [{"config": {"num_moe_experts": 4}}],
    "distributed optimizer, mirrored": [{"parallel": Parallel(optimizer="mirrored")}],
    "overlapped reduction, other layouts": [
        {"ddp": {"overlap_grad_reduce": True}, "parallel": Parallel(tensor=(2,))},
        {"ddp": {"overlap_grad_reduce": True}, "parallel": Parallel(optimizer="sharded")}],
    "overlapped parameter gather": [
        {"ddp": {"overlap_param_gather": True, "use_distributed_optimizer": True}},
        {"optimizer": {"overlap_param_gather_with_optimizer_step": True,
                       "use_distributed_optimizer": True}}],
    "several instances of the distributed optimizer": [
        {"ddp": {"num_distributed_optimizer_instances": 2}}],
    "FSDP": [{"ddp": {"use_megatron_fsdp": True}},
             {"ddp": {"data_parallel_sharding_strategy": "optim_grads_params"}}],
    "Transformer Engine": [{"module": "transformer_engine"}],
    "FP8 or FP4": [{"config": {"fp8": "hybrid"}}],
    "CUDA graphs": [{"config": {"cuda_graph_impl": "local", "use_te_rng_tracker": True}}],
    "torch.compile": [{"module": "compiled"}, {"module": "compiled in place"}],
    "registered communication buffers": [{"ddp": {"nccl_ub": True}}],
    "offloading to the CPU": [
        {"config": {"cpu_offloading": True, "cpu_offloading_num_layers": 1}},
        {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}}],
    "dropout across a change of TP or PP": [
        {"config": {"attention_dropout": 0.1}, "parallel": Parallel(tensor=(1, 2))},
        {"config": {"hidden_dropout": 0.1}, "parallel": Parallel(pipeline=(1, 2))}],
    "gradients scaled by the number of replicas": [
        {"config": {"calculate_per_token_loss": False}}, {"ddp": {"average_in_collective": True}}],
    "gradients summed in 16 bits": [
        {"config": {"bf16": True, "params_dtype": torch.bfloat16},
         "ddp": {"grad_reduce_in_fp32": False}}],
    "an optimizer other than Adam": [{"optimizer": {"optimizer": "sgd"}}],
}


class _Engine(torch.nn.Linear):
    __module__ = "transformer_engine.pytorch.module.linear"


def _module(kind: str) -> torch.nn.Module:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if kind == "transformer_engine":
        inner.append(type("TELinear", (_Engine,), {})(2, 2))
    if kind == "compiled":
        return torch.nn.Sequential(torch.compile(inner, backend="eager"))
    if kind == "compiled in place":
        inner[0].compile(backend="eager")
    return inner


def _found(case: dict[str, Any]) -> list[str]:
    ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | case.get("ddp", {}))
    return [row.what for row in unsupported(
        TransformerConfig(**PLAIN | case.get("config", {})), ddp,
        OptimizerConfig(**{"optimizer": "adam", "lr": 1e-3} | case.get("optimizer", {})),
        parallel=case.get("parallel"), modules=[_module(case.get("module", ""))])]


@pytest.mark.parametrize(("what", "case"), [
    pytest.param(what, case, id=f"{what} {num}")
    for what, cases in CASES.items() for num, case in enumerate(cases)])
def test_what_does_not_heal_is_found(what: str, case: dict[str, Any]) -> None:
    assert what in _found(case)


@pytest.mark.parametrize("case", [
    {}, {"config": {"attention_dropout": 0.1, "hidden_dropout": 0.1}},
    {"ddp": {"overlap_grad_reduce": True}},
    {"ddp": {"use_distributed_optimizer": True}, "optimizer": {"use_distributed_optimizer": True},
     "parallel": Parallel(optimizer="sharded")},
    {"config": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
     "parallel": Parallel(tensor=(1, 2))},
    {"config": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32,
                "virtual_pipeline_model_parallel_size": 2},
     "parallel": Parallel(pipeline=(1, 2), chunks=2)},
    {"config": {"recompute_granularity": "full", "recompute_method": "uniform",
                "recompute_num_layers": 1}},
])
def test_what_heals_is_not_found(case: dict[str, Any]) -> None:
    assert _found(case) == []


def test_each_row_that_is_not_exact_is_looked_for() -> None:
    wanted = [row.what for row in ROWS if row.loop.grade != "exact"]
    assert list(ROW_CHECKS) == wanted
    assert list(CASES) == wanted
