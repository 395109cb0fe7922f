"""Batches and printing."""

import torch
from megatron.core import parallel_state

from .global_vars import get_args


def print_rank_0(message):
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(message, flush=True)


def is_first_or_last_pipeline_stage(vp_stage):
    return parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()


def get_batch_on_this_tp_rank(data_iterator):
    """The batch from the iterator of the first tensor-parallel rank, broadcast to the others."""
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    assert parallel_state.get_tensor_model_parallel_rank() == 0
    data = next(data_iterator)
    batch = {name: data[name].cuda(non_blocking=True) if name in data else None for name in names}
    for tensor in batch.values():
        if tensor is not None:
            torch.distributed.broadcast(
                tensor,
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
    assert len(batch["tokens"]) == get_args().micro_batch_size
    return batch


def get_batch_on_this_cp_rank(batch):
    return batch
