"""pretrain and its parts."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from .global_vars import get_args
from .initialize import initialize_megatron
from .utils import print_rank_0


def set_startup_timestamps(program_start=None, main_entry=None):
    pass


def update_train_iters(args):
    pass


def num_floating_point_operations(args, batch_size):
    return 1e9 * batch_size


def get_train_valid_test_num_samples():
    args = get_args()
    evaluations = args.train_iters // args.eval_interval + 1
    return (args.train_iters * args.global_batch_size,
            evaluations * args.eval_iters * args.global_batch_size,
            args.eval_iters * args.global_batch_size)


def build_train_valid_test_datasets(build_train_valid_test_datasets_provider):
    return build_train_valid_test_datasets_provider(get_train_valid_test_num_samples())


def get_model(model_provider_func, model_type=None, wrap_with_ddp=True, config=None,
              pg_collection=None):
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    model = model_provider_func(pre_process=True, post_process=True, config=config,
                                pg_collection=groups)
    model.model_type = model_type
    model.cuda(torch.cuda.current_device())
    return [DistributedDataParallel(get_model_config(model), DistributedDataParallelConfig(),
                                    model, pg_collection=groups)]


def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None):
    args = get_args()
    model = get_model(model_provider_func, model_type)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=args.lr, min_lr=args.lr / 10), model,
        use_gloo_process_groups=args.enable_gloo_process_groups)
    samples = args.train_iters * args.global_batch_size
    return model, optimizer, OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.lr / 10, lr_warmup_steps=0,
        lr_decay_steps=samples, lr_decay_style="cosine", start_wd=0.01, end_wd=0.01,
        wd_incr_steps=samples, wd_incr_style="constant")


def pretrain(train_valid_test_dataset_provider, model_provider, model_type, forward_step_func,
             process_non_loss_data_func=None, extra_args_provider=None, args_defaults={},
             get_embedding_ranks=None, get_position_embedding_ranks=None, non_loss_data_func=None,
             store=None, inprocess_call_wrapper=None):
    """Only prints that it was called: training without Unicron is not tested here."""
    initialize_megatron(extra_args_provider=extra_args_provider, args_defaults=args_defaults,
                        skip_mpu_initialization=True, store=store)
    print_rank_0(f"stock pretrain, rank {get_args().rank} of {get_args().world_size}")
    print_rank_0(" iteration        1/      12 | elapsed time per iteration (ms): 5.0 |")
