"""Reads Megatron-LM's own checkpoints (`torch_dist`) into a member's part of any layout.

Nothing in a checkpoint is executed: an object of an unexpected class becomes an `Unknown`. The
state of the optimizer is read from a non-distributed one or `fully_reshardable` in any layout, from
`dp_reshardable`, Megatron's flat buffers, with the same tensor and pipeline parallelism.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....events.errors import UsageError
from ....events.regular_files import read_regular
from ....events.whole_numbers import whole_number
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..dependencies.private_torch import tensor_of_pickle
from ..model import training_state
from ..model.exact_sum import FIRST_BITS
from ..model.trainee import TrainingModel
from ..process.history import History
from ..recovery import state_shards
from ..recovery.regions import State, cut, shape_of
from ..recovery.resharding import Region, Shard, intersection
from ..recovery.state_shards import StackedName
from .megatron_format import MASTER, SHARDED_MASTER, TRACKER, iteration_folder, translated
from .share import name_of
from .stored_state import UNREADABLE, Damaged, StoredState, unpacked_parts

RELEASE = "release"
"""In place of an iteration: weights without the state of a training."""
ALIGNED_NUM = 64
"""Megatron's distributed optimizer places each parameter at a multiple of this many elements."""
COMMON_BYTES_MAX, TRACKER_BYTES_MAX = 1 << 30, 1 << 12
HINT = "name a complete checkpoint with --load, or write its iteration into its " + TRACKER
_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*"
    r"\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
)
_BUCKET_KINDS = {
    "param": "master",
    "exp_avg": "optimizer.exp_avg",
    "exp_avg_sq": "optimizer.exp_avg_sq",
}


