"""A trace of each optimizer step: the reduced gradients, their norm, Adam's moments, parameters.

`install` puts this file into a folder as `trace.py` (workers/training/process/trace.py): ranks
whose UNICRON_TRACE_DIR it is write `steps-RANK/N.pt` there, `steps` joins these. It records what
goes into and comes out of the optimizer, which is Megatron's own, under Unicron and in a stock loop
alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from unicron.workers.training.model import optimizers, training_state
from unicron.workers.training.process import trace

KINDS = ("gradient", "exp_avg", "exp_avg_sq", "value")


class Step(NamedTuple):
    """`norm`: as Megatron's step returns it. `of`: by kind (KINDS) and parameter, whole tensors.
    `value` is the parameter after the step, in 16 bits its master."""

    norm: float
    of: dict[str, dict[str, Tensor]]


class Piece(NamedTuple):
    """What one rank has of a parameter: flat, from element `start` of its tensor-parallel part."""

    start: int
    shape: tuple[int, ...]
    tp: int
    dim: int
    """The dimension that tensor-parallel ranks divide; -1: none."""
    of: dict[str, Tensor]


class Trace(trace.Trace):
    """The trace of one rank."""

    def __init__(self, folder: str, task: int, rank: int, attempt: int) -> None:
        super().__init__(rank)
        self._folder = Path(folder, f"steps-{rank}")

    def watch(self, engine: Any, note: trace.Note) -> None:
        record(engine.trainee, self._folder)


def install(folder: Path) -> None:
    """Let ranks whose UNICRON_TRACE_DIR is this folder record their steps there."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(__file__, folder / trace.FILE)


def record(trainee: Any, folder: Path) -> None:
    """Write a file into `folder` at each step that the model takes from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    step: Callable[[], Any] = trainee.optimizer.step

    def recorded() -> Any:
        scale = optimizers.scalers(trainee.optimizer)
        by = 1.0 / scale[0].scale.item() if scale else 1.0
        before = {
            name: param.main_grad.detach().view(-1).clone() * by
            for name, param in trainee.named_parameters()
        }
        found = step()
        if found[0]:
            pieces = _pieces(trainee, before)
            torch.save((found[1], pieces), folder / f"{len(list(folder.iterdir()))}.pt")
        return found

    trainee.optimizer.step = recorded


def _pieces(trainee: Any, gradients: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    owned = optimizers.ranges(trainee.optimizer) if trainee.is_sharded else {}
    state = training_state.tensors(trainee)
    found: dict[str, tuple[Any, ...]] = {}
    for name, param in trainee.named_parameters():
        if trainee.is_sharded and id(param) not in owned:
            continue  # another rank has its shard
        part = owned.get(id(param), slice(0, param.numel()))
        value = state.get(f"master.{name}", param.data.view(-1)[part] if owned else param.data)
        is_split = getattr(param, "tensor_model_parallel", False)
        of = {
            "gradient": gradients[name][part],
            "value": value,
        }
        if f"optimizer.exp_avg.{name}" in state:  # SGD has none
            of |= {kind: state[f"optimizer.{kind}.{name}"] for kind in ("exp_avg", "exp_avg_sq")}
        flat = {kind: tensor.detach().reshape(-1).clone() for kind, tensor in of.items()}
        dim = param.partition_dim if is_split and trainee.axes.tp > 1 else -1
        found[name] = (part.start, tuple(param.shape), trainee.at.tp, dim, flat)
    return found


def steps(folder: Path) -> list[Step]:
    """The steps that all ranks have recorded in `folder`. Replicas must agree to the bit."""
    ranks = sorted(folder.glob("steps-*"))
    assert ranks
    number = {len(list(rank.iterdir())) for rank in ranks}
    assert len(number) == 1, "each rank takes each step"
    return [
        _joined([torch.load(rank / f"{at}.pt", weights_only=False) for rank in ranks])
        for at in range(number.pop())
    ]


def _joined(parts: Sequence[tuple[float, dict[str, tuple[Any, ...]]]]) -> Step:
    norms = {norm for norm, _ in parts}
    assert len(norms) == 1, f"ranks have other norms: {norms}"
    pieces: dict[str, list[Piece]] = {}
    for _, of in parts:
        for name, piece in of.items():
            pieces.setdefault(name, []).append(Piece(*piece))
    return Step(
        norms.pop(),
        {kind: {name: _whole(kind, all_) for name, all_ in pieces.items()} for kind in KINDS},
    )


def _whole(kind: str, pieces: Sequence[Piece]) -> Tensor:
    parts: dict[int, dict[int, Tensor]] = {}
    dim, shape = pieces[0].dim, pieces[0].shape
    for piece in pieces:
        tensor = piece.of[kind]
        known = parts.setdefault(piece.tp if dim >= 0 else 0, {}).setdefault(piece.start, tensor)
        assert known.equal(tensor), "replicas differ"
    whole = [
        torch.cat([of[start] for start in sorted(of)]).view(shape)
        for _, of in sorted(parts.items())
    ]
    return torch.cat(whole, dim) if dim >= 0 else whole[0]
