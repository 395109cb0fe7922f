"""A loop of somebody's own, as a member trains it: their model, optimizer and data, our iteration.

What they write is called here and nowhere else: so what it may not do has one place to be said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from msgspec.structs import replace
from torch import Tensor

from ....events.errors import UsageError
from ....events.spec.job import Batch, Loop, Model, Train
from ....events.spec.model import Axes
from ....events.spec.parallelism import Parallel
from ....events.spec.support import ROWS, Grade, Row
from ..communicators.process_groups import publish, to_build
from ..model import optimizers
from ..model.random_draws import Draw
from ..model.trainee import Trainee
from ..recovery import state_shards

# --- A loop held against the support table when it starts: what of it does not heal in memory. ---


class BuiltLoop(NamedTuple):
    """What a script has built: Megatron's own objects, and the layouts in which it may be."""

    config: Any
    ddp: Any
    optimizer: Any
    parallel: Parallel
    modules: Sequence[Any]


def unsupported(config: Any, ddp: Any = None, optimizer: Any = None, *,
                parallel: Parallel | None = None, modules: Sequence[Any] = ()) -> list[Row]:
    """The rows that this loop asks for, and that are not exact for a script's; in their order.

    `config` is a TransformerConfig, `ddp` a DistributedDataParallelConfig, `optimizer` an
    OptimizerConfig, `modules` what is wrapped in DDP. Whether Transformer Engine or a compiler is
    in it only modules say: Megatron's default names the first also where it is not used.
    """
    loop = BuiltLoop(config, ddp, optimizer, parallel or Parallel(), modules)
    return [row for row in ROWS if row.loop.grade != "exact" and ASKED[row.what](loop)]


def _any(found: Any, *names: str) -> bool:
    return any(bool(getattr(found, name, False)) for name in names)


def _is_many(found: Any, name: str) -> bool:
    num: int | None = getattr(found, name, 1)
    return num is not None and num > 1


def _parts(loop: BuiltLoop) -> list[Any]:
    return [part for module in loop.modules for part in module.modules()]


def _is_of(part: Any, package: str) -> bool:
    return any(kind.__module__.split(".")[0] == package for kind in type(part).__mro__)


def _is_compiled(part: Any) -> bool:
    return (isinstance(part, torch._dynamo.OptimizedModule)
            or getattr(part, "_compiled_call_impl", None) is not None)


def _is_fsdp(loop: BuiltLoop) -> bool:
    return (_any(loop.ddp, "use_megatron_fsdp", "use_custom_fsdp")
            or getattr(loop.ddp, "data_parallel_sharding_strategy", "no_shard") != "no_shard"
            or any("FullySharded" in kind.__name__ or kind.__name__ == "FSDPModule"
                   for module in loop.modules for kind in type(module).__mro__))


def _sums_in_16_bits(loop: BuiltLoop) -> bool:
    return (loop.ddp is not None and not loop.ddp.grad_reduce_in_fp32
            and _any(loop.config, "bf16", "fp16"))


