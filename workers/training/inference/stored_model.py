"""Finds the checkpoint of a task, and reads its model without the optimizer's state."""

from collections.abc import Generator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from ....events.decoding import from_json
from ....events.errors import UsageError
from ....events.object_storage import Store, reason
from ....events.spec.job import is_url
from ..checkpoint.stored_state import StoredState
from ..model import architecture
from ..recovery.regions import State, kind_of, shape_of
from ..recovery.resharding import Region, Shard
from .decoder import Decoder

_GUIDE = "docs/guides/model.md shows the file"
_LATEST = "latest"


class StoredModel(NamedTuple):
    """The model of a checkpoint; `numbers` are those of training_state.py."""

    of: architecture.Gpt2
    numbers: dict[str, Any]
    stored: StoredState

    @property
    def num_params(self) -> int:
        return sum(
            prod(shape_of(kind))
            for key, kind in self.stored.kinds.items()
            if key.startswith("model.")
        )


def find(path: str) -> StoredModel:
    """The model at a path or a URL: a checkpoint, or the output of a task, whose latest one it then
    is. Raises UsageError, also if the checkpoint is damaged or not of a job's `train:`."""
    with _readable(path):
        stored = StoredState(_checkpoint_at(path))
        numbers = stored.numbers()
        data = stored.file(architecture.FILE)
    if data is None:
        raise UsageError(
            f"{stored.folder} has no {architecture.FILE}: an older release or a job's own script "
            "wrote it",
            f"{_GUIDE}, which you can write for a job with train:",
        )
    try:
        return StoredModel(architecture.decode(data), numbers, stored)
    except ValueError as error:
        raise UsageError(
            f"{stored.folder}: its {architecture.FILE} is not of a model that this "
            f"release knows: {error}",
            _GUIDE,
        ) from None


def load(path: str) -> Decoder:
    """The model with its weights, in the precision in which it was trained. Raises UsageError."""
    model = find(path)
    with torch.device("meta"):
        decoder = Decoder(model.of).to(getattr(torch, model.of.torch_dtype)).eval()
    with _readable(path):
        model.stored.check(_weights(decoder))
        model.stored.read(_weights(decoder.to_empty(device="cpu")))
    if sum(param.numel() for param in decoder.parameters()) != model.num_params:
        raise UsageError(
            f"{model.stored.folder} has weights that its {architecture.FILE} does not describe",
            _GUIDE,
        )
    return decoder


def _weights(decoder: Decoder) -> State:
    found: State = {}
    for name, param in decoder.named_parameters():
        shape = tuple(param.shape)
        region = Region((0,) * len(shape), shape)
        found[Shard(f"model.{name}", kind_of(param, shape), region)] = param.data
    return found


def _checkpoint_at(path: str) -> str:
    if not is_url(path):
        latest = Path(path, _LATEST)
        return str((latest if latest.is_dir() else Path(path)).resolve())
    output = path.rstrip("/").removesuffix(f"/{_LATEST}")
    if (note := Store(output).read(_LATEST)) is None:
        return output
    try:
        return f"{output}/{from_json(note, dict[str, Any])['path']}"
    except (msgspec.MsgspecError, KeyError):
        raise UsageError(
            f"{output}/{_LATEST} does not name a checkpoint",
            "name a checkpoint in the output: gen-G/iter-N",
        ) from None


@contextmanager
def _readable(path: str) -> Generator[None]:
    """Context that turns an OSError, also Damaged, into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path}: {reason(error)}",
            "name a task's output, its latest, or a checkpoint in it: gen-G/iter-N",
        ) from None
