"""pretrain and its parts."""

import sys

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch.utils.data import BatchSampler, DataLoader

from .global_vars import get_args
from .initialize import initialize_megatron
from .utils import print_rank_0


def set_startup_timestamps(program_start=None, main_entry=None):
    pass


def update_train_iters(args):
    if not args.train_iters:
        args.train_iters = args.train_samples // args.global_batch_size


def num_floating_point_operations(args, batch_size):
    return 1e9 * batch_size


def get_train_valid_test_num_samples():
    args = get_args()
    evaluations = args.train_iters // args.eval_interval + 1
    return (
        args.train_samples or args.train_iters * args.global_batch_size,
        evaluations * args.eval_iters * args.global_batch_size,
        args.eval_iters * args.global_batch_size,
    )


def build_train_valid_test_datasets(build_train_valid_test_datasets_provider):
    return build_train_valid_test_datasets_provider(get_train_valid_test_num_samples())


def get_model(
    model_provider_func, model_type=None, wrap_with_ddp=True, config=None, pg_collection=None
):
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    model = model_provider_func(
        pre_process=True, post_process=True, config=config, pg_collection=groups
    )
    model.model_type = model_type
    model.cuda(torch.cuda.current_device())
    return [
        DistributedDataParallel(
            get_model_config(model), DistributedDataParallelConfig(), model, pg_collection=groups
        )
    ]


def get_optimizer_param_scheduler(optimizer):
    """Counts iterations if their number is known, else samples; both in samples."""
    args = get_args()
    unit, each = ("iters", args.global_batch_size) if args.train_iters else ("samples", 1)

    def samples(name):
        given = getattr(args, f"{name}_{unit}")
        return given if given is None else given * each

    whole = samples("train")
    if unit == "samples":
        update_train_iters(args)
    if getattr(args, f"lr_decay_{unit}") is None:
        setattr(args, f"lr_decay_{unit}", whole // each)
    decay = samples("lr_decay")
    fraction = args.lr_warmup_fraction
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=samples("lr_warmup") if fraction is None else fraction * decay,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=whole,
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=samples("lr_wsd_decay"),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None):
    args = get_args()
    model = get_model(model_provider_func, model_type)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=args.lr, min_lr=args.min_lr),
        model,
        use_gloo_process_groups=args.enable_gloo_process_groups,
    )
    scheduler = get_optimizer_param_scheduler(optimizer)
    args.iteration = 0
    return model, optimizer, scheduler


def build_pretraining_data_loader(dataset, consumed_samples):
    args = get_args()
    order = BatchSampler(
        range(consumed_samples, len(dataset)), args.micro_batch_size, drop_last=True
    )
    mine = list(order)[
        parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()
    ]
    return DataLoader(dataset, batch_sampler=mine, num_workers=args.num_workers, pin_memory=True)


def train(*given):
    print_rank_0(" iteration        1/      12 | elapsed time per iteration (ms): 5.0 |")


def pretrain(
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
    extra_args_provider=None,
    args_defaults={},
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    non_loss_data_func=None,
    store=None,
    inprocess_call_wrapper=None,
):
    """Sets up, and only prints that it trains: training without Unicron is not tested here. With
    FSDP, for which there is no stand-in, it only prints."""
    initialize_megatron(
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        skip_mpu_initialization="--use-torch-fsdp2" in sys.argv,
        store=store,
    )
    args = get_args()
    print_rank_0(f"stock pretrain, rank {args.rank} of {args.world_size}")
    if args.use_torch_fsdp2:
        train()
        return
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)
    args.consumed_train_samples = 0
    datasets = build_train_valid_test_datasets(train_valid_test_dataset_provider)
    train(
        forward_step_func,
        model,
        optimizer,
        scheduler,
        *(build_pretraining_data_loader(dataset, 0) for dataset in datasets),
    )
