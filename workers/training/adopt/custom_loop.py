"""The workload of a custom loop: the user's model, optimizer and data in Unicron's iteration.

Only this module calls the user's functions, and it checks what they return.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import numpy
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from msgspec.structs import replace
from torch import Tensor
from torch.utils.data import DataLoader

from ....events.errors import UsageError
from ....events.spec.job import Batch, Loop, Model, Train
from ....events.spec.model import Axes, MegatronModel
from ....events.spec.parallelism import Parallel, is_plain, num_positions
from ....events.spec.support import RECOVERED, ROWS, Row
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..communicators.process_groups import groups_for_building
from ..dependencies.private_megatron import divide_no_gradients, publish_globals
from ..dependencies.private_torch import is_compiled
from ..model import cpu_device, determinism, experts, optimizers
from ..model.random_draws import EMBEDDING, Draw
from ..model.trainee import Size, TrainingModel, has_mirror
from ..model.workload import Beginning, BuildPart
from ..recovery import state_shards
from ..recovery.regions import State
from .data_loader import OF_THE_DATA, LoaderBatches

# --- The support table applied to a loop at its start ---


class BuiltLoop(NamedTuple):
    """What a script has built (`config`: a TransformerConfig; `ddp`, `optimizer`: Megatron's
    configs; `modules`: those inside DDP), and the layouts that the job allows."""

    config: Any
    ddp: Any
    optimizer: Any
    parallel: Parallel
    modules: Sequence[Any]


def unsupported(loop: BuiltLoop) -> list[Row]:
    """The rows of the support table that apply to this loop and prevent recovery in memory."""
    return [row for row in ROWS if row.loop.grade not in RECOVERED and ROW_CHECKS[row.what](loop)]


def _any(config: Any, *names: str) -> bool:
    return any(bool(getattr(config, name, False)) for name in names)


def _above_1(config: Any, name: str) -> bool:
    num: int | None = getattr(config, name, 1)
    return num is not None and num > 1


def _has_other_experts(config: Any, parallel: Parallel) -> bool:
    """Options of experts that are not tested, or whose result depends on the layout."""
    if (
        _any(
            config,
            "moe_grouped_gemm",
            "moe_enable_routing_replay",
            "moe_router_fusion",
            "moe_router_force_load_balancing",
            "moe_permute_fusion",
            "moe_shared_expert_overlap",
        )
        or config.moe_token_dispatcher_type == "flex"
    ):
        return True
    if len(parallel.tensor) > 1 and (
        experts.auxiliary_losses(config)
        or config.moe_expert_capacity_factor is not None
        or config.moe_router_load_balancing_type == "sinkhorn"
    ):
        return True
    return len(list(parallel.shapes())) > 1 and _any(config, "moe_input_jitter_eps")


def _is_fsdp(loop: BuiltLoop) -> bool:
    return _any(loop.ddp, "use_megatron_fsdp", "use_custom_fsdp") or any(
        "FullySharded" in kind.__name__ or kind.__name__ == "FSDPModule"
        for module in loop.modules
        for kind in type(module).__mro__
    )


ROW_CHECKS: Mapping[str, Callable[[BuiltLoop], bool]] = {
    "context parallel": lambda loop: (
        _above_1(loop.config, "context_parallel_size")
        or _any(loop.config, "hybrid_context_parallel")
    ),
    "expert parallel": lambda loop: _above_1(loop.config, "expert_model_parallel_size"),
    "experts, other options": lambda loop: (
        _any(loop.config, "num_moe_experts") and _has_other_experts(loop.config, loop.parallel)
    ),
    "experts balanced over replicas": lambda loop: (
        _any(loop.config, "num_moe_experts")
        and "global_aux_loss" in loop.config.moe_router_load_balancing_type
    ),
    "parameter gather overlapped with the step": lambda loop: _any(
        loop.optimizer, "overlap_param_gather_with_optimizer_step"
    ),
    "several instances of the distributed optimizer": lambda loop: _above_1(
        loop.ddp, "num_distributed_optimizer_instances"
    ),
    "FSDP": _is_fsdp,
    "FP8 or FP4": lambda loop: (
        _any(loop.config, "fp8", "fp4", "fp8_param", "fp4_param")
        or _any(loop.ddp, "fp8_param_gather")
    ),
    "CUDA graphs": lambda loop: (
        _any(loop.config, "enable_cuda_graph", "external_cuda_graph")
        or loop.config.cuda_graph_impl != "none"
    ),
    "torch.compile": lambda loop: any(
        is_compiled(part) for module in loop.modules for part in module.modules()
    ),
    "registered communication buffers": lambda loop: (
        _any(loop.ddp, "nccl_ub") or _any(loop.config, "tp_comm_overlap")
    ),
    "offloading to the CPU": lambda loop: (
        _any(loop.config, "cpu_offloading", "fine_grained_activation_offloading")
        or _any(loop.optimizer, "optimizer_cpu_offload")
    ),
    "dropout across a change of TP or PP": lambda loop: (
        _any(loop.config, "attention_dropout", "hidden_dropout")
        and len(list(loop.parallel.shapes())) > 1
    ),
    "gradients scaled by the number of replicas": lambda loop: (
        not loop.config.calculate_per_token_loss or _any(loop.ddp, "average_in_collective")
    ),
    "gradients summed in 16 bits": lambda loop: (
        not loop.ddp.grad_reduce_in_fp32 and _any(loop.config, "bf16", "fp16")
    ),
    "an optimizer other than Adam": lambda loop: (
        loop.optimizer.optimizer != "adam" or _any(loop.optimizer, "use_precision_aware_optimizer")
    ),
}


def _is_of_transformer_engine(loop: BuiltLoop) -> bool:
    return any(
        kind.__module__.startswith("transformer_engine")
        for module in loop.modules
        for part in module.modules()
        for kind in type(part).__mro__
    )


NOT_BITWISE: Mapping[str, Callable[[BuiltLoop], bool]] = {
    "a mixture of experts": lambda loop: _any(loop.config, "num_moe_experts"),
    "gradient_accumulation_fusion: a kernel adds to the gradient": lambda loop: _any(
        loop.config, "gradient_accumulation_fusion"
    ),
    "defer_embedding_wgrad_compute: a kernel adds to the gradient": lambda loop: _any(
        loop.config, "defer_embedding_wgrad_compute"
    ),
    "cross_entropy_loss_fusion: its kernel is not deterministic": lambda loop: _any(
        loop.config, "cross_entropy_loss_fusion"
    ),
    "gradients that are averaged over tensor-parallel ranks": lambda loop: any(
        getattr(param, "average_gradients_across_tp_domain", False)
        for module in loop.modules
        for param in module.parameters()
    ),
    "Transformer Engine without deterministic_mode=True in the TransformerConfig": lambda loop: (
        _is_of_transformer_engine(loop) and not _any(loop.config, "deterministic_mode")
    ),
}
"""What cannot keep the promise of `reproducible: bitwise`. All members decide alike, from what the
script builds. What `job.step()` cannot heal in memory cannot keep it either."""

Build = Callable[[Any, Axes, int], tuple[Sequence[Any], Any, Any]]
"""(groups, axes, place) -> model chunks in Megatron's DDP, the optimizer, the schedule."""
Sample = Callable[[int, int], Any] | DataLoader[Any]
"""(iteration, micro-batch) -> the batch for `forward`; equal on every rank."""
Forward = Callable[[Any, Any], tuple[Any, Any]]
"""(chunk, batch) -> the sum of the token losses and the token count; or, as Megatron's
forward_step, the output and a function of it that returns these two first. A pipeline needs this:
a chunk sends its output to the next one."""

