"""initialize_megatron: arguments; communicators unless skip_mpu_initialization."""

import random

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

from .arguments import parse_args
from .global_vars import set_global_variables


def initialize_megatron(
    extra_args_provider=None,
    args_defaults={},
    ignore_unknown_args=False,
    allow_no_cuda=False,
    skip_mpu_initialization=False,
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    parsed_args=None,
    store=None,
):
    args = parsed_args or parse_args(extra_args_provider)
    for name, value in args_defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.train_iters is None and args.train_samples is None:
        args.train_iters = 12
    args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    args.data_parallel_size = args.world_size // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    )
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    set_global_variables(args)
    initialize_rerun_state_machine(mode=RerunMode(args.rerun_mode))
    if not skip_mpu_initialization:
        _initialize_distributed(store)
        _set_random_seed(args.seed)


def _initialize_distributed(store):
    torch.distributed.init_process_group("gloo", store=store)
    parallel_state.initialize_model_parallel()


def _set_random_seed(seed_, data_parallel_random_init=False):
    random.seed(seed_)
    numpy.random.seed(seed_)
    torch.manual_seed(seed_)
