"""The training model: Megatron's GPT, DDP, optimizer and schedule, built from the job spec.

All parts are stock megatron-core, except the core attention.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import Tensor

from ....events.spec.job import Model, Train
from ....events.spec.model import Axes
from ....events.spec.parallelism import VOCABULARY, Coordinates, coordinates, is_fully_replicated
from ..communicators.process_groups import groups_for_building
from ..dependencies import private_megatron
from ..dependencies.private_megatron import buffers_of, set_gradient
from . import architecture
from .exact_sum import ExactSum, part_tied_uses
from .experts import Experts
from .optimizers import (
    chained,
    mirror_of,
    noted_builds,
    parts,
    prepare,
    shards,
    without_collectives,
)
from .random_draws import Draw, global_name, seed_of, without_initialisation
from .random_draws import draw as draw_weights
from .text_data import END_CODE, carries_loss

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class TrainingModel:
    """The model, its optimizer and its schedule in one process. Megatron has no types."""

    train: Train
    device: torch.device
    draw: Draw
    axes: Axes
    place: int
    modules: list[Any]
    ddps: list[Any]
    optimizer: Any
    scheduler: Any
    positions: Tensor
    shards: Any = None
    """The state shards, once state_shards.py has listed them."""
    mirror: Any = None
    """The optimizer of the mirrored shard, if any."""
    is_released: bool = False
    """Whether its memory has been freed (`release`)."""
    is_gathered: bool = True
    """False: the parameters beside this member's shard are not yet gathered after the step."""
    exact: ExactSum | None = field(init=False, default=None)
    """The local sum of gradients in integers, with `reproducible: bitwise`."""
    experts: Experts = field(init=False)

    def __post_init__(self) -> None:
        self.experts = Experts(self.modules, self.device)
        if self.train.reproducible == "rounding":
            return
        params = [param for _, param in self.named_parameters() if param.requires_grad]
        number = {id(param): index for index, param in enumerate(params)}
        buffers = self.buffers
        spans = {
            id(param): (at, slice(*buffer.param_index_map[param][:2]))
            for at, buffer in enumerate(buffers)
            for param in buffer.params
        }
        exact = self.exact = ExactSum(
            params,
            [spans[id(param)] for param in params],
            [buffer.grad_data.numel() for buffer in buffers],
            self.device,
            bits=self.train.reproducible_bits,
            num_summands=self.train.num_micro_batches * self.axes.tp,
            on_added=_adds_nothing,
        )
        for module in self.modules:
            part_tied_uses(module, lambda weight, gradient: exact.add(number[id(weight)], gradient))

    @property
    def replica_size(self) -> int:
        return self.axes.tp * self.axes.pp

    @property
    def is_plain(self) -> bool:
        """True for a whole replica with the whole optimizer."""
        return is_fully_replicated(self.axes, self.train.parallel)

    @property
    def is_sharded(self) -> bool:
        """True if it steps only a shard of its parameters (Megatron's distributed optimizer)."""
        return self.train.parallel.optimizer != "whole"

    @property
    def at(self) -> Coordinates:
        return coordinates(self.axes, self.place)

    @property
    def description(self) -> bytes:
        """The file that describes the model beside its weights; empty if only a script can."""
        model, config = self.train.model, self.modules[0].config
        dtype: Any = str(DTYPES[self.train.precision]).removeprefix("torch.")
        return architecture.encode(
            architecture.Gpt2(
                n_layer=model.num_layers,
                n_embd=model.hidden,
                n_head=model.num_heads,
                n_inner=config.ffn_hidden_size,
                n_positions=model.sequence,
                tie_word_embeddings=model.tie_embeddings,
                layer_norm_epsilon=config.layernorm_epsilon,
                embd_pdrop=model.dropout,
                attn_pdrop=model.dropout,
                resid_pdrop=model.dropout,
                bos_token_id=END_CODE,
                eos_token_id=END_CODE,
                torch_dtype=dtype,
            )
        )

    @property
    def roots(self) -> tuple[Any, ...]:
        """The objects that may contain process-group handles."""
        return (*self.ddps, *self.optimizers, self.scheduler)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Its own optimizer, and the optimizer of the mirrored shard if it has one."""
        return (self.optimizer,) if self.mirror is None else (self.optimizer, self.mirror)

    def mirrored_size(self) -> dict[str, int]:
        """The parameters in the mirrored shard, and the bytes of its masters and moments."""
        own = [] if self.mirror is None else list(shards(self.mirror).values())
        num = sum(main.numel() for main in own)
        each = state_bytes_beside(DTYPES[self.train.precision].itemsize)
        return {"mirrored_params": num, "mirrored_bytes": num * each}

    @property
    def gradients(self) -> list[Tensor]:
        """The local sum of gradients: Megatron's flat buffers, fp32."""
        return [buffer.grad_data for buffer in self.buffers]

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients have memory. `clear` allocates it."""
        return not any(gradients.is_meta for gradients in self.gradients)

    @property
    def buffers(self) -> list[Any]:
        """Megatron's flat buffers, which contain its buckets."""
        return [buffer for ddp in self.ddps for buffer in buffers_of(ddp)]

    def flat_parameters(self) -> Iterator[list[Any]]:
        """For each of Megatron's flat buffers, but those of experts: its parameters in order."""
        for ddp in self.ddps:
            for buffer in ddp.buffers:
                yield list(buffer.param_index_map)

    @property
    def bucket_groups(self) -> list[Any]:
        """The units of the gradient reduction, in its order."""
        return [group for ddp in self.ddps for group in private_megatron.bucket_groups_of(ddp)]

    @property
    def gathers_in_forward(self) -> bool:
        """True if Megatron gathers the parameters in the next forward (overlap_param_gather)."""
        return self.is_sharded and bool(self.ddps[0].ddp_config.overlap_param_gather)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """The parameters of this position, with their names in the whole model."""
        for module in self.modules:
            for name, param in module.named_parameters():
                yield global_name(module, name), param

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this position that are state: those that a checkpoint would have."""
        for module in self.modules:
            persistent = module.state_dict().keys()
            for name, buffer in module.named_buffers():
                if name in persistent:
                    yield global_name(module, name), buffer

    def clear(self) -> None:
        """Zero the gradients, which get memory if they have none, and what routers add up."""
        if not self.has_gradients:
            self.set_gradients(
                [torch.empty_like(gradients, device=self.device) for gradients in self.gradients]
            )
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        if self.exact is not None:
            self.exact.clear()
        self.experts.clear()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def release(self) -> None:
        """Free the memory of a model that is no longer used, even if references to it remain."""
        self.is_released = True
        self.shards = {}  # they refer to the memory, not to the parameters
        self.release_gradients()
        for part in chain.from_iterable(map(parts, self.optimizers)):
            part.state.clear()
            for group in part.param_groups:
                for main in group["params"]:
                    main.data, main.grad = main.data.new_empty(0), None
        for part in chain.from_iterable(map(chained, self.optimizers)):
            private_megatron.release_shards(part)
        for _, param in self.named_parameters():
            param.data = param.data.new_empty(0)
        for bucket_group in self.bucket_groups:
            private_megatron.forget_parameter_views(bucket_group)
        for buffer in self.buffers:
            private_megatron.release_parameters(buffer)

    def release_gradients(self) -> None:
        """Free the memory of the gradients, which no longer count. `clear` allocates it again."""
        for _, param in self.named_parameters():
            param.grad = None
        if self.exact is not None:
            self.exact.release()
        self.set_gradients(
            [torch.empty_like(gradients, device="meta") for gradients in self.gradients]
        )

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Make these tensors, one for each buffer, the local sum of gradients."""
        for buffer, new in zip(self.buffers, gradients, strict=True):
            set_gradient(buffer, new)
        for group in self.bucket_groups:  # Megatron keeps views of the old memory here
            private_megatron.forget_gradient_views(group)

    def loss(self, tokens: Tensor) -> Tensor:
        """What a micro-batch [rows, sequence + 1] adds to the sum that `divisor` divides: the sum
        of its tokens, or with `per_micro_batch` its mean divided by the number of micro-batches. A
        micro-batch without tokens that carry loss adds 0 there, but is counted."""
        tokens = self.given(tokens)
        return self.loss_of(self.forward(self.ddps[0], tokens), tokens)

    def given(self, tokens: Tensor) -> Tensor:
        """The micro-batch on the training device."""
        return tokens.to(self.device)

    def padding(self, tokens: Tensor) -> Tensor:
        """A micro-batch of the same shape that contributes zero."""
        return torch.zeros_like(tokens)

    def forward(self, ddp: Any, tokens: Tensor) -> Tensor:
        """The loss of each token from the last chunk; the activations from any other chunk."""
        out: Tensor = ddp(
            tokens[:, :-1].contiguous(), self.positions, None, labels=tokens[:, 1:].contiguous()
        )
        return out

    def loss_of(self, per_token: Tensor, tokens: Tensor) -> Tensor:
        """The same as `loss`, from the loss of each token."""
        loss = (per_token.float() * carries_loss(tokens)).sum()
        if self.train.loss == "per_token":
            return loss
        return loss / self.num_tokens(tokens).clamp(min=1) / self.train.num_micro_batches

    def num_tokens(self, tokens: Tensor) -> Tensor:
        """The number of tokens of a micro-batch that carry loss, on the device."""
        return carries_loss(tokens).sum()

    def scale_auxiliary_losses(self) -> None:
        """Scale the gradients of the auxiliary losses of routers as that of the loss."""
        if not self.experts.are_somewhere:
            return
        scale = self.optimizer.scale_loss(torch.ones(1, device=self.device))
        self.experts.scale(
            scale if self.train.loss == "per_token" else scale / self.train.num_micro_batches
        )

    def divisor(self, num_tokens: float) -> float:
        """The divisor of the loss sum of all micro-batches, with `num_tokens` tokens in all."""
        return max(num_tokens, 1.0) if self.train.loss == "per_token" else 1.0