RESTARTS = "after a fault all its processes start again"
STAGE_SEEDS_APART = 100
"""The difference between the seeds of two pipeline stages in Megatron-LM."""

SHAPES = re.compile(
    r"The size of tensor|Sizes of tensors must match|shapes? cannot be multiplied|"
    r"Expected input batch_size|"
    r"is invalid for input of size|must match the (existing )?size|"
    r"^\w*(Value|Type|Key|Index|Lookup|Assertion|ZeroDivision)\w*Error: "
)
"""Two lengths do not fit, or a data loader's worker raised a data error. Any other RuntimeError may
pass, and so may most exceptions of `forward`, which may use collectives."""

OnRebuild = Callable[[Any], Any]
"""(groups) -> the script's objects for this generation's groups."""


class NotRecoverable(UsageError):
    """In-memory recovery does not support what was built."""


class NotTrainable(NotRecoverable):
    """`job.step()` cannot train what was built: invalid input, with or without an agent."""


class Padding(NamedTuple):
    """A batch whose loss does not count."""

    batch: Any


@dataclass
class LoopTrainingModel(TrainingModel):
    """The objects that the script's `build` returned, with its `forward`."""

    call: Forward = field(kw_only=True)
    _loss_func: Callable[[Any], Any] = field(init=False, repr=False, default=lambda out: out)
    _tokens_num: int | Tensor = field(init=False, repr=False, default=0)

    @property
    def description(self) -> bytes:
        return b""

    def given(self, tokens: Any) -> Any:
        """`forward` moves the batch to its device."""
        return tokens

    def padding(self, tokens: Any) -> Any:
        return Padding(tokens)

    def forward(self, ddp: Any, tokens: Any) -> Any:
        with _data_errors("forward", self.draw.iteration, self.draw.micro_batch):
            found = self.call(ddp, tokens.batch if isinstance(tokens, Padding) else tokens)
        match found:
            case [out, rest]:  # a tensor of two rows is none
                pass
            case _:
                raise _wrong_forward(f"returned {_types(found)}")
        if self.axes.pp > 1 and not callable(rest):
            raise UsageError(
                "in a pipeline `forward` must return the chunk's output and a function of it",
                "return the sum of the loss in that function",
            )
        self._loss_func = rest if callable(rest) else lambda out: (out, rest)
        return out

    def loss_of(self, per_token: Any, tokens: Any) -> Tensor:
        """The loss of the last forward pass."""
        with _data_errors("forward", self.draw.iteration, self.draw.micro_batch):
            found = self._loss_func(per_token)
        match found:
            case [Tensor() as loss, num, *_] if loss.numel() == 1 and _is_number(num):
                pass
            case [Tensor() as loss, *_] if loss.numel() != 1:
                raise _wrong_forward(f"returned losses of shape {tuple(loss.shape)}")
            case _:
                raise _wrong_forward(f"returned {_types(found)}")
        # A number on the device stays there: to read it would make the host wait.
        is_far = isinstance(num, Tensor) and num.device == loss.device
        self._tokens_num = num.detach().reshape(()) if is_far else int(num)
        if isinstance(tokens, Padding):
            loss, self._tokens_num = loss * 0, 0
        if self.train.loss == "per_token":
            return loss
        num = self._tokens_num
        divisor = num.clamp(min=1) if isinstance(num, Tensor) else max(num, 1)
        return loss / divisor / self.train.num_micro_batches

    def num_tokens(self, tokens: Any) -> int | Tensor:  # type: ignore[override]
        """The token count of the micro-batch of the last `loss_of` call."""
        return self._tokens_num


