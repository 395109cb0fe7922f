"""initialize_megatron: arguments; communicators unless skip_mpu_initialization."""

import os

import torch
from megatron.core import parallel_state

from .global_vars import get_args, set_global_variables


def initialize_megatron(extra_args_provider=None, args_defaults={}, ignore_unknown_args=False,
                        allow_no_cuda=False, skip_mpu_initialization=False,
                        get_embedding_ranks=None, get_position_embedding_ranks=None,
                        parsed_args=None, store=None):
    set_global_variables(extra_args_provider, args_defaults)
    args = get_args()
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert args.global_batch_size % (args.micro_batch_size * args.world_size) == 0
    args.data_parallel_size = args.world_size
    if not skip_mpu_initialization:
        torch.distributed.init_process_group("gloo", store=store)
        parallel_state.initialize_model_parallel()