def _adds_nothing(param: Any) -> None:
    """Megatron adds nothing for this parameter: the exact sum has its gradient."""
    param.grad_added_to_main_grad = True


def build(
    train: Train,
    device: torch.device,
    groups: Any = None,
    axes: Axes | None = None,
    place: int = 0,
    *,
    draws: bool = True,
) -> TrainingModel:
    """Build the model at a position of a layout; `axes` None: a whole replica. The initial weights
    are equal in all layouts; with `draws=False` they are undefined. Does not communicate. `groups`
    None: Megatron's parallel state of one process. `clear` gives the gradients memory."""
    axes = axes or Axes()
    at = coordinates(axes, place)
    draw = Draw(train.seed)
    torch.manual_seed(seed_of(train.seed, 4))
    if device.type == "cuda":
        draw.at(0, 0)
    config = _config(train, axes)
    is_sharded = train.parallel.optimizer != "whole"
    groups = groups_for_building(groups) if groups is not None else None
    modules = [
        _module(train, config, draw, axes, at, chunk, groups, draws=draws)
        for chunk in range(axes.chunks)
    ]
    ddps = [
        _ddp(train, config, module.to(device), groups, is_sharded=is_sharded, is_first=not chunk)
        for chunk, module in enumerate(modules)
    ]
    with noted_builds() as noted:
        optimizer = _optimizer(train, ddps, groups, is_sharded=is_sharded)
    positions = torch.arange(train.model.sequence, device=device).expand(train.batch.micro, -1)
    return TrainingModel(
        train,
        device,
        draw,
        axes,
        place,
        modules,
        ddps,
        optimizer,
        _scheduler(train, optimizer),
        positions,
        mirror=mirror_of(optimizer, ddps, noted) if has_mirror(train, axes) else None,
    )