def _is_number(num: Any) -> bool:
    return num.numel() == 1 if isinstance(num, Tensor) else isinstance(num, Real)


def _wrong_forward(what: str) -> UsageError:
    return UsageError(
        "`forward` must return the sum of the loss of its tokens and their number, or the output "
        f"and a function of it that returns these two. It {what}",
        "docs/guides/scripts.md shows an example",
    )


class LoopWorkload:
    """The workload of a custom loop. The parameters are those of `adopt`."""

    def __init__(
        self,
        loop: Loop,
        build: Build,
        sample: Sample,
        forward: Forward,
        *,
        samples_num: int = 1,
        sequence: int = 0,
        loss: Any = "per_token",
        seed: int = 1234,
        flops: float = 0.0,
        on_rebuild: OnRebuild | None = None,
        beginning: Beginning | None = None,
        exports: Sequence[Any] = (),
    ) -> None:
        self.train = Train(
            iterations=loop.iterations,
            output=loop.output,
            begin_from=loop.begin_from,
            copy_every=loop.copy_every,
            checkpoint_every=loop.checkpoint_every,
            parallel=loop.parallel,
            seed=seed,
            loss=loss,
            kept_sum=loop.kept_sum,
            skip_not_finite=loop.skip_not_finite,
            reproducible=loop.reproducible,
            reproducible_bits=loop.reproducible_bits,
            digest_every=loop.digest_every,
            model=Model(sequence=sequence),
            batch=Batch(global_=loop.micro_batches * samples_num, micro=samples_num),
        )
        self.flops = flops
        self.beginning, self.exports = beginning, exports
        self._described = loop.model
        self.rounding_why = ""
        self.digest = ""
        self.made: Any = None
        """The result of `on_rebuild` for the current generation."""
        self.heals = True
        """If False, the loop trains without in-memory recovery, and fewer restrictions apply."""
        self._on_rebuild = on_rebuild
        self._groups: Any = None
        self._build, self._forward = build, forward
        self._sample = (
            sample
            if not isinstance(sample, DataLoader)
            else LoaderBatches(sample, loop.micro_batches, loop.iterations, seed)
        )
        cpu_device.install_stand_ins()

    def on_groups(self, groups: Any) -> None:
        self.made, self._groups = None, groups
        if groups is None:
            experts.forget_groups()
        else:
            publish_globals(groups, self.train.parallel.chunks)
            self.made = self._on_rebuild(groups) if self._on_rebuild is not None else None

    def load(self) -> LoopWorkload:
        return self

    def sample(
        self, seed: int, iteration: int, micro_batch: int, *, rows: int, sequence: int
    ) -> Any:
        with _data_errors("sample", iteration, micro_batch):
            return self._sample(iteration, micro_batch)

    def build(
        self, device: torch.device, groups: Any, axes: Axes, place: int, *, begins: bool = True
    ) -> TrainingModel:
        """Call the script's `build`. `begins` is ignored. Raises NotRecoverable, UsageError."""
        build_groups = groups_for_building(groups)
        publish_globals(build_groups, axes.chunks)
        with (
            optimizers.without_collectives(),
            optimizers.lowest_rate_of_schedule(),
            optimizers.noted_builds() as noted,
            _seeded(self.train.seed, groups.pp.rank()),
        ):
            ddps, optimizer, scheduler = _unpack(self._build(build_groups, axes, place))
        publish_globals(groups, axes.chunks)
        if self._described is not None:
            check_described(ddps[0].config, self.train, self._described)
        parallel = self.train.parallel
        if self.heals:
            check_recoverable(ddps, optimizer, scheduler, self.train, axes)
        else:
            check_trainable(ddps, optimizer, scheduler, self.train, axes)
            parallel = replace(
                parallel, optimizer="sharded" if optimizers.is_sharded(optimizer) else "whole"
            )
            disable_overlap(ddps, optimizer)
        exactly = self._exactly(_built_loop(ddps, optimizer, self.train))
        optimizers.prepare(ddps, optimizer)
        experts.prepare(ddps, per_token=self.train.loss == "per_token")
        modules = [_inner(ddp) for ddp in ddps]
        config = ddps[0].config
        precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"
        train = replace(
            self.train,
            precision=precision,
            parallel=parallel,
            **exactly,
            overlap=ddps[0].ddp_config.overlap_grad_reduce,
        )
        return LoopTrainingModel(
            train,
            device,
            Draw(train.seed),
            axes,
            place,
            modules,
            ddps,
            optimizer,
            scheduler,
            torch.empty(0),
            call=self._forward,
            mirror=(
                optimizers.mirror_of(optimizer, ddps, noted) if has_mirror(train, axes) else None
            ),
        )

    def _exactly(self, built: BuiltLoop) -> dict[str, Any]:
        """What of `train` changes if what was built cannot be `bitwise`. Raises UsageError."""
        why = (
            "; ".join(what for what, applies in NOT_BITWISE.items() if applies(built))
            if (self.heals)
            else RESTARTS
        )
        if not why or self.train.reproducible == "rounding":
            return {}
        if why != self.rounding_why:
            determinism.decline(self.train.reproducible, why)
        self.rounding_why = why
        return {"reproducible": "rounding", "reproducible_bits": 64}

    def whole_size(self, trainee: TrainingModel, groups: Any) -> Size:
        """Counted from the shards of this part. The layers of other pipeline stages count like
        those of this stage; other modules that only they have do not count."""
        size = state_shards.whole_size(trainee.shards, trainee.ddps[0].config.num_layers)
        self.flops = self.flops or 6.0 * size.num_params * self.train.num_micro_batches
        return size

    def begin(
        self, trainee: TrainingModel, build_part: BuildPart, count: WorkCount = UNCOUNTED
    ) -> None:
        """Read the initial weights if they are stored. Else they are those that the script draws in
        the largest layout, whose parts are built one after the other in another layout."""
        if self.beginning is not None and self.beginning.begin(trainee, count):
            return
        largest = self.train.parallel.largest
        shards, places = trainee.shards, range(num_positions(largest))
        if replace(trainee.axes, dp=1) == largest:
            # The script has drawn them, except a tied embedding, which the first stage draws.
            tied = {
                shard: tensor
                for shard, tensor in shards.items()
                if shard.key.endswith(f".{EMBEDDING}")
            }
            shards = tied if trainee.at.pp else {}
            places = range(trainee.at.tp, trainee.at.tp + 1)
        if shards:
            with count.of("builds the initial weights", len(places), "parts"):
                state_shards.fill(shards, _built(build_part, largest, places, count))


