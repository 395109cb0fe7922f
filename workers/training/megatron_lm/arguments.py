"""The arguments of Megatron-LM's training loop that do not work in Unicron's loop, and why.

Megatron-LM's own functions build the model, the optimizer, the schedule and the datasets, so what
only they read works as ever. The tables here are about its loops, which pretrain.py replaces. Their
keys are the names in `get_args()`. A test reads the loops of a clone, and compares; it has the
arguments that work (tests/drivers/megatron_arguments.py).
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

NAMED: Mapping[str, str] = {
    "adlr_autoresume": "not asked: after a fault Unicron restarts the task itself",
    "align_grad_reduce": "a bucket is reduced after the last backward pass that adds to it",
    "app_tag_run_name": "not written: TensorBoard is",
    "app_tag_run_version": "not written: TensorBoard is",
    "async_ckpt_cpu_priority": "a thread of the rank writes checkpoints",
    "async_ckpt_io_priority": "a thread of the rank writes checkpoints",
    "async_ckpt_use_cpu_shm": "a thread of the rank writes checkpoints",
    "async_strategy": "a thread of the rank writes checkpoints",
    "auto_detect_ckpt_format": "only torch_dist is read",
    "check_weight_hash_across_dp_replicas_interval": "not compared",
    "ckpt_drop_redundant_extra_state": "all of the state is saved",
    "ckpt_fully_parallel_load_exchange_algo": "each member reads its own part",
    "ckpt_fully_parallel_load_per_rank_objects": "each member reads its own part",
    "ckpt_fully_parallel_load_process_group": "each member reads its own part",
    "ckpt_fully_parallel_save_process_group": "each member writes its own part",
    "ckpt_load_validate_sharding_integrity": "a checkpoint that lacks a part ends the task",
    "ckpt_pg_tensors_cache_create": "not used: each member reads and writes its own part",
    "ckpt_pg_tensors_cache_path": "not used: each member reads and writes its own part",
    "dist_ckpt_strictness": "a key that the checkpoint lacks ends the task, others are not read",
    "dist_ckpt_workers": "a thread of the rank writes checkpoints",
    "distributed_backend": "NCCL on GPUs, else gloo",
    "distributed_timeout_minutes": "`hang_s_min` of the policy limits a hang",
    "distributed_timeout_seconds_after_init": "`hang_s_min` of the policy limits a hang",
    "enable_ft_package": "not used: the agent monitors the ranks",
    "enable_msc": "checkpoints are read and written without it",
    "exit_duration_in_mins": "not applied: the task ends at its last iteration, or by `unicron "
                             "cancel`",
    "exit_signal_handler": "not installed: SIGTERM ends a rank, and the others go on",
    "exit_signal_handler_for_training": "not installed: SIGTERM ends a rank, and the others go on",
    "fault_injector_num_ranks": "no fault is injected: `unicron inject` does",
    "fault_injector_ranks": "no fault is injected: `unicron inject` does",
    "flight_recorder_dump_path": "not applied: set torch's environment variables in the job's "
                                 "command",
    "gpu_sniff_test_interval": "not run",
    "high_priority_stream_groups": "not applied to Unicron's communicators",
    "inference_rng_tracker": "Megatron's own tracker is used",
    "lazy_mpu_init": "not applied: Unicron builds the communicators",
    "local_rank": "the agent chooses the device",
    "log_device_memory_used": "not printed",
    "log_energy": "not measured",
    "log_max_attention_logit": "not measured",
    "log_memory_interval": "not printed",
    "log_progress": "not written: `unicron tail` has the progress",
    "log_straggler": "not measured: the agent reports slow ranks",
    "log_timers_to_tensorboard": "of the timers only iteration-time and throughput are written",
    "manual_gc": "not applied: Python collects when it needs to",
    "moe_per_layer_logging": "auxiliary losses are logged as a mean over the layers",
    "moe_routing_trace_path": "not traced",
    "nccl_communicator_config_path": "not applied to Unicron's communicators",
    "no_save_optim": "the state of the optimizer is saved too",
    "non_persistent_save_interval": "not written: Unicron keeps copies in memory",
    "nvtx_ranges": "not marked",
    "one_logger_async": "not written: TensorBoard is",
    "one_logger_project": "not written: TensorBoard is",
    "one_logger_run_name": "not written: TensorBoard is",
    "otel_enabled": "no telemetry is sent",
    "pipeline_model_parallel_comm_backend": "NCCL on GPUs, else gloo",
    "profile": "not profiled",
    "record_memory_history": "not recorded",
    "rerun_mode": "no step is run again; a NaN or infinite loss ends the task if a "
                  "second process meets it",
    "run_workload_inspector_server": "not started",
    "save_activations_interval": "not written",
    "save_dgrads_interval": "not written",
    "save_params_interval": "not written",
    "save_retain_interval": "all checkpoints are kept",
    "save_tokens_per_expert_interval": "not written",
    "save_wgrads_interval": "not written",
    "stream_ckpt_dequant": "not used: each member reads its own part",
    "te_rng_tracker": "Megatron's own tracker is used",
    "timing_log_level": "not measured",
    "use_persistent_ckpt_worker": "a thread of the rank writes checkpoints",
    "use_sharp": "not applied to Unicron's communicators",
    "verify_integrity": "not hashed: the files of a checkpoint of Unicron have checksums of their "
                        "own",
    "wandb_project": "not written: TensorBoard is",
}
"""Arguments that do not work, and what happens instead: named at the start if they are given."""

DECLINES: Mapping[str, str] = {
    "ckpt_convert_format": "a checkpoint is converted, and nothing is trained",
    "ckpt_convert_update_legacy_dist_opt_format": "the form of a checkpoint is converted",
    "ckpt_format": "its checkpoints have another format than torch_dist",
    "context_parallel_size": "context parallelism couples the ranks",
    "create_all_gather_group": "its communicators are not those of a generation",
    "cuda_graph_impl": "CUDA graphs keep their communicators",
    "data_parallel_random_init": "replicas would begin with different weights",
    "dataloader_inter_document_masking": "its samples are packed",
    "dataloader_type": "its data has no random access",
    "decoder_seq_length": "its two sequences differ in length",
    "dsa_indexer_loss_coeff": "a loss beside the model's is not known",
    "enable_cuda_graph": "CUDA graphs keep their communicators",
    "eval_micro_batch_size": "its evaluations have other micro-batches",
    "expert_model_parallel_size": "expert parallelism couples the replicas",
    "expert_tensor_parallel_num_weight_shards": "weights are sharded over replicas",
    "expert_tensor_parallel_size": "experts have the tensor parallelism of the other layers here",
    "external_cuda_graph": "CUDA graphs keep their communicators",
    "fake_process_group": "its collectives do nothing",
    "fine_grained_activation_offloading": "transfers to the host are not part of the known state",
    "fp4": "FP4 scales are not part of the known state",
    "fp8": "FP8 scales are not part of the known state",
    "freeze_all_layers": "nothing is trained",
    "full_validation": "the number of validation batches is not known before",
    "hybrid_context_parallel": "context parallelism couples the ranks",
    "init_model_with_meta_device": "the weights are filled in after the build",
    "inprocess_restart": "another recovery would wrap this one",
    "iterations_to_skip": "each iteration takes a step",
    "load_main_params_from_ckpt": "the optimizer's masters alone come from a checkpoint",
    "logits_load_dir": "its data has no random access",
    "logits_save_dir": "its hooks write after each forward pass",
    "moe_expert_rank_capacity_factor": "a capacity of each rank is not tested",
    "moe_use_upcycling": "the weights come from a checkpoint of Megatron-LM",
    "mtp_num_layers": "a loss beside the model's is not known",
    "multiple_validation_sets": "validation has one set",
    "nccl_ub": "memory registered with a communicator is lost with it",
    "num_distributed_optimizer_instances": "its groups of groups are not described",
    "optimizer": "the layout of its state is not known",
    "optimizer_cuda_graph": "CUDA graphs keep their communicators",
    "overlap_param_gather_with_optimizer_step": "parameters are gathered during the step",
    "override_ckpt_iteration": "its iteration is not that of the checkpoint",
    "perform_rl_step": "its batches come from the model",
    "phase_transition_iterations": "the data changes between two runs",
    "pipeline_model_parallel_layout": "it places the layers for one number of stages",
    "qk_clip": "it changes weights after the step",
    "rampup_batch_size": "the batch grows",
    "sft": "its samples are packed",
    "skip_train": "nothing is trained",
    "step_batch_size_schedule": "the batch grows",
    "tensor_parallel_num_weight_shards": "weights are sharded over replicas",
    "tp_comm_overlap": "memory registered with a communicator is lost with it",
    "use_checkpoint_args": "the arguments come from a checkpoint of Megatron-LM",
    "use_checkpoint_opt_param_scheduler": "the schedule comes from a checkpoint of Megatron-LM",
    "use_megatron_fsdp": "FSDP shards the parameters",
    "use_torch_fsdp2": "FSDP shards the parameters",
    "use_tp_pp_dp_mapping": "the ranks have another order",
    "vision_pretraining": "it changes weights after the step",
    "yaml_cfg": "the arguments are not on the command line",
}
"""Arguments that prevent in-memory recovery if they are given, and the reasons."""

WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "cuda_graph_impl": ("none",), "dataloader_type": ("single",), "rerun_mode": ("disabled",),
    "distributed_timeout_minutes": (10,)}
"""Values beside the default that need no word."""


class Given(NamedTuple):
    """An argument that has another value than its default, and its spelling on the command line."""

    name: str
    option: str


def given(args: Any, parser: ArgumentParser, words: Sequence[str]) -> list[Given]:
    """The arguments of `parser` that `words` set to another value than the default. `args` is what
    it made of `words`, not validated yet."""
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
    return "; ".join(f"{DECLINES[one.name]} ({one.option})" for one in names
                     if one.name in DECLINES)


def named(names: Collection[Given]) -> list[str]:
    """One line for each of these arguments that does not work as in Megatron-LM's loop."""
    return [f"{one.option}: {NAMED[one.name]}" for one in names if one.name in NAMED]
