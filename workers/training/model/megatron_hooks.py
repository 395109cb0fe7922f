"""Hooks on Megatron's own phases of reduction and step, which tell of each phase as it begins.

They change nothing. Megatron's reduction is one call for all buckets, so they are also how Unicron
leaves it between two of them.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..process.trace import Note
from .engine import Watch
from .optimizers import scalers
from .trainee import TrainingModel


class PhaseHooks:
    """Hooks on the model's buckets and on the tied embedding; `watch_step` sets those on its
    optimizer."""

    def __init__(self, trainee: TrainingModel) -> None:
        self._local = threading.local()  # an abandoned reduction may still run in another thread
        for index, group in enumerate(trainee.bucket_groups if not trainee.train.overlap else ()):
            _hook(
                group, "finish_grad_sync", partial(self._enter, index), partial(self._leave, index)
            )
        for module in {trainee.modules[0], trainee.modules[-1]} if trainee.axes.pp > 1 else ():
            if getattr(module, "share_embeddings_and_output_weights", False):
                _hook(module, "shared_embedding_or_output_weight", self._embedding)

    @contextmanager
    def reduction(self, watch: Watch) -> Generator[None]:
        """In this context of Megatron's reduction, `watch` is told how it goes on."""
        self._local.watch = watch
        self._local.is_in = True
        try:
            yield
        finally:
            self._local.is_in = False

    def _enter(self, bucket: int) -> None:
        self._local.watch.bucket_begins(bucket)

    def _leave(self, bucket: int) -> None:
        self._local.watch.bucket_ends(bucket)

    def _embedding(self) -> None:
        """Megatron calls this before it adds up the tied weight's two gradients, and in passes."""
        if getattr(self._local, "is_in", False):
            self._local.watch.tied_begins()


def watch_step(optimizer: Any, note: Note) -> None:
    """Call `note` as each phase of the optimizer's step begins."""
    _hook(optimizer, "prepare_grads", lambda: note("unscale"))
    for scaler in scalers(optimizer):
        _hook(scaler, "update", lambda: note("scaler"))
    _hook(optimizer, "get_grad_norm", lambda: note("norm"), lambda: note("clip"))
    _hook(optimizer, "step_with_ready_grads", lambda: note("step"), lambda: note("stepped"))


def _hook(
    thing: Any, method: str, before: Callable[[], None], after: Callable[[], None] | None = None
) -> None:
    """Call `before` and `after` around this method of `thing`."""
    original = getattr(thing, method)

    def hooked(*args: Any, **options: Any) -> Any:
        before()
        result = original(*args, **options)
        if after is not None:
            after()
        return result

    setattr(thing, method, hooked)