def _built(
    build_part: BuildPart, axes: Axes, places: Sequence[int], count: WorkCount
) -> Iterator[State]:
    """The states of these parts, one of them at a time in memory."""
    for place in places:
        part = build_part(axes, place)
        yield part.shards
        part.release()
        count.add(1)


@contextmanager
def _data_errors(what: str, iteration: int, micro_batch: int) -> Generator[None]:
    """Within this context an exception that the same micro-batch raises in any process becomes a
    UsageError: wrong input. The traceback goes to the process's log."""
    try:
        yield
    except OF_THE_DATA as error:
        if isinstance(error, UsageError):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = lines[-1] if lines else ""
        is_certain = isinstance(error, LookupError) or (
            what == "sample" and not isinstance(error, RuntimeError)
        )
        if not is_certain and not SHAPES.search(text):
            raise
        traceback.print_exc()
        is_end = isinstance(error, StopIteration | IndexError) and what == "sample"
        kind = type(error).__name__
        told = text if text.startswith(kind) else f"{kind}: {text}" if text else kind
        raise UsageError(
            f"`{what}` raised {told} in micro-batch {micro_batch} of iteration {iteration}",
            "the data end before the last of loop.iterations: begin them again, or lower it"
            if is_end
            else "any process raises it for this micro-batch: correct the data or the script",
        ) from error