def has_mirror(train: Train, axes: Axes) -> bool:
    """Whether a member of this layout mirrors the shard of another."""
    return train.parallel.optimizer == "mirrored" and axes.dp > 1


def _module(
    train: Train,
    config: Any,
    draw: Draw,
    axes: Axes,
    at: Coordinates,
    chunk: int,
    groups: Any,
    *,
    draws: bool,
) -> Any:
    with without_initialisation(config):
        module: Any = GPTModel(
            config,
            _layers(draw),
            vocab_size=VOCABULARY,
            max_sequence_length=train.model.sequence,
            pre_process=at.pp == 0 and chunk == 0,
            post_process=at.pp == axes.pp - 1 and chunk == axes.chunks - 1,
            share_embeddings_and_output_weights=train.model.tie_embeddings,
            pg_collection=groups,
            vp_stage=chunk if axes.chunks > 1 else None,
        )
    if draws:
        draw_weights(module, config, train.seed, tp=at.tp)
    if train.model.dropout:
        for layer in module.decoder.layers:
            layer.register_forward_pre_hook(draw.at_layer)
    return module


def _ddp(
    train: Train, config: Any, module: Any, groups: Any, *, is_sharded: bool, is_first: bool
) -> Any:
    bucket_size = train.bucket_params or None
    if groups is not None and bucket_size is None:
        # Megatron's own default, which 0.15 would compute from a global that is not set.
        bucket_size = max(40_000_000, 1_000_000 * groups.dp.size())
    ddp: Any = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=train.overlap,
            bucket_size=bucket_size,
            use_distributed_optimizer=is_sharded,
            check_for_nan_in_grad=False,
        ),
        module if train.precision == "fp32" else Float16Module(config, module),
        disable_bucketing=not is_first,
        pg_collection=groups,
    )
    ddp.train()
    # The optimizer is built after this: its moments and the gradients are not in memory at once.
    for buffer in buffers_of(ddp):
        set_gradient(buffer, torch.empty_like(buffer.grad_data, device="meta"))
    return ddp


class Size(NamedTuple):
    """The size of the whole model: its parameters, and the bytes of its state."""

    num_params: int
    state_bytes: int


def whole_size(train: Train, groups: Any) -> Size:
    """Counted on the meta device: nothing is allocated. `groups` have one member."""
    with torch.device("meta"):
        module = _module(
            train,
            _config(train, Axes()),
            Draw(train.seed),
            Axes(),
            Coordinates(tp=0, pp=0, dp=0),
            0,
            groups_for_building(groups),
            draws=False,
        )
    num_params = sum(param.numel() for param in module.parameters())
    item_bytes = DTYPES[train.precision].itemsize
    buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
    return Size(
        num_params, num_params * (item_bytes + state_bytes_beside(item_bytes)) + buffer_bytes
    )