ASKED: Mapping[str, Callable[[BuiltLoop], bool]] = {
    "context parallel": lambda loop: (_is_many(loop.config, "context_parallel_size")
                                      or _any(loop.config, "hybrid_context_parallel")),
    "expert parallel": lambda loop: _is_many(loop.config, "expert_model_parallel_size"),
    "experts": lambda loop: _any(loop.config, "num_moe_experts"),
    "distributed optimizer, mirrored": lambda loop: loop.parallel.optimizer == "mirrored",
    "overlapped reduction, other layouts": lambda loop: (
        _any(loop.ddp, "overlap_grad_reduce") and not loop.parallel.is_plain),
    "overlapped parameter gather": lambda loop: any(
        _any(found, "overlap_param_gather", "overlap_param_gather_with_optimizer_step")
        for found in (loop.ddp, loop.optimizer)),
    "several instances of the distributed optimizer": lambda loop: _is_many(
        loop.ddp, "num_distributed_optimizer_instances"),
    "FSDP": _is_fsdp,
    "Transformer Engine": lambda loop: (
        _any(loop.config, "tp_comm_overlap")
        or _any(loop.optimizer, "use_precision_aware_optimizer")
        or any(_is_of(part, "transformer_engine") for part in _parts(loop))),
    "FP8 or FP4": lambda loop: (_any(loop.config, "fp8", "fp4", "fp8_param", "fp4_param")
                                or _any(loop.ddp, "fp8_param_gather")),
    "CUDA graphs": lambda loop: (_any(loop.config, "enable_cuda_graph", "external_cuda_graph")
                                 or loop.config.cuda_graph_impl != "none"),
    "torch.compile": lambda loop: any(_is_compiled(part) for part in _parts(loop)),
    "registered communication buffers": lambda loop: _any(loop.ddp, "nccl_ub"),
    "offloading to the CPU": lambda loop: (
        _any(loop.config, "cpu_offloading", "fine_grained_activation_offloading")
        or _any(loop.optimizer, "optimizer_cpu_offload")),
    "dropout across a change of TP or PP": lambda loop: (
        _any(loop.config, "attention_dropout", "hidden_dropout")
        and len(list(loop.parallel.shapes())) > 1),
    "gradients scaled by the number of replicas": lambda loop: (
        not loop.config.calculate_per_token_loss or _any(loop.ddp, "average_in_collective")),
    "gradients summed in 16 bits": _sums_in_16_bits,
    "an optimizer other than Adam": lambda loop: (
        loop.optimizer is not None and loop.optimizer.optimizer != "adam"),
}

Build = Callable[[Any, Axes, int], tuple[Sequence[Any], Any, Any]]
"""(groups, axes, place) -> chunks of the model in Megatron's DDP, its optimizer, its schedule."""
Sample = Callable[[int, int], Any]
"""(iteration, micro-batch) -> what `forward` takes; the same whichever rank asks."""
Forward = Callable[[Any, Any], tuple[Any, Any]]
"""(chunk, batch) -> the sum of its tokens' loss and their number; or, as Megatron's forward_step,
the output and a function of it that returns these two first. In a pipeline the latter: of a chunk
that is not the last the output goes on to the next."""

OnRebuild = Callable[[Any], Any]
"""(groups) -> what a script has made of them, until they go down."""


class Unfit(UsageError):
    """What was built cannot be healed in memory; `str()` says why, in one line."""


class Untrained(Unfit):
    """Nor can `job.step()` train it: wrong input, with an agent or without."""


class Padding(NamedTuple):
    """A batch whose loss does not count."""

    batch: Any


@dataclass
class OwnTrainee(Trainee):
    """What their `build` has made, with their `forward`."""

    call: Forward = field(kw_only=True)
    _loss_func: Callable[[Any], Any] = field(init=False, repr=False, default=lambda out: out)
    _tokens_num: int = field(init=False, repr=False, default=0)

    def given(self, tokens: Any) -> Any:
        """As their `sample` has it: where it has to be, `forward` knows."""
        return tokens

    def padding(self, tokens: Any) -> Any:
        return Padding(tokens)

    def forward(self, ddp: Any, tokens: Any) -> Any:
        out, rest = self.call(ddp, tokens.batch if isinstance(tokens, Padding) else tokens)
        if self.axes.pp > 1 and not callable(rest):
            raise UsageError("in a pipeline `forward` has to return the chunk's output and a "
                             "function of it", "return the sum of the loss in that function")
        self._loss_func = rest if callable(rest) else lambda out: (out, rest)
        return out

    def loss_of(self, per_token: Any, tokens: Any) -> Tensor:
        """Of what went forward last."""
        found, num, *_ = self._loss_func(per_token)
        loss: Tensor = found
        self._tokens_num = int(num)
        if isinstance(tokens, Padding):
            loss, self._tokens_num = loss * 0, 0
        if self.train.loss == "per_token":
            return loss
        return loss / max(self._tokens_num, 1) / self.train.num_micro_batches

    def num_tokens(self, tokens: Any) -> int:
        """Of the micro-batch whose loss was asked for last."""
        return self._tokens_num