class Unknown:
    """An object of a class that is not loaded; its attributes are plain values, or Unknown too."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (rebuild := tensor_of_pickle(module_name, global_name)) is not None:
            return rebuild
        match module_name, global_name:
            case "collections", "OrderedDict":
                return collections.OrderedDict
            case "torch", _ if isinstance(found := getattr(torch, global_name, None), torch.dtype):
                return found
            case _:
                return Unknown


def plain_values(data: bytes) -> Any:
    """What torch.save has written, without executing anything of it. Raises ValueError."""
    if not data.startswith(b"PK"):
        raise ValueError("it is not a file of torch.save")
    plain = types.ModuleType("plain")
    vars(plain).update(Unpickler=_PlainUnpickler, load=pickle.load)
    try:
        unpacked_parts(memoryview(data))
        return torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=plain
        )
    except (*UNREADABLE, MemoryError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from None


def newest(folder: str) -> str:
    """The name of the newest complete checkpoint in the folder; "": none. Raises UsageError."""
    try:
        text = read_regular(Path(folder) / TRACKER, TRACKER_BYTES_MAX).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}", HINT) from None
    if (text := text.strip()) == RELEASE:
        return RELEASE
    if (iteration := whole_number(text)) is None:
        raise UsageError(f"{folder}/{TRACKER} has {text[:40]!r}, not an iteration", HINT)
    return iteration_folder(iteration)


class MegatronState:
    """A complete checkpoint. Raises UsageError if it is damaged or of another kind."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not Path(path).is_dir():
            raise UsageError(f"there is no {path}", HINT)
        if not (Path(path) / "common.pt").is_file():
            if any(Path(path).glob("mp_rank_*")):
                raise UsageError(
                    f"{path} is in Megatron-LM's old format (torch)",
                    "convert it with Megatron-LM: --ckpt-convert-format torch_dist",
                )
            raise UsageError(f"{path} has no common.pt: it is not complete", HINT)
        try:
            common = plain_values(read_regular(Path(path) / "common.pt", COMMON_BYTES_MAX))
            self._common: dict[str, Any] = common if isinstance(common, dict) else {}
            self.iteration = int(self._common.get("iteration", 0))
            args = self._common.get("args")
            self.args: Mapping[str, Any] = vars(args) if args is not None else {}
            """The arguments of the run that wrote it."""
            self.flops = float(self._common.get("num_floating_point_operations_so_far", 0.0))
        except (OSError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{path}/common.pt cannot be read: {error}", HINT) from None
        self._stored: StoredState | None = None
        self._count = UNCOUNTED

    def check(self) -> None:
        """Check that its files are there and complete."""
        try:
            self._stored = StoredState(self.path)
            self._stored.check_files()
        except OSError as error:
            raise UsageError(f"{self.path}: {error}", HINT) from None

    def read(
        self,
        trainee: TrainingModel,
        history: History,
        *,
        with_optimizer: bool,
        iteration: int,
        vocabulary: int = 0,
        count: WorkCount = UNCOUNTED,
    ) -> int:
        """Read this member's part into its live tensors; returns the step version, `iteration`.
        Without the optimizer its state is that of a first iteration. Rows of the embedding after
        `vocabulary` tokens are padding. If this fails, the state is undefined."""
        self._count = count
        names = state_shards.stacked_names(trainee)
        weights = {
            shard: tensor
            for shard, tensor in trainee.shards.items()
            if shard.key.startswith(("model.", "buffer."))
        }
        rest = {
            shard: tensor
            for shard, tensor in trainee.shards.items()
            if shard.key.startswith(("master.", "optimizer."))
        }
        if trainee.exact is not None:  # Megatron has none: they are those of a first iteration
            trainee.exact.exponents.fill_(FIRST_BITS)
        try:
            if self._stored is None:
                self._stored = StoredState(self.path)
            self._read(self._stored, weights, names, vocabulary, casts=not with_optimizer)
            if with_optimizer:
                self._read_optimizer(self._stored, trainee, rest, names, vocabulary)
        except Damaged as error:
            raise UsageError(f"{self.path}: {error}", HINT) from None
        if not with_optimizer:
            _begin_optimizer(rest, weights)
        numbers = training_state.numbers(trainee, iteration, history)
        numbers.first_loss, numbers.losses, numbers.step_s = iteration, [], []
        self._set_numbers(numbers, trainee, with_optimizer=with_optimizer)
        return training_state.load(trainee, numbers, history)

    def _set_numbers(
        self, numbers: training_state.Numbers, trainee: TrainingModel, *, with_optimizer: bool
    ) -> None:
        if not with_optimizer:
            numbers.adam_step, numbers.scheduled_samples = 0.0, 0
            return
        schedule = self._common.get("opt_param_scheduler", {})
        if not trainee.scheduler.override_opt_param_scheduler:
            _check_schedule(self.path, trainee.scheduler.state_dict(), schedule)
        numbers.scheduled_samples = int(schedule.get("num_steps", 0))
        parts = self._optimizer_parts()
        steps = {float(step) for part in parts for step in _steps(part)}
        if len(steps) > 1:
            raise UsageError(
                f"{self.path}: its parameters have stepped {sorted(steps)} times",
                "load it with --no-load-optim",
            )
        numbers.adam_step = steps.pop() if steps else 0.0
        scalers = [part["grad_scaler"] for part in parts if part.get("grad_scaler")]
        if len(scalers) == len(numbers.loss_scales):
            numbers.loss_scales = [
                training_state.LossScale(
                    scale=float(scaler["scale"]),
                    growth_tracker=int(scaler["growth_tracker"]),
                    hysteresis_tracker=int(scaler["hysteresis_tracker"]),
                )
                for scaler in scalers
            ]

    def _optimizer_parts(self) -> list[dict[str, Any]]:
        found = self._common.get("optimizer")
        if isinstance(found, dict) and found.get("param_state_sharding_type") != "dp_reshardable":
            is_chained = all(isinstance(key, int) for key in found)
            return list(found.values()) if found and is_chained else [found]
        assert self._stored is not None
        part: dict[str, Any] = {}
        for name in ("optimizer", "grad_scaler"):
            key = f"optimizer.distributed.dp_group_idx_0.{name}/shard_0_1"
            if key in self._stored.keys:
                (part[name],) = self._stored.value(key)
        return [part]

    def _read_optimizer(
        self,
        stored: StoredState,
        trainee: TrainingModel,
        rest: State,
        names: Mapping[str, StackedName],
        vocabulary: int,
    ) -> None:
        metadata = self._common.get("content_metadata") or {}
        kind = metadata.get("distrib_optim_sharding_type", "fully_reshardable")
        if not any(key.startswith("optimizer.") for key in stored.keys):
            raise UsageError(
                f"{self.path} has no state of the optimizer",
                "load it with --no-load-optim, or with --finetune",
            )
        if kind == "dp_reshardable":
            self._read_buckets(stored, trainee, rest)
        elif kind == "fully_reshardable":
            self._read(stored, rest, names, vocabulary)
        else:
            raise UsageError(
                f"{self.path}: the state of its optimizer is stored as {kind}, which "
                "Megatron-LM no longer writes",
                "load it with --no-load-optim, or save it anew with Megatron-LM",
            )

    def _read(
        self,
        stored: StoredState,
        state: State,
        names: Mapping[str, StackedName],
        vocabulary: int,
        *,
        casts: bool = False,
    ) -> None:
        """Read these shards. `casts`: their dtypes may differ from the stored ones."""
        padded = {at.key for at in names.values() if at.is_padded}
        is_sharded = any(key.startswith(SHARDED_MASTER) for key in stored.keys)
        want: State = {}
        for shard, tensor in translated(
            state, names, SHARDED_MASTER if is_sharded else MASTER
        ).items():
            kind = stored.kinds.get(shard.key, shard.kind)
            if casts:
                shard = shard._replace(
                    kind=f"{kind.partition(' ')[0]} {shard.kind.partition(' ')[2]}"
                )
            if kind != shard.kind and any(shard.key.endswith(key) for key in padded):
                shard, tensor = self._without_padding(shard, tensor, kind, vocabulary)
            if shard.region.num_elements:
                want[shard] = tensor
        stored.check(want, self._count)
        stored.read(want, self._count)

    def _without_padding(
        self, shard: Shard, tensor: Tensor, kind: str, vocabulary: int
    ) -> tuple[Shard, Tensor]:
        """The part of a shard of the embedding that is stored. The rest is padding, zeros."""
        (num_stored, *row), (num, *own_row) = shape_of(kind), shape_of(shard.kind)
        if row != own_row or min(num_stored, num) < vocabulary or not vocabulary:
            raise UsageError(
                f"{self.path} has another vocabulary: {num_stored} rows of {shard.key}, the "
                f"arguments make {num} for {vocabulary} tokens",
                "give the tokenizer of the checkpoint's run",
            )
        stored = Region((0,) * len(shard.region.shape), (num_stored, *row))
        part = intersection(shard.region, stored)
        tensor.zero_()
        if part is None:
            part = Region(shard.region.offset, (0, *shard.region.shape[1:]))
            return Shard(shard.key, kind, part), tensor[:0]
        return Shard(shard.key, kind, part), cut(tensor, shard.region, part)

    # --- Megatron's flat buffers ---
    def _read_buckets(self, stored: StoredState, trainee: TrainingModel, rest: State) -> None:
        saved = tuple(
            int(self.args.get(f"{name}_model_parallel_size", 1)) for name in ("tensor", "pipeline")
        )
        axes = trainee.axes
        if saved != (axes.tp, axes.pp):
            raise UsageError(
                f"{self.path} was saved with tensor parallelism {saved[0]} and pipeline "
                f"parallelism {saved[1]}, and the layout has {axes.tp} and {axes.pp}: its "
                "distributed optimizer's state cannot be read in another layout",
                "save it with --dist-ckpt-optim-fully-reshardable, or load it with --no-load-optim",
            )
        place = trainee.at.pp * axes.tp + trainee.at.tp
        wanted: dict[str, list[Shard]] = {}
        for shard in rest:
            wanted.setdefault(shard.key, []).append(shard)
        buckets = self._buckets(stored, place)
        for index, (params, listed) in enumerate(state_shards.flat_parameters(trainee)):
            for name, num, bucket, begin in self._laid_out(params, buckets.get(index, [])):
                for what, kind in _BUCKET_KINDS.items():
                    if not (shards := wanted.get(f"{kind}.{name}")):
                        continue
                    flat = torch.empty(num, dtype=torch.float32)
                    key = f"{bucket}.{what}"
                    part = {Shard(key, stored.kinds[key], Region((begin,), (num,))): flat}
                    stored.check(part)
                    stored.read(part, self._count)
                    state_shards.fill(
                        {shard: rest[shard] for shard in shards}, [listed(kind, name, flat)]
                    )

    def _buckets(self, stored: StoredState, place: int) -> dict[int, list[tuple[str, int]]]:
        """By buffer: the keys (without what they hold) and sizes of a position's buckets."""
        found: dict[int, dict[int, tuple[str, int]]] = {}
        for key, kind in stored.kinds.items():
            match = _BUCKET.fullmatch(key)
            if match is not None and int(match[1]) == place and match[4] == "exp_avg":
                found.setdefault(int(match[2]), {})[int(match[3])] = (
                    key.removesuffix(".exp_avg"),
                    shape_of(kind)[0],
                )
        return {
            buffer: [buckets[index] for index in sorted(buckets)]
            for buffer, buckets in found.items()
        }

    def _laid_out(
        self, params: Sequence[tuple[str, int]], buckets: Sequence[tuple[str, int]]
    ) -> Iterator[tuple[str, int, str, int]]:
        """Each parameter of a buffer: its name, its size, its bucket, and its place in it."""
        left = list(buckets)
        end = 0
        for name, num in params:
            if left and end == left[0][1]:
                left, end = left[1:], 0
            begin = -(-end // ALIGNED_NUM) * ALIGNED_NUM
            end = begin + num
            if not left or end > left[0][1]:
                break
            yield name, num, left[0][0], begin
        if not left[:1] or left[1:] or end != left[0][1]:
            raise UsageError(
                f"{self.path} is of another model: the buffers of its optimizer have "
                f"{sum(size for _, size in buckets)} elements, not those of this one",
                "give the arguments of the checkpoint's run, or --no-load-optim",
            )


def _begin_optimizer(rest: State, weights: State) -> None:
    """The optimizer's state at a first iteration: masters equal the weights, moments are zero."""
    kinds = {shard.key: shard.kind for shard in weights}
    masters: State = {}
    for shard, tensor in rest.items():
        if shard.key.startswith("master."):
            key = f"model.{name_of(shard.key)}"
            masters[Shard(key, kinds[key], shard.region)] = tensor
        else:
            tensor.zero_()
    state_shards.fill(masters, [weights])


def _steps(part: Mapping[str, Any]) -> Iterator[Any]:
    inner = part.get("optimizer", part)
    if "common_step" in inner.get("state", {}):
        yield inner["state"]["common_step"]
        return
    for group in inner.get("param_groups", ()):
        if group.get("step") is not None:
            yield group["step"]


def _check_schedule(path: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise UsageError if the learning rate would go on by another schedule."""
    for name, value in own.items():
        if name != "num_steps" and name in saved and saved[name] != value:
            raise UsageError(
                f"{path} has {name} {saved[name]} in its schedule, the arguments say {value}",
                "give the arguments of the checkpoint's run, or --override-opt_param-scheduler",
            )
