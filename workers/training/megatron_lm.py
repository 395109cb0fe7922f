"""Megatron-LM's `pretrain` with in-memory recovery; deploy/megatron/pretrain_gpt.patch calls it.

Written against core_v0.16.1. From Megatron-LM's `megatron.training` it uses `initialize_megatron`
(arguments and globals, no communicators), `setup_model_and_optimizer` and `get_args`. From the
script it uses the providers and `forward_step`. Its loops replace `train` and `evaluate`:

- samples are read from the dataset by index, in the order of Megatron-LM's sequential sampler, so
  that a sample is equal on every rank;
- the arguments describe one replica: `get_num_microbatches()` counts the whole batch, and the
  number of ranks need not divide it. `args.rank`, `args.world_size`, `args.data_parallel_size` and
  `parallel_state` follow each generation;
- the current members share the micro-batches of an evaluation, and the result is the mean of all;
- the current last rank prints the progress line and writes to TensorBoard.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch.distributed as dist
from torch.utils.data import default_collate

from ..ipc.pipe_protocol import FD

from .adopt.adoption import Declined, Job, adopt  # before megatron  # isort: skip

REFUSED: Mapping[str, str] = {
    "rampup_batch_size": "the batch grows (--rampup-batch-size)",
    "use_torch_fsdp2": "FSDP (--use-torch-fsdp2)",
    "use_megatron_fsdp": "FSDP (--use-megatron-fsdp)",
    "fp8": "FP8 scales are not part of the known state (--fp8-format)",
    "enable_cuda_graph": "CUDA graphs keep their communicators (--enable-cuda-graph)",
    "num_experts": "experts couple the ranks (--num-experts)",
    "overlap_param_gather": "parameters are gathered in the next forward (--overlap-param-gather)",
}
"""Arguments that prevent in-memory recovery if they are set, and the reasons."""


class Plan:
    """The sizes that follow from a script's arguments."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.rows = int(args.micro_batch_size)
        self.micro_batches = int(args.global_batch_size) // self.rows
        self.iterations = int(args.train_iters or args.train_samples // args.global_batch_size)
        self.is_per_token = bool(args.calculate_per_token_loss)

    def why_not(self) -> str:
        """Why in-memory recovery does not support these arguments; empty if it does."""
        args = self.args
        for name, why in REFUSED.items():
            if getattr(args, name, None):
                return why
        if getattr(args, "context_parallel_size", 1) > 1:
            return "context parallelism couples the ranks (--context-parallel-size)"
        if getattr(args, "dataloader_type", "single") not in (None, "single"):
            return f"its data has no random access (--dataloader-type {args.dataloader_type})"
        if (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1:
            return "interleaved pipelines are not supported here (interleaving)"
        if getattr(args, "load", None):
            return "training begins from a checkpoint of Megatron-LM (--load)"
        return ""


def healing(pretrain: Callable[..., None], on_rebuild: Callable[[Any], Any] | None = None
            ) -> Callable[..., None]:
    """Wrap Megatron-LM's `pretrain`. Without an agent, return it unchanged. If in-memory recovery
    does not support the arguments, the wrapper runs the script again without Unicron."""
    if FD not in os.environ:
        return pretrain

    def adopted(datasets: Callable[..., Any], model_provider: Any, model_type: Any,
                forward_step: Any, *rest: Any, extra_args_provider: Any = None,
                args_defaults: Any = None, **more: Any) -> None:
        # Describe one replica, so that Megatron counts the micro-batches of the whole batch.
        original = dict(os.environ)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        _megatron("initialize").initialize_megatron(
            extra_args_provider=extra_args_provider, args_defaults=args_defaults or {},
            allow_no_cuda=True, skip_mpu_initialization=True)
        plan = Plan(_megatron("global_vars").get_args())
        try:
            _train(plan, datasets, model_provider, model_type, forward_step, on_rebuild)
        except Declined as why:
            sys.stderr.write(f"{why}; it is restarted as any command\n")
            _run_without_unicron(original)

    return adopted


def _megatron(name: str) -> Any:
    """A module of megatron.training, which only Megatron-LM contains."""
    return import_module(f"megatron.training.{name}")


def _run_without_unicron(environment: Mapping[str, str]) -> NoReturn:
    """Restart the same script in this process without Unicron, as a plain command."""
    sys.stderr.flush()
    sys.stdout.flush()
    plain = {name: value for name, value in environment.items() if name != FD}
    os.execve(sys.executable, [sys.executable, *sys.argv], plain)


def _train(plan: Plan, datasets: Callable[..., Any], model_provider: Any, model_type: Any,
           forward_step: Any, on_rebuild: Callable[[Any], Any] | None) -> None:
    args, rows = plan.args, plan.rows
    # Megatron must not scale gradients by the number of replicas: Unicron's step divides the sum.
    args.calculate_per_token_loss = True
    args.enable_gloo_process_groups = False
    eval_iters = int(args.eval_iters or 0)
    num_evaluations = plan.iterations // args.eval_interval if args.eval_interval else 0
    per_evaluation = eval_iters * plan.micro_batches * rows
    train_set, valid_set, _ = datasets([plan.iterations * args.global_batch_size,
                                        num_evaluations * per_evaluation, 0])

    def sizes(tp: int, pp: int) -> tuple[int, int]:
        """Set the sizes of the model that is built or trained next; returns the previous ones."""
        before = getattr(args, "tensor_model_parallel_size", 1), getattr(
            args, "pipeline_model_parallel_size", 1)
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
        return before

    def rebuilt(groups: Any) -> Any:
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
        args.data_parallel_size = groups.dp.size()
        sizes(groups.tp.size(), groups.pp.size())
        return on_rebuild(groups) if on_rebuild is not None else None

    def build(groups: Any, axes: Any, place: int) -> tuple[Sequence[Any], Any, Any]:
        trained = sizes(axes.tp, axes.pp)  # may be a whole replica, to load a checkpoint
        model, optimizer, scheduler = _megatron("training").setup_model_and_optimizer(
            model_provider, model_type)
        sizes(*trained)
        return model, optimizer, scheduler

    def batch_of(dataset: Any, first: int) -> Any:
        return default_collate([dataset[first + row] for row in range(rows)])

    def sample(iteration: int, micro_batch: int) -> Any:
        return batch_of(train_set, (iteration * plan.micro_batches + micro_batch) * rows)

    def forward(chunk: Any, batch: Any) -> tuple[Any, Any]:
        out, loss_func = forward_step(iter([copy.copy(batch)]), chunk)
        return out, loss_func

    with adopt(build=build, sample=sample, forward=forward, iterations=plan.iterations,
               micro_batches=plan.micro_batches, samples=rows, seed=int(args.seed),
               sequence=int(args.seq_length),
               loss="per_token" if plan.is_per_token else "per_micro_batch",
               on_rebuild=rebuilt, check=[plan.why_not], falls_back=False) as job:
        for _ in job:
            args.curr_iteration = args.iteration = job.step() + 1
            args.consumed_train_samples = args.iteration * args.global_batch_size
            if args.iteration % args.log_interval == 0:
                _report_progress(plan, job)
            if args.eval_interval and args.iteration % args.eval_interval == 0 and eval_iters:
                first = (args.iteration // args.eval_interval - 1) * per_evaluation

                def mean(first: int = first) -> float:
                    return job.mean_loss(eval_iters * plan.micro_batches, lambda item: batch_of(
                        valid_set, first + item * rows))

                loss = job.evaluate(mean)
                if loss is not None:
                    _report_evaluation(plan, job, loss)


def _report_progress(plan: Plan, job: Job) -> None:
    """Print Megatron-LM's progress line on the current last rank."""
    args = plan.args
    if not job.is_last:
        return
    rate = job.optimizer.param_groups[0]["lr"]
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    sys.stdout.write(
        f" [{now}] iteration {args.iteration:8d}/{plan.iterations:8d} | consumed samples: "
        f"{args.consumed_train_samples:12d} | elapsed time per iteration (ms): "
        f"{job.step_s * 1000:.1f} | learning rate: {rate:.6E} | global batch size: "
        f"{args.global_batch_size:5d} | lm loss: {job.loss:.6E} |\n")
    sys.stdout.flush()
    _write({"lm loss": job.loss, "learning-rate": rate}, args.iteration)


def _report_evaluation(plan: Plan, job: Job, loss: float) -> None:
    if job.is_last:
        sys.stdout.write(f" validation loss at iteration {plan.args.iteration} | lm loss value: "
                         f"{loss:.6E} | lm loss PPL: {math.exp(min(20.0, loss)):.6E} |\n")
        sys.stdout.flush()
        _write({"lm loss validation": loss}, plan.args.iteration)


def _write(values: Mapping[str, float], iteration: int) -> None:
    """Write to TensorBoard. Every rank has a writer, because any rank may become the last one;
    TensorBoard merges their files."""
    writer = _megatron("global_vars").get_tensorboard_writer()
    if writer is not None:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
