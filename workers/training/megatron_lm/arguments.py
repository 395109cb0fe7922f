"""The arguments of Megatron-LM's training loop that do not work in Unicron's loop, and why.

Megatron-LM's own functions build the model, the optimizer, the schedule and the datasets, so what
only they read works as ever. The tables here are about its loops, which pretrain.py replaces. The
keys are the names in `get_args()`. A test reads the loops of a clone, and compares; it has the
arguments that work (tests/drivers/megatron_arguments.py).
"""

from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


def _by_name(names_of: Mapping[str, str]) -> Mapping[str, str]:
    return {name: why for why, names in names_of.items() for name in names.split()}


NAMED = _by_name(
    {
        "not asked: after a fault Unicron restarts the task itself": "adlr_autoresume",
        "a bucket is reduced after the last backward pass that adds to it": "align_grad_reduce",
        "not written: TensorBoard is": "app_tag_run_name app_tag_run_version one_logger_async one_logger_project "
        "one_logger_run_name wandb_project",
        "a thread of the rank writes checkpoints": "async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm async_strategy "
        "dist_ckpt_workers use_persistent_ckpt_worker",
        "only torch_dist is read": "auto_detect_ckpt_format",
        "not compared": "check_weight_hash_across_dp_replicas_interval",
        "all of the state is saved": "ckpt_drop_redundant_extra_state",
        "each member reads its own part": "ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_per_rank_objects "
        "ckpt_fully_parallel_load_process_group",
        "each member writes its own part": "ckpt_fully_parallel_save_process_group",
        "a checkpoint that lacks a part ends the task": "ckpt_load_validate_sharding_integrity",
        "not used: each member reads and writes its own part": "ckpt_pg_tensors_cache_create ckpt_pg_tensors_cache_path",
        "a key that the checkpoint lacks ends the task, others are not read": "dist_ckpt_strictness",
        "NCCL on GPUs, else gloo": "distributed_backend pipeline_model_parallel_comm_backend",
        "`hang_s_min` of the policy limits a hang": "distributed_timeout_minutes distributed_timeout_seconds_after_init",
        "not used: the agent monitors the ranks": "enable_ft_package",
        "checkpoints are read and written without it": "enable_msc",
        "not applied: the task ends at its last iteration, or by `unicron cancel`": "exit_duration_in_mins",
        "not installed: SIGTERM ends a rank, and the others go on": "exit_signal_handler exit_signal_handler_for_training",
        "no fault is injected: `unicron inject` does": "fault_injector_num_ranks fault_injector_ranks",
        "not applied: set torch's environment variables in the job's command": "flight_recorder_dump_path",
        "not run": "gpu_sniff_test_interval",
        "not applied to Unicron's communicators": "high_priority_stream_groups nccl_communicator_config_path use_sharp",
        "Megatron's own tracker is used": "inference_rng_tracker te_rng_tracker",
        "not applied: Unicron builds the communicators": "lazy_mpu_init",
        "the agent chooses the device": "local_rank",
        "not printed": "log_device_memory_used log_memory_interval",
        "not measured": "log_energy log_max_attention_logit timing_log_level",
        "not written: `unicron tail` has the progress": "log_progress",
        "not measured: the agent reports slow ranks": "log_straggler",
        "of the timers only iteration-time and throughput are written": "log_timers_to_tensorboard",
        "not applied: Python collects when it needs to": "manual_gc",
        "auxiliary losses are logged as a mean over the layers": "moe_per_layer_logging",
        "not traced": "moe_routing_trace_path",
        "the state of the optimizer is saved too": "no_save_optim",
        "not written: Unicron keeps copies in memory": "non_persistent_save_interval",
        "not marked": "nvtx_ranges",
        "no telemetry is sent": "otel_enabled",
        "not profiled": "profile",
        "not recorded": "record_memory_history",
        "no step is run again; a NaN or infinite loss ends the task if a second process meets it": "rerun_mode",
        "not started": "run_workload_inspector_server",
        "not written": "save_activations_interval save_dgrads_interval save_params_interval "
        "save_tokens_per_expert_interval save_wgrads_interval",
        "all checkpoints are kept": "save_retain_interval",
        "not used: each member reads its own part": "stream_ckpt_dequant",
        "not hashed: the files of a checkpoint of Unicron have checksums of their own": "verify_integrity",
    }
)
"""Arguments that do not work, and what happens instead: named at the start if they are given."""