class OwnWork:
    """Their loop. `samples_num` are those of one micro-batch: what their schedule counts.
    `sequence` is the length of each, which the stages of a pipeline tell each other their parts by.
    """

    def __init__(self, loop: Loop, build: Build, sample: Sample, forward: Forward, *,
                 samples_num: int = 1, sequence: int = 0, loss: Any = "per_token", seed: int = 1234,
                 flops: float = 0.0, on_rebuild: OnRebuild | None = None) -> None:
        self.train = Train(
            iterations=loop.iterations, output=loop.output, copy_every=loop.copy_every,
            checkpoint_every=loop.checkpoint_every, parallel=loop.parallel, seed=seed, loss=loss,
            model=Model(sequence=sequence),
            batch=Batch(global_=loop.micro_batches * samples_num, micro=samples_num))
        self.flops = flops
        self.digest = ""
        self.made: Any = None
        """What `on_rebuild` has returned for the generation that is up."""
        self.heals = True
        """Else it is only trained: what needs not be kept, redone or handed over may be in it."""
        self._on_rebuild = on_rebuild
        self._groups: Any = None
        self._build, self._sample, self._forward = build, sample, forward

    def on_groups(self, groups: Any) -> None:
        self.made, self._groups = None, groups
        if groups is not None:
            publish(groups, self.train.parallel.chunks)
            self.made = self._on_rebuild(groups) if self._on_rebuild is not None else None

    def load(self) -> OwnWork:
        return self

    def sample(self, seed: int, iteration: int, micro_batch: int, *, rows: int, sequence: int
               ) -> Any:
        return self._sample(iteration, micro_batch)

    def build(self, device: torch.device, groups: Any, axes: Axes, place: int, *,
              begins: bool = True) -> Trainee:
        """As its script builds it, `begins` or not. Raises Unfit, UsageError."""
        draw = Draw(self.train.seed)
        draw.at(0, 0)  # what is drawn while building is the same on every rank
        told = to_build(groups)
        publish(told, axes.chunks)
        with optimizers.asking_nobody():
            ddps, optimizer, scheduler = _three(self._build(told, axes, place))
        # What is built may be another part than that which is trained: a whole one, for a copy.
        publish(self._groups, self.train.parallel.chunks)
        parallel = self.train.parallel
        if self.heals:
            check(ddps, optimizer, scheduler, self.train, axes)
        else:
            check_trains(ddps, optimizer, scheduler, self.train, axes)
            parallel = replace(
                parallel, optimizer="sharded" if optimizers.is_sharded(optimizer) else "whole")
            simplify(ddps, optimizer)
        optimizers.prepare(ddps, optimizer)
        modules = [_inner(ddp) for ddp in ddps]
        if not self.flops:
            num_params = sum(param.numel() for module in modules for param in module.parameters())
            self.flops = 6.0 * num_params * self.train.num_micro_batches
        train = replace(self.train, precision=_precision(ddps[0].config), parallel=parallel,
                        overlap=ddps[0].ddp_config.overlap_grad_reduce)
        return OwnTrainee(train, device, draw, axes, place, modules, ddps, optimizer, scheduler,
                          torch.empty(0), call=self._forward)

    def build_whole(self, device: torch.device, groups: Any) -> Trainee:
        return self.build(device, groups, Axes(), 0)

    def begin(self, trainee: Trainee, whole: Callable[[], Trainee]) -> None:
        """What a script draws may depend on the layout, so what it draws for the whole counts."""
        if trainee.num_parts > 1:
            state_shards.fill(trainee.pieces, whole().pieces)


def check(ddps: Sequence[Any], optimizer: Any, scheduler: Any, train: Train, axes: Axes) -> None:
    """Raises Unfit for what cannot be kept, redone or handed over exactly."""
    check_trains(ddps, optimizer, scheduler, train, axes)
    _check_rows(ddps, optimizer, train, "restart", Unfit)
    for one in optimizers.not_adam(optimizer):
        raise Unfit(f"the state of {one} is not known; that of torch.optim.AdamW is")
    is_sharded = optimizers.is_sharded(optimizer)
    if is_sharded != (train.parallel.optimizer != "whole"):
        kept = "sharded" if is_sharded else "whole"
        raise Untrained(f"the optimizer is {kept}, and loop.parallel.optimizer says that it is not",
                        f"write loop: {{parallel: {{optimizer: {kept}}}}}")


