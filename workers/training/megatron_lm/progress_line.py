"""Megatron-LM's progress line, validation lines and TensorBoard scalars, from Unicron's values.

All ranks keep what they need, because any may become the last one, which prints and writes.
"""

import datetime
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from ..adopt.adoption import Job


class StepResult(NamedTuple):
    """What the step of Megatron's optimizer returns. `num_zeros` counts this rank's part."""

    stepped: bool
    grad_norm: float | None
    num_zeros: float | None


class Norms(NamedTuple):
    """Values of the whole model that need collectives; None if not asked for or not known."""

    params_norm: float | None = None
    num_zeros: float | None = None


class Progress:
    """Counts skipped iterations and composes lines. `training`: megatron.training.training."""

    def __init__(self, args: Any, training: Any, writer: Any) -> None:
        self._args, self._training, self._writer = args, training, writer
        self._skipped: set[int] = set()
        self._last: StepResult | None = None
        self._auxiliary: dict[int, Mapping[str, float]] = {}

    def stepped(
        self, iteration: int, result: StepResult | None, auxiliary_losses: Mapping[str, float]
    ) -> None:
        """After `iteration`, from 1 on. `result` None: this rank received the state after it."""
        self._last = result
        first = self._first(iteration)
        self._auxiliary = {
            number: losses
            for number, losses in self._auxiliary.items()
            if first < number < iteration
        }
        self._auxiliary[iteration] = auxiliary_losses
        self._skipped.discard(iteration)
        if result is not None and not result.stepped:
            self._skipped.add(iteration)

    def is_due(self, iteration: int) -> bool:
        """Megatron-LM also prints the first iteration, whatever its interval is."""
        return iteration % self._args.log_interval == 0 or iteration == 1

    def is_written(self, iteration: int) -> bool:
        return bool(self._args.tensorboard_dir) and (
            iteration % self._args.tensorboard_log_interval == 0
        )

    def report(self, job: Job, norms: Norms) -> None:
        """On the last rank, print the line and write to TensorBoard, as far as they are due."""
        if not job.is_last:
            return
        args, iteration = self._args, self._args.iteration
        loss_scale = float(job.optimizer.get_loss_scale().item())
        rate = get_canonical_lr_for_logging(job.optimizer.param_groups) or 0.0
        if self.is_written(iteration):
            self._write(self._scalars(job, norms, rate, loss_scale), iteration)
        if not self.is_due(iteration):
            return
        first = self._first(iteration)
        history = job.history(first)
        elapsed_s = math.fsum(seconds for _, seconds in history.values()) / len(history)
        throughput = self._training.num_floating_point_operations(args, args.global_batch_size) / (
            elapsed_s * 10**12 * args.world_size
        )
        if args.log_timers_to_tensorboard and iteration > 1:
            timed = {"iteration-time": elapsed_s}
            self._write(
                timed | ({"throughput": throughput} if args.log_throughput else {}), iteration
            )
        losses = {index + 1: loss for index, (loss, _) in history.items()}
        skipped = self._skipped & losses.keys()
        parts = [
            f" [{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f}] iteration "
            f"{iteration:8d}/{args.train_iters:8d}",
            f"consumed samples: {args.consumed_train_samples:12d}",
            f"elapsed time per iteration (ms): {elapsed_s * 1000.0:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {throughput:.1f}" if args.log_throughput else "",
            f"learning rate: {rate:.6E}",
            f"global batch size: {args.global_batch_size:5d}",
            _loss("lm loss", [loss for number, loss in losses.items() if number not in skipped]),
            *self._auxiliary_losses(),
            f"loss scale: {loss_scale:.1f}",
            *self._norms(norms),
            f"number of skipped iterations: {len(skipped):3d}",
            "number of nan iterations: "
            f"{sum(not math.isfinite(losses[number]) for number in skipped):3d}",
        ]
        _print(f"{' | '.join(part for part in parts if part)} |")

    def validated(self, job: Job, where: str, loss: float) -> None:
        if not job.is_last:
            return
        perplexity = math.exp(min(20.0, loss))
        text = (
            f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: "
            f"{perplexity:.6E} | "
        )
        rule = "-" * (len(text) + 1)
        _print(f"{rule}\n{text}\n{rule}")
        values = {"lm loss validation": loss}
        if self._args.log_validation_ppl_to_tensorboard:
            values["lm loss validation ppl"] = perplexity
        for name, value in values.items():
            self._write({name: value}, self._args.iteration)
            self._write({f"{name} vs samples": value}, self._args.consumed_train_samples)

    def _first(self, iteration: int) -> int:
        """The iterations before those whose mean is printed. Megatron-LM does not start its sums
        anew after the first iteration."""
        before = (iteration - 1) // self._args.log_interval * self._args.log_interval
        return 0 if before == 1 else before

    def _auxiliary_losses(self) -> list[str]:
        """Their means; a rank that has joined since then does not know the first ones."""
        known = list(self._auxiliary.values())
        return [_loss(name, [losses[name] for losses in known]) for name in known[-1]]

    def _norms(self, norms: Norms) -> list[str]:
        norm = self._last.grad_norm if self._last is not None else None
        return [
            f"grad norm: {norm:.3f}" if norm is not None else "",
            f"num zeros: {norms.num_zeros}" if norms.num_zeros is not None else "",
            f"params norm: {norms.params_norm:.3f}" if norms.params_norm is not None else "",
        ]

    def _scalars(self, job: Job, norms: Norms, rate: float, loss_scale: float) -> dict[str, float]:
        args = self._args
        values: dict[str, float | None] = {
            "learning-rate": rate,
            "batch-size": args.global_batch_size,
            "lm loss": job.loss,
            "grad-norm": self._last.grad_norm if self._last is not None else None,
            "num-zeros": norms.num_zeros,
            "params-norm": norms.params_norm,
            "loss-scale": loss_scale if args.log_loss_scale_to_tensorboard else None,
            "world-size": args.world_size if args.log_world_size_to_tensorboard else None,
            **job.auxiliary_losses,
        }
        if args.log_memory_to_tensorboard:
            memory = torch.cuda.memory_stats()
            values |= {
                "mem-reserved-bytes": memory["reserved_bytes.all.current"],
                "mem-allocated-bytes": memory["allocated_bytes.all.current"],
                "mem-max-allocated-bytes": memory["allocated_bytes.all.peak"],
                "mem-allocated-count": memory["allocation.all.current"],
            }
        return {name: value for name, value in values.items() if value is not None}

    def _write(self, values: Mapping[str, float], step: int) -> None:
        """Every rank has a writer; TensorBoard merges their files."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


def _loss(name: str, losses: Sequence[float]) -> str:
    mean = math.fsum(losses) / max(1, len(losses))
    return f"{name}: {mean:.6E}" if mean > 0.0 else ""


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