DECLINES = _by_name(
    {
        "a checkpoint is converted, and nothing is trained": "ckpt_convert_format",
        "the form of a checkpoint is converted": "ckpt_convert_update_legacy_dist_opt_format",
        "its checkpoints have another format than torch_dist": "ckpt_format",
        "context parallelism couples the ranks": "context_parallel_size hybrid_context_parallel",
        "its communicators are not those of a generation": "create_all_gather_group",
        "CUDA graphs keep their communicators": "cuda_graph_impl enable_cuda_graph external_cuda_graph optimizer_cuda_graph",
        "replicas would begin with different weights": "data_parallel_random_init",
        "its samples are packed": "dataloader_inter_document_masking sft",
        "its data has no random access": "dataloader_type logits_load_dir",
        "its two sequences differ in length": "decoder_seq_length",
        "a loss beside the model's is not known": "dsa_indexer_loss_coeff mtp_num_layers",
        "its evaluations have other micro-batches": "eval_micro_batch_size",
        "expert parallelism couples the replicas": "expert_model_parallel_size",
        "weights are sharded over replicas": "expert_tensor_parallel_num_weight_shards tensor_parallel_num_weight_shards",
        "experts have the tensor parallelism of the other layers here": "expert_tensor_parallel_size",
        "its collectives do nothing": "fake_process_group",
        "transfers to the host are not part of the known state": "fine_grained_activation_offloading",
        "FP4 scales are not part of the known state": "fp4",
        "FP8 scales are not part of the known state": "fp8",
        "nothing is trained": "freeze_all_layers skip_train",
        "the number of validation batches is not known before": "full_validation",
        "the weights are filled in after the build": "init_model_with_meta_device",
        "another recovery would wrap this one": "inprocess_restart",
        "each iteration takes a step": "iterations_to_skip",
        "the optimizer's masters alone come from a checkpoint": "load_main_params_from_ckpt",
        "its hooks write after each forward pass": "logits_save_dir",
        "a capacity of each rank is not tested": "moe_expert_rank_capacity_factor",
        "the weights come from a checkpoint of Megatron-LM": "moe_use_upcycling",
        "validation has one set": "multiple_validation_sets",
        "memory registered with a communicator is lost with it": "nccl_ub tp_comm_overlap",
        "its groups of groups are not described": "num_distributed_optimizer_instances",
        "the layout of its state is not known": "optimizer",
        "parameters are gathered during the step": "overlap_param_gather_with_optimizer_step",
        "its iteration is not that of the checkpoint": "override_ckpt_iteration",
        "its batches come from the model": "perform_rl_step",
        "the data changes between two runs": "phase_transition_iterations",
        "it places the layers for one number of stages": "pipeline_model_parallel_layout",
        "it changes weights after the step": "qk_clip vision_pretraining",
        "the batch grows": "rampup_batch_size step_batch_size_schedule",
        "the arguments come from a checkpoint of Megatron-LM": "use_checkpoint_args",
        "the schedule comes from a checkpoint of Megatron-LM": "use_checkpoint_opt_param_scheduler",
        "FSDP shards the parameters": "use_megatron_fsdp use_torch_fsdp2",
        "the ranks have another order": "use_tp_pp_dp_mapping",
        "the arguments are not on the command line": "yaml_cfg",
    }
)
"""Arguments that prevent in-memory recovery if they are given, and the reasons."""

WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "cuda_graph_impl": ("none",),
    "dataloader_type": ("single",),
    "rerun_mode": ("disabled",),
    "distributed_timeout_minutes": (10,),
}
"""Values beside the default that need no word."""


class Given(NamedTuple):
    """An argument with another value than its default, and its spelling on the command line."""

    name: str
    option: str


def given(args: Any, parser: ArgumentParser, words: Sequence[str]) -> list[Given]:
    """The arguments that `words` set to other values than the default. `args`: not validated."""
    on_line = {word.split("=")[0] for word in words}
    found: dict[str, Given] = {}
    for action in parser._actions:
        name, options = action.dest, action.option_strings
        if not hasattr(args, name):  # --help
            continue
        value = getattr(args, name)
        if value == parser.get_default(name) or value in WITHOUT_EFFECT.get(name, ()):
            continue
        option = next((one for one in options if one in on_line), "")
        if option or name not in found:
            found[name] = Given(name, option or options[0])
    return list(found.values())


def why_not(names: Collection[Given]) -> str:
    """Why in-memory recovery does not support these arguments; empty if it does."""
    return "; ".join(
        f"{DECLINES[one.name]} ({one.option})" for one in names if one.name in DECLINES
    )


def named(names: Collection[Given]) -> list[str]:
    """One line for each of these arguments that does not work as in Megatron-LM's loop."""
    return [f"{one.option}: {NAMED[one.name]}" for one in names if one.name in NAMED]
