"""Hooks on Megatron's own phases, which report each phase as it begins and change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ..dependencies.private_torch import before_each_group
from ..model.optimizers import is_fused, parts, scalers
from ..model.trainee import TrainingModel
from ..process.trace import Note


class PhaseHooks:
    """Hooks on the model's buckets and its optimizer; with `closely`, also inside the passes."""

    def __init__(self, trainee: TrainingModel, note: Note, *, closely: bool) -> None:
        self._note = note
        self._local = threading.local()  # an abandoned reduction may still run in another thread
        for index, group in enumerate(trainee.bucket_groups if not trainee.train.overlap else ()):
            _hook(group, "finish_grad_sync", partial(self._enter, index),
                  partial(self._leave, index))
        optimizer = trainee.optimizer
        _hook(optimizer, "prepare_grads", lambda: note("unscale"))
        for scaler in scalers(optimizer):
            _hook(scaler, "update", lambda: note("scaler"))
        _hook(optimizer, "get_grad_norm", lambda: note("norm"), lambda: note("clip"))
        _hook(optimizer, "step_with_ready_grads", lambda: note("step"), lambda: note("stepped"))
        for module in {trainee.modules[0], trainee.modules[-1]} if trainee.axes.pp > 1 else ():
            if getattr(module, "share_embeddings_and_output_weights", False):
                _hook(module, "shared_embedding_or_output_weight", self._embedding)
        if closely:
            layers = trainee.modules[0].decoder.layers
            middle = layers[len(layers) // 2]
            middle.register_forward_hook(self._middle)
            if trainee.axes.tp > 1:
                last = getattr(middle.mlp, "linear_fc2", middle.self_attention.linear_proj)
                last.register_forward_pre_hook(self._tensor)
            for part in parts(optimizer):
                if is_fused(part):  # it steps all groups in one call
                    continue
                before_each_group(
                    part, partial(self._begin_group, cycle(range(len(part.param_groups)))))

    @contextmanager
    def reduction(self, complete: list[bool], check_active: Callable[[], None]) -> Generator[None]:
        """In this context, `complete` gets an entry per begun bucket: True if it was completed.
        `check_active` raises as soon as the reduction must be left."""
        self._local.complete = complete
        self._local.check_active = check_active
        self._local.is_in = True
        try:
            yield
        finally:
            self._local.is_in = False

    def _enter(self, bucket: int) -> None:
        self._note("bucket", bucket)
        self._local.check_active()
        self._local.complete.append(False)

    def _leave(self, bucket: int) -> None:
        self._note("bucket_done", bucket)
        self._local.check_active()
        self._local.complete[-1] = True

    def _embedding(self) -> None:
        """Megatron calls this before it adds up the tied weight's two gradients, and in passes."""
        if getattr(self._local, "is_in", False):
            self._note("embedding")
            self._local.check_active()

    def _begin_group(self, turns: Iterator[int]) -> None:
        if next(turns):  # the previous groups have been stepped
            self._note("step_mid")

    def _tensor(self, module: Any, inputs: Any) -> None:
        self._note("tensor")

    def _middle(self, module: Any, inputs: Any, output: Any) -> None:
        self._note("forward_mid")
        hidden = output[0] if isinstance(output, tuple) else output
        # Without gradients it is the first forward of a layer that is recomputed. A hook would keep
        # later ones from the output of the whole recomputation, which is the same tensor.
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(self._middle_of_backward)

    def _middle_of_backward(self, gradient: Tensor) -> None:
        self._note("backward_mid")


def _hook(thing: Any, method: str, before: Callable[[], None],
          after: Callable[[], None] | None = None) -> None:
    """Call `before` and `after` around this method of `thing`."""
    original = getattr(thing, method)

    def hooked(*args: Any, **options: Any) -> Any:
        before()
        result = original(*args, **options)
        if after is not None:
            after()
        return result

    setattr(thing, method, hooked)
