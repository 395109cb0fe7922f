"""Megatron's own phases, seen from outside: nothing of it is changed, only told as it begins.

The reduction and the step are Megatron's. What of it has begun, and what is whole, is read off its
objects' methods: each bucket group's `finish_grad_sync`, and the optimizer's parts of a step.
Where the reduction is overlapped, flight.py tells of the buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

from torch import Tensor

from ..model.optimizers import parts, scalers
from ..model.trainee import Trainee
from ..process.trace import Note


class Watched:
    """The trainee's buckets and its optimizer; `closely`: the inside of its passes too.

    A reduction may be left behind in a thread of its own (control.py): what it still does there
    counts nowhere.
    """

    def __init__(self, trainee: Trainee, note: Note, *, closely: bool) -> None:
        self._note = note
        self._mine = threading.local()
        for index, group in enumerate(trainee.bucket_groups if not trainee.train.overlap else ()):
            _around(group, "finish_grad_sync", partial(self._enter, index),
                    partial(self._leave, index))
        optimizer = trainee.optimizer
        _around(optimizer, "prepare_grads", lambda: note("unscale"))
        for scaler in scalers(optimizer):
            _around(scaler, "update", lambda: note("scaler"))
        _around(optimizer, "get_grad_norm", lambda: note("norm"), lambda: note("clip"))
        _around(optimizer, "step_with_ready_grads", lambda: note("step"), lambda: note("stepped"))
        for module in {trainee.modules[0], trainee.modules[-1]} if trainee.axes.pp > 1 else ():
            if getattr(module, "share_embeddings_and_output_weights", False):
                _around(module, "shared_embedding_or_output_weight", self._embedding)
        if closely:
            layers = trainee.modules[0].decoder.layers
            middle = layers[len(layers) // 2]
            middle.register_forward_hook(self._middle)
            if trainee.axes.tp > 1:
                middle.mlp.linear_fc2.register_forward_pre_hook(self._tensor)
            for part in parts(optimizer):
                # AdamW begins each of its groups of parameters with this.
                _around(part, "_init_group",
                        partial(self._begin_group, cycle(range(len(part.param_groups)))))

    @contextmanager
    def reduction(self, complete: list[bool], goes_on: Callable[[], None]) -> Generator[None]:
        """Within this, `complete` says of each bucket that was begun whether it was seen whole.

        `goes_on` raises as soon as the reduction is to be left.
        """
        self._mine.complete = complete
        self._mine.goes_on = goes_on
        self._mine.is_in = True
        try:
            yield
        finally:
            self._mine.is_in = False

    def _enter(self, bucket: int) -> None:
        self._note("bucket", bucket)
        self._mine.goes_on()
        self._mine.complete.append(False)

    def _leave(self, bucket: int) -> None:
        self._note("bucket_done", bucket)
        self._mine.goes_on()
        self._mine.complete[-1] = True

    def _embedding(self) -> None:
        """Megatron asks for the tied weight whose two gradients it then adds up; passes ask too."""
        if getattr(self._mine, "is_in", False):
            self._note("embedding")
            self._mine.goes_on()

    def _begin_group(self, turns: Iterator[int]) -> None:
        if next(turns):  # the groups before this one have been stepped
            self._note("step_mid")

    def _tensor(self, module: Any, given: Any) -> None:
        self._note("tensor")

    def _middle(self, module: Any, given: Any, made: Any) -> None:
        self._note("forward_mid")
        hidden = made[0] if isinstance(made, tuple) else made
        if hidden.requires_grad:
            hidden.register_hook(self._middle_of_backward)

    def _middle_of_backward(self, gradient: Tensor) -> None:
        self._note("backward_mid")


def _around(thing: Any, method: str, before: Callable[[], None],
            after: Callable[[], None] | None = None) -> None:
    """Have `thing` say when this method of it begins, and when it has come back."""
    right = getattr(thing, method)

    def told(*args: Any, **options: Any) -> Any:
        before()
        answer = right(*args, **options)
        if after is not None:
            after()
        return answer

    setattr(thing, method, told)
