"""Megatron-LM's own loop, for arguments that cannot be healed in place: it restarts from memory.

Each process stores its state after every `loop.copy_every` iterations. After a fault all processes
start again, in the same number, and the loop continues where a checkpoint of that iteration would
let it continue.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from ..adopt.own_loop import OwnLoop, keep_in_memory
from ..checkpoint.process_state import generators, set_generators
from ..model.training_state import load_objects, objects_tree

from megatron.core import tensor_parallel  # isort: skip

SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""The arguments in which Megatron-LM counts samples."""


def train(
    why: str, training: Any, get_args: Callable[[], Any], pretrain: Callable[[], None]
) -> None:
    """Call Megatron-LM's `pretrain`. `training`: its module; `why`: what cannot be healed."""
    with keep_in_memory(why) as memory:
        run = StoredRun(memory, training, get_args)
        training.setup_model_and_optimizer = run.set_up
        training.train = run.train
        training.checkpoint_and_decide_exit = run.decide_exit
        if run.can_save:
            training.save_checkpoint = run.save
        pretrain()


class StoredRun:
    """Stands in for four functions of the module `training`, and calls them."""

    def __init__(self, memory: OwnLoop, training: Any, get_args: Callable[[], Any]) -> None:
        self._memory, self._training, self._get_args = memory, training, get_args
        self._set_up = training.setup_model_and_optimizer
        self._train, self._decide_exit = training.train, training.checkpoint_and_decide_exit
        self._save: Any = getattr(training, "save_checkpoint", None)
        self._generators: Any = None

    def set_up(self, *given: Any, **named: Any) -> Any:
        model, optimizer, scheduler = found = self._set_up(*given, **named)
        args = self._get_args()

        def state() -> Any:
            return self._state(model, optimizer, scheduler, 0)

        def load(tree: Any) -> None:
            load_objects(model, optimizer, scheduler, tree["objects"])
            vars(args).update(tree["samples"])
            args.num_floating_point_operations_so_far = tree["flops"]
            self._generators = tree["generators"], tree["tracker"]

        if optimizer is not None:
            args.iteration = self._memory.resume(state, load, after=args.iteration) or (
                args.iteration
            )
        return found

    def train(self, *given: Any, **named: Any) -> Any:
        """Train. What was drawn since the start, for example by data loaders, counts no more."""
        if self._generators is not None:
            states, tracked = self._generators
            set_generators(states)
            _set_tracked(tracked)
        return self._train(*given, **named)

    def decide_exit(
        self,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        iteration: int,
        flops: float,
        *rest: Any,
    ) -> Any:
        """After each iteration: store the state if it is due."""
        if self._memory.is_due(iteration):
            if self._training.should_disable_forward_pre_hook(self._get_args()):
                # Else the parameters are gathered in the next iteration, which is not stored.
                sync = self._training.force_param_sync
                sync(model, *([optimizer] if "optimizer" in signature(sync).parameters else []))
            self._memory.stepped(iteration, lambda: self._state(model, optimizer, scheduler, flops))
        return self._decide_exit(model, optimizer, scheduler, iteration, flops, *rest)

    @property
    def can_save(self) -> bool:
        return self._save is not None

    def save(self, iteration: int, *given: Any, **named: Any) -> Any:
        """Megatron-LM's own save. A failure ends the process, as ranks wait for each other in it;
        it is reported first."""
        args = self._get_args()
        final = iteration >= (args.train_iters or 0)
        with self._memory.telling_of_save(str(args.save), iteration, final=final):
            return self._save(iteration, *given, **named)

    def _state(self, model: Sequence[Any], optimizer: Any, scheduler: Any, flops: float) -> Any:
        args = self._get_args()
        return {
            "objects": objects_tree(model, optimizer, scheduler),
            "samples": {name: getattr(args, name) for name in SAMPLES},
            "flops": flops,
            "generators": generators(),
            "tracker": _tracked(),
        }


def _tracked() -> dict[str, Any]:
    """The states of Megatron's tracker of random generators; with CUDA graphs it has generators."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.get_states().items()
    }


def _set_tracked(stored: dict[str, Any]) -> None:
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in stored.items():
        if isinstance(states.get(name), torch.Generator):
            states[name].set_state(state)
        else:
            states[name] = state
    tracker.set_states(states)
