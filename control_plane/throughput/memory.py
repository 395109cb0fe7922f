"""Kinds of GPU, and the memory model: bytes on the fullest GPU of a layout.

Weights, gradients and optimizer state are counted as in Megatron's `theoretical_memory_usage.py`:
18 bytes a parameter; with ZeRO-1 6 + 12 / d. Activations are counted as in Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), equations 1 to 6.
"""

from msgspec import Struct

from ...events.spec.model import Gpu, MegatronModel
from .flops import parameters
from .layouts import Layout

# --- kinds of GPU, and their specifications ---
_GIB_BYTES = 1 << 30


class GpuKind(Struct, frozen=True, kw_only=True):
    """One GPU in its maker's reference server; rates per second, links in one direction.
    `peak_flops`: dense tensor cores in fp16 and bf16; `fp8_flops`: 0 without fp8."""

    peak_flops: float
    fp8_flops: float = 0.0
    memory_bytes: int
    """Total memory as CUDA reports it: less than the nominal size."""
    memory_bytes_s: float
    nvlink_bytes_s: float
    network_bytes_s: float


KINDS: dict[Gpu, GpuKind] = {
    # Data sheet of the V100 SXM3; DGX-2: 8 times 100 Gbit/s for 16 GPUs.
    "V100-32": GpuKind(
        peak_flops=125e12,
        memory_bytes=int(31.7 * _GIB_BYTES),
        memory_bytes_s=900e9,
        nvlink_bytes_s=150e9,
        network_bytes_s=6.25e9,
    ),
    # Data sheet of the A100 SXM4; DGX A100: 8 times 200 Gbit/s for 8 GPUs.
    "A100-40": GpuKind(
        peak_flops=312e12,
        memory_bytes=int(39.4 * _GIB_BYTES),
        memory_bytes_s=1555e9,
        nvlink_bytes_s=300e9,
        network_bytes_s=25e9,
    ),
    "A100-80": GpuKind(
        peak_flops=312e12,
        memory_bytes=int(79.2 * _GIB_BYTES),
        memory_bytes_s=2039e9,
        nvlink_bytes_s=300e9,
        network_bytes_s=25e9,
    ),
    # The A100 with 8 of its 12 NVLinks.
    "A800-80": GpuKind(
        peak_flops=312e12,
        memory_bytes=int(79.2 * _GIB_BYTES),
        memory_bytes_s=2039e9,
        nvlink_bytes_s=200e9,
        network_bytes_s=25e9,
    ),
    # Data sheet of the H100 SXM5, without sparsity; DGX H100: 8 times 400 Gbit/s for 8 GPUs.
    "H100-80": GpuKind(
        peak_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_bytes=int(79.1 * _GIB_BYTES),
        memory_bytes_s=3350e9,
        nvlink_bytes_s=450e9,
        network_bytes_s=50e9,
    ),
    # The H100 with 8 of its 18 NVLinks.
    "H800-80": GpuKind(
        peak_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_bytes=int(79.1 * _GIB_BYTES),
        memory_bytes_s=3350e9,
        nvlink_bytes_s=200e9,
        network_bytes_s=50e9,
    ),
    "H20-96": GpuKind(
        peak_flops=148e12,
        fp8_flops=296e12,
        memory_bytes=int(95.0 * _GIB_BYTES),
        memory_bytes_s=4000e9,
        nvlink_bytes_s=450e9,
        network_bytes_s=50e9,
    ),
    # Data sheet of the H200 SXM; memory as reported by a device.
    "H200-141": GpuKind(
        peak_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_bytes=int(139.8 * _GIB_BYTES),
        memory_bytes_s=4800e9,
        nvlink_bytes_s=450e9,
        network_bytes_s=50e9,
    ),
    # Data sheet of the DGX B200, without sparsity: 8 GPUs with 1,440 GB and 64 TB/s together.
    "B200-180": GpuKind(
        peak_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=int(178.0 * _GIB_BYTES),
        memory_bytes_s=8000e9,
        nvlink_bytes_s=900e9,
        network_bytes_s=50e9,
    ),
}

# --- memory ---
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES, KEPT_BYTES = 2, 4, 12, 4
"""Bytes per parameter: 16-bit weight; fp32 gradient; fp32 copy and two moments; fp32 kept sum."""
LOGIT_BYTES = 4
"""Bytes per logit: fp32, for the loss."""
RESERVED_BYTES = 3 << 29
"""1.5 GiB beside tensors: CUDA's context, NCCL's buffers, workspaces, what the allocator loses. An
assumption; `make gpu-check CHECKS=memory` compares it with a GPU."""


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes on the fullest GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    kept: float
    """The local sum of gradients that recovery keeps, or exact sums need."""
    reserved: float = RESERVED_BYTES
    """What is no tensor; 0 where no GPU is named."""

    @property
    def total(self) -> float:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.kept
            + self.reserved
        )


