"""What becomes of each argument that Megatron-LM's training loop reads, in Unicron's loop.

Megatron-LM's own functions build the model, the optimizer, the schedule and the datasets, so what
only they read works as ever. The tables here are about its loops, which pretrain.py replaces. Their
keys are the names in `get_args()`. A test reads the loops of a clone, and compares.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

HONOURED = frozenset((
    "align_param_gather", "async_save", "batch_invariant_backend", "batch_invariant_mode",
    "calculate_per_token_loss", "check_for_large_grads", "check_for_nan_in_loss_and_grad",
    "check_for_spiky_loss", "ckpt_assume_constant_structure", "ckpt_fully_parallel_load",
    "ckpt_fully_parallel_save", "ckpt_step", "create_attention_mask_in_dataloader", "decoupled_lr",
    "decoupled_min_lr", "decrease_batch_size_if_needed", "dist_ckpt_optim_fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient", "empty_unused_memory_level",
    "enable_gloo_process_groups", "enable_one_logger", "eval_global_batch_size", "eval_interval",
    "eval_iters", "exit_interval", "exit_on_missing_checkpoint", "finetune", "global_batch_size",
    "hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model", "load", "log_interval",
    "log_loss_scale_to_tensorboard", "log_memory_to_tensorboard", "log_num_zeros_in_grad",
    "log_params_norm", "log_throughput", "log_validation_ppl_to_tensorboard",
    "log_world_size_to_tensorboard", "logging_level", "lr", "micro_batch_size", "min_lr",
    "moe_layer_freq", "moe_router_load_balancing_type", "moe_z_loss_coeff", "no_load_optim",
    "no_load_rng", "no_save_rng", "num_experts", "num_layers",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "num_workers",
    "overlap_grad_reduce", "overlap_param_gather", "override_opt_param_scheduler",
    "pretrained_checkpoint", "result_rejected_tracker_filename", "save", "save_interval",
    "save_tokenizer_assets", "seed", "seq_length", "sequence_parallel", "start_eval_at_iter",
    "tensorboard_dir", "tensorboard_log_interval", "train_iters", "train_samples",
    "train_sync_interval", "use_cpu_initialization", "use_distributed_optimizer",
    "use_gloo_process_groups"))
"""Arguments whose meaning is that of Megatron-LM's loop. The batch never needs to be decreased: the
number of replicas need not divide it. Each step synchronises with the GPU. Checkpoints are written
beside training, also without `--async-save`; each member reads and writes a part of its own, and
the optimizer's state is always fully reshardable. They have no state of random generators, because
each micro-batch seeds them. The files of the tokenizer are not copied beside them."""

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

NEEDS: Mapping[str, str] = {
    "adlr_autoresume_interval": "adlr_autoresume",
    "barrier_with_L1_time": "timing_log_level",
    "calc_ft_timeouts": "enable_ft_package",
    "ckpt_convert_save": "ckpt_convert_format",
    "cuda_graph_modules": "cuda_graph_impl",
    "cuda_graph_scope": "cuda_graph_impl",
    "cuda_graph_scope_deprecated": "cuda_graph_impl",
    "cuda_graph_warmup_steps": "cuda_graph_impl",
    "data_sharding": "dataloader_type",
    "disable_straggler_on_startup": "log_straggler",
    "error_injection_rate": "rerun_mode",
    "error_injection_type": "rerun_mode",
    "exit_signal": "exit_signal_handler",
    "fault_injector_delay_start_iteration": "fault_injector_num_ranks",
    "fault_injector_fault_delay": "fault_injector_num_ranks",
    "fault_injector_fault_probabilities": "fault_injector_num_ranks",
    "fault_injector_fault_types": "fault_injector_num_ranks",
    "fault_injector_mtti_seconds": "fault_injector_num_ranks",
    "fault_injector_offset_seconds": "fault_injector_num_ranks",
    "fault_injector_seed": "fault_injector_num_ranks",
    "flight_recorder_dump_on_timeout": "flight_recorder_dump_path",
    "flight_recorder_extra_dump_on_exec": "flight_recorder_dump_path",
    "flight_recorder_include_only_active": "flight_recorder_dump_path",
    "flight_recorder_include_stack_trace": "flight_recorder_dump_path",
    "flight_recorder_trace_buffer_size": "flight_recorder_dump_path",
    "fsdp_manual_registration": "use_megatron_fsdp",
    "ft_num_warmup_iters": "enable_ft_package",
    "grpo_group_size": "perform_rl_step",
    "grpo_iterations": "perform_rl_step",
    "grpo_prompts_per_step": "perform_rl_step",
    "grpo_samples_per_iteration": "perform_rl_step",
    "gtp_expert_remat_nccl_ub": "expert_tensor_parallel_num_weight_shards",
    "gtp_remat_nccl_ub": "tensor_parallel_num_weight_shards",
    "hierarchical_context_parallel_sizes": "context_parallel_size",
    "inprocess_active_world_size": "inprocess_restart",
    "inprocess_barrier_timeout": "inprocess_restart",
    "inprocess_completion_timeout": "inprocess_restart",
    "inprocess_empty_cuda_cache": "inprocess_restart",
    "inprocess_granularity": "inprocess_restart",
    "inprocess_hard_timeout": "inprocess_restart",
    "inprocess_heartbeat_interval": "inprocess_restart",
    "inprocess_heartbeat_timeout": "inprocess_restart",
    "inprocess_last_call_wait": "inprocess_restart",
    "inprocess_monitor_process_interval": "inprocess_restart",
    "inprocess_monitor_thread_interval": "inprocess_restart",
    "inprocess_soft_timeout": "inprocess_restart",
    "inprocess_termination_grace_time": "inprocess_restart",
    "manual_gc_eval": "manual_gc",
    "manual_gc_interval": "manual_gc",
    "memory_snapshot_path": "record_memory_history",
    "moe_routing_trace_capture_hidden_states": "moe_routing_trace_path",
    "moe_routing_trace_capture_logits": "moe_routing_trace_path",
    "moe_routing_trace_dump_weights": "moe_routing_trace_path",
    "moe_routing_trace_max_training_iters": "moe_routing_trace_path",
    "mtp_use_repeated_layer": "mtp_num_layers",
    "non_persistent_ckpt_type": "non_persistent_save_interval",
    "non_persistent_global_ckpt_dir": "non_persistent_save_interval",
    "non_persistent_local_ckpt_algo": "non_persistent_save_interval",
    "non_persistent_local_ckpt_dir": "non_persistent_save_interval",
    "otel_service_name": "otel_enabled",
    "otel_span_groups": "otel_enabled",
    "profile_ranks": "profile",
    "profile_step_end": "profile",
    "profile_step_start": "profile",
    "pytorch_profiler_collect_callstack": "profile",
    "pytorch_profiler_collect_chakra": "profile",
    "pytorch_profiler_collect_shapes": "profile",
    "record_shapes": "profile",
    "refit_method": "perform_rl_step",
    "replication": "non_persistent_save_interval",
    "replication_factor": "non_persistent_save_interval",
    "replication_jump": "non_persistent_save_interval",
    "reuse_grad_buf_for_mxfp8_param_ag": "fp8",
    "rl_durable_rollout_bank": "perform_rl_step",
    "rl_inference_expert_model_parallel_size": "perform_rl_step",
    "rl_inference_expert_tensor_model_parallel_size": "perform_rl_step",
    "rl_inference_logprobs_is_correction": "perform_rl_step",
    "rl_inference_model_unified_memory_level": "perform_rl_step",
    "rl_inference_pipeline_model_parallel_size": "perform_rl_step",
    "rl_inference_tensor_model_parallel_size": "perform_rl_step",
    "rl_offload_inference_model_weights_when_idle": "perform_rl_step",
    "rl_offload_optimizer_during_inference": "perform_rl_step",
    "rl_profile": "perform_rl_step",
    "rl_profile_dir": "perform_rl_step",
    "rl_use_sequence_packing": "perform_rl_step",
    "sharp_enabled_group": "use_sharp",
    "straggler_ctrlr_port": "log_straggler",
    "straggler_minmax_count": "log_straggler",
    "strict_fsdp_dtensor_load": "use_megatron_fsdp",
    "tp_comm_bootstrap_backend": "tp_comm_overlap",
    "tp_comm_overlap_cfg": "tp_comm_overlap",
    "use_mp_args_from_checkpoint_args": "use_checkpoint_args",
    "use_pytorch_profiler": "profile",
    "use_tokenizer_model_from_checkpoint_args": "use_checkpoint_args",
    "validation_set_names": "multiple_validation_sets",
    "vision_pretraining_type": "vision_pretraining",
}
"""Arguments that mean nothing without another one, which is named or declines."""

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
