"""`--load`, `--save` and what belongs to them: Megatron-LM's checkpoints of a script's run.

Its own functions use collectives of all ranks, which a fault would leave half-done. Here each
member reads its part (megatron_state.py), and all write in the background (megatron_format.py).
"""

import copy
from collections.abc import Callable
from typing import Any

from ....events.errors import UsageError
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..checkpoint.megatron_format import MegatronFormat, iteration_folder
from ..checkpoint.megatron_state import RELEASE, MegatronState, newest
from ..model.trainee import TrainingModel
from ..process.history import History

COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
"""Arguments that must be those of the run that wrote a checkpoint, as for Megatron-LM."""


class Checkpoints:
    """The checkpoints of a run with these validated arguments. Raises UsageError if the checkpoint
    to load cannot be used."""

    def __init__(self, args: Any, vocabulary: int, flops_of: Callable[[], float]) -> None:
        self._args, self._vocabulary, self._flops_of = args, vocabulary, flops_of
        self._load, self._pretrained = args.load, args.pretrained_checkpoint
        self.first_sample = self.first_valid_sample = 0
        """The samples that were used before the first iteration, by runs with another batch size or
        another evaluation. They do not depend on which checkpoint of a run is the newest."""
        self._flops_before = 0.0
        path, weights_only = self._newest()
        if not path:
            return
        state = MegatronState(path)
        if not weights_only:
            _compare(state, args)
            at = state.iteration
            self.first_sample = int(state.args.get("consumed_train_samples", 0)) - (
                at * args.global_batch_size
            )
            if used := int(state.args.get("consumed_valid_samples", 0)):
                self.first_valid_sample = used - self._num_valid_samples(at)
            self._flops_before = state.flops - at * flops_of()
        state.check()

    @property
    def exports(self) -> list[MegatronFormat]:
        if not self._args.save:
            return []
        return [
            MegatronFormat(
                self._args.save, self._args.save_interval or 0, self._values_beside_state
            )
        ]

    # --- Beginning (workload.py) ---
    def newest(self) -> int:
        path, weights_only = self._newest()
        return 0 if not path or weights_only else MegatronState(path).iteration

    def begin(self, trainee: TrainingModel, count: WorkCount = UNCOUNTED) -> bool:
        path, weights_only = self._newest()
        if not path or not weights_only:
            return False
        MegatronState(path).read(
            trainee,
            History(),
            with_optimizer=False,
            iteration=0,
            vocabulary=self._vocabulary,
            count=count,
        )
        return True

    def read(
        self,
        trainee: TrainingModel,
        step_version: int,
        history: History,
        count: WorkCount = UNCOUNTED,
    ) -> None:
        path = f"{self._load}/{iteration_folder(step_version)}"
        MegatronState(path).read(
            trainee,
            history,
            iteration=step_version,
            with_optimizer=not self._args.no_load_optim,
            vocabulary=self._vocabulary,
            count=count,
        )

    def _newest(self) -> tuple[str, bool]:
        """The checkpoint to load, or "", and whether only its weights are used."""
        args = self._args
        name = newest(self._load) if self._load else ""
        if self._load and args.ckpt_step:
            name = iteration_folder(args.ckpt_step)
        if name:
            return f"{self._load}/{name}", args.finetune or name == RELEASE
        if self._pretrained:
            name = newest(self._pretrained)
            if not name:
                raise UsageError(
                    f"neither {self._load} nor {self._pretrained} has a checkpoint of Megatron-LM",
                    "name one with --pretrained-checkpoint",
                )
            return f"{self._pretrained}/{name}", True
        if self._load and args.exit_on_missing_checkpoint:
            raise UsageError(
                f"{self._load} has no checkpoint of Megatron-LM",
                "name one with --load, or leave --exit-on-missing-checkpoint out",
            )
        return "", False

    def _values_beside_state(self, trainee: TrainingModel, iteration: int) -> dict[str, Any]:
        args = copy.copy(self._args)
        axes = trainee.axes
        args.rank, args.world_size = 0, axes.tp * axes.pp * axes.dp
        args.data_parallel_size = axes.dp
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size = axes.tp, axes.pp
        args.iteration = iteration
        args.consumed_train_samples = self.first_sample + iteration * args.global_batch_size
        args.consumed_valid_samples = self.first_valid_sample + self._num_valid_samples(iteration)
        args.skipped_train_samples = 0
        # Each micro-batch seeds the generators anew, so there is no state of theirs.
        args.no_save_rng = True
        return {
            "args": args,
            "num_floating_point_operations_so_far": self._flops_before
            + iteration * self._flops_of(),
        }

    def _num_valid_samples(self, iteration: int) -> int:
        args = self._args
        return num_evaluations(args, iteration) * int(args.eval_iters or 0) * eval_batch(args)


def num_evaluations(args: Any, iteration: int) -> int:
    """The evaluations between the iterations, up to the one after `iteration`."""
    every = int(args.eval_interval or 0)
    if not every:
        return 0
    num_skipped = max(0, (getattr(args, "start_eval_at_iter", None) or 0) - 1) // every
    return max(0, iteration // every - num_skipped)


def eval_batch(args: Any) -> int:
    """The samples in a batch of an evaluation."""
    return int(getattr(args, "eval_global_batch_size", None) or args.global_batch_size)


def _compare(state: MegatronState, args: Any) -> None:
    for name in COMPARED:
        stored = state.args.get(name, getattr(args, name))
        if stored != getattr(args, name):
            raise UsageError(
                f"{state.path} is of another model: its {name} is {stored}, the arguments say "
                f"{getattr(args, name)}",
                "give the arguments of the checkpoint's run, or name another checkpoint",
            )