def state_bytes_beside(item_bytes: int) -> int:
    """Bytes of a parameter's state beside itself: fp32 moments, and the master copy of 16 bits."""
    return 8 if item_bytes == 4 else 12


def _config(train: Train, axes: Axes) -> Any:
    model = train.model
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        num_attention_heads=model.num_heads,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        use_cpu_initialization=True,
        tensor_model_parallel_size=axes.tp,
        pipeline_model_parallel_size=axes.pp,
        virtual_pipeline_model_parallel_size=axes.chunks if axes.chunks > 1 else None,
        # With chunks, the next and the previous stage can be the same stage. Megatron would mix up
        # their messages within a batch.
        overlap_p2p_comm=axes.chunks > 1,
        batch_p2p_comm=axes.chunks == 1,
        # The scale of the gradient must not depend on the assignment of micro-batches. With this
        # option Megatron sums without a division, for either loss.
        calculate_per_token_loss=True,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        params_dtype=DTYPES[train.precision],
        pipeline_dtype=DTYPES[train.precision],
        bias_dropout_fusion=False,
    )


def _layers(draw: Draw) -> Any:
    spec: Any = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=CoreAttention, params={"draw": draw}
    )
    return spec


def _optimizer(train: Train, ddps: list[Any], groups: Any, *, is_sharded: bool) -> Any:
    spec, dynamic = train.optimizer, train.dynamic_loss_scale
    config = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.beta1,
        adam_beta2=spec.beta2,
        adam_eps=spec.eps,
        clip_grad=spec.clip_grad,
        use_distributed_optimizer=is_sharded,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        params_dtype=DTYPES[train.precision],
        loss_scale=train.loss_scale,
        initial_loss_scale=dynamic.initial,
        min_loss_scale=dynamic.min,
        loss_scale_window=dynamic.window,
        hysteresis=dynamic.hysteresis,
    )
    with without_collectives():
        optimizer: Any = get_megatron_optimizer(
            config, ddps, use_gloo_process_groups=False, pg_collection=groups
        )
    prepare(ddps, optimizer)
    return optimizer


def _scheduler(train: Train, optimizer: Any) -> Any:
    """Megatron's schedule, counted in samples."""
    spec, batch = train.optimizer, train.batch.global_
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if spec.warmup_iterations else spec.lr,
        max_lr=spec.lr,
        min_lr=min(spec.min_lr, spec.lr),
        lr_warmup_steps=spec.warmup_iterations * batch,
        lr_decay_steps=train.iterations * batch,
        lr_decay_style=spec.decay,
        start_wd=spec.weight_decay,
        end_wd=spec.weight_decay,
        wd_incr_steps=train.iterations * batch,
        wd_incr_style="constant",
    )


def iteration_flops(model: Model, num_samples: int) -> float:
    """72 B s l h^2 (1 + s/6h + V/12lh): Narayanan et al., SC 2021, without recomputation."""
    s, l, h = model.sequence, model.num_layers, model.hidden  # noqa: E741
    return 72.0 * num_samples * s * l * h * h * (1 + s / (6 * h) + VOCABULARY / (12 * l * h))


# --- Core attention with torch's scaled dot product, for Megatron's ModuleSpec ---
class CoreAttention(MegatronModule):  # type: ignore[misc, unused-ignore]
    """Causal attention. Dropout is drawn per (iteration, micro-batch, layer, head counted over all
    ranks), so it depends neither on the computing rank nor on tensor parallelism."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        draw: Draw,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.dropout: float = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.draw = draw
        self.tp_rank: int = pg_collection.tp.rank() if pg_collection is not None else 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query, key, value [sequence, batch, heads, width] -> [sequence, batch, heads * width]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.training and self.dropout > 0:
            out = self._with_dropout(q, k, v)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale
            )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Unfused attention, because the fused kernels accept no generator."""
        scale = self.softmax_scale or 1 / math.sqrt(q.size(-1))
        length = q.size(2)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(future, float("-inf"))
        first_head = self.tp_rank * q.size(1)
        keep = torch.stack(
            [
                torch.rand(
                    (q.size(0), length, length),
                    device=q.device,
                    generator=self.draw.generator(self.layer_number, first_head + head, q.device),
                )
                >= self.dropout
                for head in range(q.size(1))
            ],
            dim=1,
        )
        # In fp32, as in the fused kernels: 16 bits are too few for a sum of many small numbers.
        weights = scores.softmax(-1, dtype=torch.float32) * keep / (1 - self.dropout)
        return weights.to(v.dtype) @ v