def check_trains(ddps: Sequence[Any], optimizer: Any, scheduler: Any, train: Train, axes: Axes
                 ) -> None:
    """Raises Untrained for what `job.step()` cannot train."""
    for ddp in ddps:
        if not isinstance(ddp, DistributedDataParallel):
            raise Untrained(f"{type(ddp).__name__} is not megatron.core.distributed.Distributed"
                            "DataParallel, whose buffers hold the local sum of gradients",
                            "wrap each chunk of the model in that")
    _check_rows(ddps, optimizer, train, "refused", Untrained)
    _check_sizes(ddps[0].config, [_inner(ddp) for ddp in ddps], train, axes)
    if not isinstance(scheduler, OptimizerParamScheduler):
        raise Untrained(f"its schedule is a {type(scheduler).__name__}, not Megatron's "
                        "OptimizerParamScheduler, whose position is known", "return one of those")
    for one in optimizers.not_adam(optimizer) if axes.tp * axes.pp > 1 else ():
        raise Untrained(f"what {one} steps cannot be given to the parts of a replica; what "
                        "torch.optim.AdamW does can", "train whole replicas, or with Adam")


def simplify(ddps: Sequence[Any], optimizer: Any) -> None:
    """Have Megatron do at once what it was to do beside something else, and leave the division of
    gradients to the step, which divides as `loss` of `adopt` says: the sums are the same."""
    for ddp in ddps:
        if ddp.use_forward_hook:
            ddp.disable_forward_pre_hook(param_sync=False)
            ddp.use_forward_hook = False
        ddp.config.calculate_per_token_loss = True
        ddp.ddp_config.overlap_grad_reduce = ddp.ddp_config.overlap_param_gather = False
        ddp.ddp_config.average_in_collective = False
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0
    for one in optimizers.chained(optimizer):
        one.config.overlap_param_gather = False
        one.config.overlap_param_gather_with_optimizer_step = False


def _check_rows(ddps: Sequence[Any], optimizer: Any, train: Train, grade: Grade,
                kind: type[Unfit]) -> None:
    """Raises `kind` for what the support table grades so."""
    asked = unsupported(ddps[0].config, ddps[0].ddp_config, optimizers.chained(optimizer)[0].config,
                        parallel=train.parallel, modules=[_inner(ddp) for ddp in ddps])
    if rows := [row for row in asked if row.loop.grade == grade]:
        raise kind("; ".join(f"{row.what}: {row.loop.why}" for row in rows),
                   "unicron doctor --support says what can be in a loop")


def _three(built: Any) -> tuple[list[Any], Any, Any]:
    """What `build` has to return. Raises UsageError."""
    match built:
        case ([_, *_] as chunks, optimizer, scheduler):
            return list(chunks), optimizer, scheduler
        case _:
            raise UsageError(
                "`build` has to return three things: the chunks of the model, a list; the "
                f"optimizer; its schedule. It returned {_named(built)}",
                "docs/guides/scripts.md shows one")


def _named(built: Any) -> str:
    kinds = ", ".join(type(one).__name__ for one in built) if isinstance(built, tuple) else ""
    return f"({kinds})" if kinds else f"a {type(built).__name__}"


def _check_sizes(config: Any, modules: Sequence[Any], train: Train, axes: Axes) -> None:
    made = Axes(tp=config.tensor_model_parallel_size, pp=config.pipeline_model_parallel_size,
                chunks=len(modules), dp=axes.dp)
    if made != axes:
        raise Untrained(f"`build` was asked for {axes}, and its configuration says {made}",
                        "take the sizes from its argument `axes`")
    if train.parallel.pipeline == (1,):
        return
    if axes.chunks > 1 and config.batch_p2p_comm:
        raise Untrained("with chunks two stages are each other's next and last, and a batch of "
                        "messages mixes them up", "set overlap_p2p_comm, and batch_p2p_comm False")
    if not train.model.sequence:
        raise Untrained("the stages of a pipeline have to know how long a sample is",
                        "give adopt(sequence=...)")
    for module in modules:
        if not isinstance(module, GPTModel):
            raise Untrained(f"the parts of a {type(module).__name__} in a pipeline have no names "
                            "of their own in the whole model; those of a GPTModel have",
                            "leave loop.parallel.pipeline out")


def _inner(ddp: Any) -> Any:
    module = ddp.module
    return module.module if isinstance(module, Float16Module) else module


def _precision(config: Any) -> Any:
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"