@contextmanager
def _seeded(seed: int, stage: int) -> Generator[None]:
    """Within this context the generators are seeded as by Megatron-LM for a pipeline stage: without
    Unicron a script draws the same weights. Megatron's tracker adds the tensor-parallel rank."""
    seed += STAGE_SEEDS_APART * stage
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    try:
        yield
    finally:
        tracker.reset()  # `Draw` seeds each micro-batch


def check_recoverable(
    ddps: Sequence[Any], optimizer: Any, scheduler: Any, train: Train, axes: Axes
) -> None:
    """Raises NotRecoverable if a step cannot be resumed, repeated or transferred exactly."""
    check_trainable(ddps, optimizer, scheduler, train, axes)
    _check_rows(ddps, optimizer, train, NotRecoverable)
    for kind in optimizers.not_adam(optimizer):
        raise NotRecoverable(
            f"the state of {kind} is not known; that of torch.optim.AdamW is, and "
            "that of FusedAdam of Transformer Engine and Apex"
        )
    is_sharded = optimizers.is_sharded(optimizer)
    if is_sharded != (train.parallel.optimizer != "whole"):
        built = "sharded" if is_sharded else "whole"
        raise NotTrainable(
            f"the optimizer is {built}, but loop.parallel.optimizer is not",
            f"write loop: {{parallel: {{optimizer: {built}}}}}",
        )


def check_trainable(
    ddps: Sequence[Any], optimizer: Any, scheduler: Any, train: Train, axes: Axes
) -> None:
    """Raises NotTrainable if `job.step()` cannot train this model."""
    for ddp in ddps:
        if not isinstance(ddp, DistributedDataParallel):
            raise NotTrainable(
                f"{type(ddp).__name__} is not megatron.core.distributed.Distributed"
                "DataParallel, whose buffers hold the local sum of gradients",
                "wrap each chunk of the model in DistributedDataParallel",
            )
    _check_rows(ddps, optimizer, train, NotTrainable)
    _check_sizes(ddps[0].config, [_inner(ddp) for ddp in ddps], train, axes)
    if not isinstance(scheduler, OptimizerParamScheduler):
        raise NotTrainable(
            f"its schedule is a {type(scheduler).__name__}, not Megatron's "
            "OptimizerParamScheduler, whose position is known",
            "return an OptimizerParamScheduler",
        )
    for kind in () if is_plain(train.parallel.largest) else optimizers.not_adam(optimizer):
        raise NotTrainable(
            f"the state of {kind} cannot be split over the ranks of a replica; that "
            "of torch.optim.AdamW can",
            "train whole replicas, or with Adam",
        )