def in_gib(num_bytes: float) -> str:
    """The number in GiB with one digit after the point, less than 0.1 GiB in MiB: `79.1 GiB`."""
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 0.1 or not num_bytes else f"{1024 * gib:.1f} MiB"


def capacity(model: MegatronModel) -> int:
    return KINDS[model.gpu].memory_bytes


def memory(model: MegatronModel, layout: Layout) -> Memory:
    """The memory of the fullest stage: the first or the last of the pipeline."""
    first = _stage(model, layout, last=layout.pp == 1)
    if layout.pp == 1:
        return first
    last = _stage(model, layout, first=False)
    return first if first.total >= last.total else last


def rank_parameters(
    model: MegatronModel, layout: Layout, num_embeddings: int
) -> tuple[float, float]:
    """(without experts, of experts): parameters per GPU of a stage with `num_embeddings`."""
    has = parameters(model)
    layers = model.num_layers / layout.pp
    shared = (has.shared_layer * layers + has.embedding * num_embeddings) / layout.tp
    return shared, has.expert_layer * layers / (layout.tp * layout.ep)


def _stage(
    model: MegatronModel, layout: Layout, *, first: bool = True, last: bool = True
) -> Memory:
    num_embeddings = 1 if first != last or model.tie_embeddings else 2
    shared, experts = rank_parameters(model, layout, num_embeddings)
    ranks = layout.dp * layout.cp
    held = shared + experts
    spread = layout.shards != "none"
    states = shared / (ranks if spread else 1) + experts / (ranks / layout.ep if spread else 1)
    if layout.shards == "mirrored":
        states *= min(2, layout.dp)
    return Memory(
        weights=WEIGHT_BYTES * held,
        gradients=GRADIENT_BYTES * held,
        optimizer=OPTIMIZER_BYTES * states,
        activations=_activations(model, layout, first=first, last=last),
        kept=_sum_bytes(model) * held,
    )


def _sum_bytes(model: MegatronModel) -> float:
    """Bytes per parameter of the local sum beside Megatron's gradients. An exact sum needs no copy,
    but overlapped with the backward each bucket is reduced in one."""
    if not model.exact_sum_bits:
        return KEPT_BYTES if model.kept_sum else 0
    return model.exact_sum_bits / 8 * (1 + (model.overlap and model.kept_sum))


def _activations(model: MegatronModel, layout: Layout, *, first: bool, last: bool) -> float:
    """Bytes of the activations that outstanding backward passes need."""
    tokens = model.sequence * layout.micro / layout.cp
    spread = layout.tp if layout.sequence_parallel else 1
    layer = layer_activations(model, layout)
    layers = model.num_layers / layout.pp
    if layout.recompute == "full":
        kept, working = 2 * tokens * model.hidden / spread, layer + layer_scores(model, layout)
    elif layout.recompute == "selective":
        kept, working = layer, layer_scores(model, layout)
    else:
        kept, working = layer + layer_scores(model, layout), 0.0
    found = kept * layers * in_flight(model, layout, first=first) + working
    if first:
        found += tokens * model.hidden / spread * in_flight(model, layout, first=True)
    if last:
        found += tokens * (4 * model.hidden / spread + LOGIT_BYTES * model.vocabulary / layout.tp)
    return found


def in_flight(model: MegatronModel, layout: Layout, *, first: bool) -> float:
    """Micro-batches whose activations a stage holds at once; more with chunks (equation 4)."""
    if not first:
        return 1.0
    most = layout.pp + (layout.pp - 1) / layout.chunks if layout.chunks > 1 else layout.pp
    num = model.global_batch // layout.micro
    return min(float(-(-num // layout.dp)), most) if layout.chunks == 1 else float(most)


def layer_activations(model: MegatronModel, layout: Layout) -> float:
    """Bytes of one layer and micro-batch on one GPU, without scores: 34 s b h with dropout. In
    units of s b h: attention 3 + (4 + 4 g/a) / t, the MLP 3 + 4 f/h / t (6 f/h if gated), norms 4.
    Without dropout, two masks of 1 are absent. With sequence parallelism, every term is divided by
    t. A token that passes `top_k` experts counts as `top_k` tokens of the MLP."""
    tokens = model.sequence * layout.micro / layout.cp * model.hidden
    split = 4 + 4 * model.num_groups / model.num_heads
    split += (6 if model.swiglu else 4) * model.ffn / model.hidden * model.top_k
    whole = 6 + 2 * model.top_k + (2 if model.dropout else 0)
    return tokens * (
        (split + whole) / layout.tp if layout.sequence_parallel else split / layout.tp + whole
    )


def layer_scores(model: MegatronModel, layout: Layout) -> float:
    """Bytes of one layer's softmax: 2 a s^2 b; 5 a s^2 b with the mask and output of dropout."""
    if model.flash_attention:
        return 0.0
    each = 5 if model.dropout else 2
    return (
        each
        * model.num_heads
        * model.sequence
        * model.sequence
        * layout.micro
        / (layout.tp * layout.cp)
    )