def check_described(config: Any, train: Train, model: MegatronModel) -> None:
    """Raises NotTrainable if `loop.model`, for which layouts were computed, is another model."""
    has_experts = bool(getattr(config, "num_moe_experts", None))
    samples = model.global_batch // train.num_micro_batches
    for name, described, built in (
        ("num_layers", model.num_layers, config.num_layers),
        ("hidden", model.hidden, config.hidden_size),
        ("num_heads", model.num_heads, config.num_attention_heads),
        (
            "num_query_groups",
            model.num_groups,
            config.num_query_groups or config.num_attention_heads,
        ),
        ("num_experts", model.num_experts, config.num_moe_experts if has_experts else 0),
        (
            "ffn_hidden",
            model.ffn,
            config.moe_ffn_hidden_size if has_experts else config.ffn_hidden_size,
        ),
        ("top_k", model.top_k, config.moe_router_topk if has_experts else 1),
        ("recompute", model.recompute, config.recompute_granularity or "none"),
        ("sequence", model.sequence, train.model.sequence or model.sequence),
        # `samples` of `adopt` is 1 if it is left out
        (
            "global_batch",
            model.global_batch,
            train.num_micro_batches * (train.batch.micro if train.batch.micro > 1 else samples),
        ),
    ):
        if described != built:
            raise NotTrainable(
                f"loop.model.{name} is {described} in the job file, and {built} in the script",
                "write the same in both",
            )


def disable_overlap(ddps: Sequence[Any], optimizer: Any) -> None:
    """Disable Megatron's overlapped communication and its division of gradients, which Unicron's
    step divides as `loss` of `adopt` says."""
    for ddp in ddps:
        if ddp.use_forward_hook:
            ddp.disable_forward_pre_hook(param_sync=False)
            ddp.use_forward_hook = False
        ddp.config.calculate_per_token_loss = True
        ddp.ddp_config.overlap_grad_reduce = ddp.ddp_config.overlap_param_gather = False
        ddp.ddp_config.average_in_collective = False
        divide_no_gradients(ddp)
    for part in optimizers.chained(optimizer):
        part.config.overlap_param_gather = False
        part.config.overlap_param_gather_with_optimizer_step = False


def _check_rows(
    ddps: Sequence[Any], optimizer: Any, train: Train, error: type[NotRecoverable]
) -> None:
    """Raises `error` if rows of the support table apply: for NotTrainable those that cannot be
    trained, else those that can, but not recovered."""
    found = unsupported(_built_loop(ddps, optimizer, train))
    if rows := [
        row
        for row in found
        if (error is NotRecoverable) == (row.loop.grade != "refused" and not row.loop.own_loop)
    ]:
        raise error(
            "; ".join(f"{row.what}: {row.loop.why}" for row in rows),
            "unicron doctor --support lists what a loop may contain",
        )


def _built_loop(ddps: Sequence[Any], optimizer: Any, train: Train) -> BuiltLoop:
    return BuiltLoop(
        ddps[0].config,
        ddps[0].ddp_config,
        optimizers.chained(optimizer)[0].config,
        train.parallel,
        [_inner(ddp) for ddp in ddps],
    )


def _unpack(built: Any) -> tuple[list[Any], Any, Any]:
    match built:
        case ([_, *_] as chunks, optimizer, scheduler):
            return list(chunks), optimizer, scheduler
        case _:
            raise UsageError(
                "`build` must return three values: the list of model chunks, the optimizer and "
                f"its schedule. It returned {_types(built)}",
                "docs/guides/scripts.md shows an example",
            )


def _types(built: Any) -> str:
    kinds = ", ".join(type(value).__name__ for value in built) if isinstance(built, tuple) else ""
    return f"({kinds})" if kinds else f"a {type(built).__name__}"


def _check_sizes(config: Any, modules: Sequence[Any], train: Train, axes: Axes) -> None:
    made = Axes(
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        chunks=len(modules),
        dp=axes.dp,
    )
    if made != axes:
        raise NotTrainable(
            f"`build` was called for {axes}, but its configuration has {made}",
            "take the sizes from its argument `axes`",
        )
    if train.parallel.pipeline == (1,):
        return
    if axes.chunks > 1 and config.batch_p2p_comm:
        raise NotTrainable(
            "with chunks, the next and previous stage can be the same one, and a "
            "batch of messages mixes the two directions up",
            "set overlap_p2p_comm, and batch_p2p_comm False",
        )
    if not train.model.sequence:
        raise NotTrainable(
            "pipeline stages need the length of a sample", "give adopt(sequence=...)"
        )
    for module in modules:
        if not isinstance(module, GPTModel):
            raise NotTrainable(
                f"the parameters of a {type(module).__name__} in a pipeline have no "
                "unique names in the whole model; those of a GPTModel have",
                "leave loop.parallel.pipeline out",
            )


def _inner(ddp: Any) -> Any:
    module = ddp.module
    return module.module if isinstance(module, Float16Module) else module
