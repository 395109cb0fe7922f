"""The analytical model: the iteration time of a layout.

docs/guides/throughput-model.md describes it. It uses no power, exponent or logarithm, so
the result has the same bits on every machine.
"""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ...events.spec.model import MegatronModel
from .flops import head_flops, layer_flops
from .layouts import Layout
from .memory import KINDS, LOGIT_BYTES, GpuKind, layer_activations, layer_scores, rank_parameters

Floats = NDArray[np.float64]

STEP_BYTES = 34
"""Bytes that the optimizer step moves per parameter: read 18, write 16."""


class Constants(Struct, frozen=True, kw_only=True):
    """Fitted constants; docs/guides/throughput-model.md has the data and the accuracy."""

    gemm_share: float
    """Share of the peak in a large matrix product."""
    scores_share: float
    """Share of the peak in attention scores; masked scores count too."""
    passes: float
    """How often an activation byte is read or written in a forward and backward pass."""
    link_share: float
    """Share of NVLink's rate in a collective."""
    network_share: float
    """Share of the network's rate in a collective."""


class Parts(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch on the slowest stage, by term."""

    arithmetic_s: float
    elements_s: float
    tensor_s: float
    context_s: float
    experts_s: float
    pipeline_s: float

    @property
    def total_s(self) -> float:
        return (
            self.arithmetic_s
            + self.elements_s
            + self.tensor_s
            + self.context_s
            + self.experts_s
            + self.pipeline_s
        )


class Ending(Struct, frozen=True, kw_only=True):
    """The end of an iteration as a function of dp: gradient reduction and optimizer step."""

    shared_bytes: float
    experts_bytes: float
    """Bytes sent per GPU in the limit of infinite dp; experts have fewer replicas."""
    step_s: float
    """The step on one GPU without sharding."""
    spread: bool
    cp: int
    ep: int
    node_ranks: int
    """Data-parallel ranks (cp times dp) per node."""
    link_bytes_s: float
    shared_bytes_s: float
    experts_bytes_s: float
    """Rates of NVLink, and of the network for shared and expert parameters."""
    hidden_s: float
    """Part of the reduction that overlaps the last micro-batch."""

    def seconds(self, dp: int) -> tuple[float, float]:
        """(the part of the reduction that overlaps nothing, the optimizer step)."""
        reduce_s, step_s = self.seconds_each(np.array([float(dp)]))
        return float(reduce_s[0]), float(step_s[0])

    def seconds_each(self, dp: Floats) -> tuple[Floats, Floats]:
        ranks = dp * self.cp
        alike, near = ranks / self.ep, ranks <= self.node_ranks
        sent_s = (
            self.shared_bytes
            * (ranks - 1)
            / ranks
            / np.where(near, self.link_bytes_s, self.shared_bytes_s)
        )
        sent_s += (
            self.experts_bytes
            * (alike - 1)
            / alike
            / np.where(near, self.link_bytes_s, self.experts_bytes_s)
        )
        return (
            np.maximum(sent_s - self.hidden_s, 0.0),
            self.step_s / (ranks if self.spread else np.ones_like(ranks)),
        )


def bubble(layout: Layout) -> float:
    """Idle time of a stage in each iteration, in micro-batches."""
    return (layout.pp - 1) / layout.chunks


def iteration_s(model: MegatronModel, layout: Layout, constants: Constants) -> float:
    """The time of one iteration of a layout that Megatron accepts, on the replica with the most
    micro-batches. With chunks, their number is rounded up to a multiple of pp for Megatron."""
    num = -(-(model.global_batch // layout.micro) // layout.dp)
    if layout.chunks > 1:
        num = -(-num // layout.pp) * layout.pp
    micro_s = parts(model, layout, constants).total_s
    reduce_s, step_s = ending(model, layout, constants, micro_s).seconds(layout.dp)
    return (num + bubble(layout)) * micro_s + (reduce_s + step_s)


def parts(model: MegatronModel, layout: Layout, constants: Constants) -> Parts:
    kind, layers = KINDS[model.gpu], model.num_layers / layout.pp
    head = _head_s(model, layout, kind, constants)
    return Parts(
        arithmetic_s=_arithmetic_s(model, layout, kind, constants) * layers + head[0],
        elements_s=_elements_s(model, layout, kind, constants) * layers + head[1],
        tensor_s=_tensor_s(model, layout, kind, constants) * layers,
        context_s=_context_s(model, layout, kind, constants) * layers,
        experts_s=_experts_s(model, layout, kind, constants) * layers,
        pipeline_s=_pipeline_s(model, layout, kind, constants),
    )


def ending(model: MegatronModel, layout: Layout, constants: Constants, micro_s: float) -> Ending:
    """The end of an iteration: gradients are all-reduced; with ZeRO-1 they are reduced, and 16-bit
    weights gathered. Gradients are fp32, but fp16 with precision fp16 (Megatron's default). The
    shard that goes to its mirror is 1/dp of that, and is left out."""
    kind = KINDS[model.gpu]
    shared, experts = rank_parameters(model, layout, 1)
    gradient = 2 if model.precision == "fp16" else 4
    size = 2 * gradient if layout.shards == "none" else gradient + 2
    far = 1 << 62
    return Ending(
        shared_bytes=size * shared,
        experts_bytes=size * experts,
        step_s=STEP_BYTES * (shared + experts) / kind.memory_bytes_s,
        spread=layout.shards != "none",
        cp=layout.cp,
        ep=layout.ep,
        node_ranks=model.gpus_per_node // layout.tp,
        link_bytes_s=kind.nvlink_bytes_s * constants.link_share,
        shared_bytes_s=_rate(model, far, layout.tp, kind, constants),
        experts_bytes_s=_rate(model, far, layout.tp * layout.ep, kind, constants),
        hidden_s=micro_s if model.overlap else 0.0,
    )


def _arithmetic_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Matrix products of one layer, forward and backward; scores are always in 16 bits."""
    weights, scores = layer_flops(model)
    share = layout.micro / (layout.tp * layout.cp)
    peak = kind.fp8_flops if model.precision == "fp8" else kind.peak_flops
    weights_s = weights * share / (peak * is_.gemm_share)
    scores_s = scores * share / (kind.peak_flops * is_.scores_share)
    again = {"none": 0.0, "selective": scores_s, "full": weights_s + scores_s}
    return 3 * (weights_s + scores_s) + again[layout.recompute]


def _elements_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    layer, scores = layer_activations(model, layout), layer_scores(model, layout)
    again = {"none": 0.0, "selective": scores / 3, "full": (layer + scores) / 3}
    return (layer + scores + again[layout.recompute]) * is_.passes / kind.memory_bytes_s


def _tensor_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Two all-reduces of b s h in 16 bits in each pass."""
    if layout.tp == 1:
        return 0.0
    num = 6 if layout.recompute == "full" else 4
    ring = 2 * (layout.tp - 1) / layout.tp
    size = 2 * model.sequence * layout.micro * model.hidden / layout.cp
    return num * ring * size / (kind.nvlink_bytes_s * is_.link_share)


def _context_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Ring exchange of keys and values, twice as much backward; less its overlap with scores."""
    if layout.cp == 1:
        return 0.0
    keys = model.hidden // model.num_heads * model.num_groups
    size = 2 * 2 * model.sequence * layout.micro * keys / layout.tp
    rate = _rate(model, layout.tp * layout.cp, model.gpus_per_node, kind, is_)
    scores = layer_flops(model)[1] * layout.micro / (layout.tp * layout.cp)
    hidden_s = 3 * scores / (kind.peak_flops * is_.scores_share)
    return max(3 * size * (layout.cp - 1) / layout.cp / rate - hidden_s, 0.0)


def _experts_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """All-to-all of tokens to their experts and back, in each pass."""
    if layout.ep == 1:
        return 0.0
    num = 6 if layout.recompute == "full" else 4
    size = 2 * model.sequence * layout.micro * model.hidden * model.top_k / (layout.tp * layout.cp)
    rate = _rate(model, layout.tp * layout.ep, model.gpus_per_node, kind, is_)
    return num * size * (layout.ep - 1) / layout.ep / rate


def _head_s(
    model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants
) -> tuple[float, float]:
    """Logits and loss on the last stage, beside its layers: (arithmetic, elements)."""
    share = layout.micro / (layout.tp * layout.cp)
    products_s = 3 * head_flops(model) * share / (kind.peak_flops * is_.gemm_share)
    size = LOGIT_BYTES * model.sequence * share * model.vocabulary
    return products_s, size * is_.passes / kind.memory_bytes_s


def _pipeline_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Activations to the next stage, gradients to the previous one; more often with chunks."""
    if layout.pp == 1:
        return 0.0
    size = 2 * model.sequence * layout.micro * model.hidden / (layout.tp * layout.cp)
    rate = _rate(model, layout.model_parallel, model.gpus_per_node, kind, is_)
    return 2 * size * layout.chunks / rate


def _rate(model: MegatronModel, span: int, groups: int, kind: GpuKind, is_: Constants) -> float:
    """Bytes per second of a collective within `span` consecutive ranks. Beyond the node, its
    `groups` share the network at the same time; data in the node is combined over NVLink first."""
    link = kind.nvlink_bytes_s * is_.link_share
    if span <= model.gpus_per_node:
        return link
    wires = max(model.gpus_per_node // groups, 1)
    return min(link, kind.network_bytes_s * is_.network_share * wires)


# --- constants, as `make bench-throughput` fits them (docs/guides/throughput-model.md) ---
# Fitted to published rows of A100 and H100 in 16 bits, with equal weight of each source. A kind of
# GPU without rows takes the constants of the most similar kind. One measured point corrects the
# level of a task's throughput; the constants give its shape.

AMPERE = Constants(
    gemm_share=0.679, scores_share=0.556, passes=6.94, link_share=0.628, network_share=0.993
)
HOPPER = Constants(
    gemm_share=0.686, scores_share=0.279, passes=6.94, link_share=0.628, network_share=0.993
)


def constants_of(model: MegatronModel) -> Constants:
    return AMPERE if model.gpu[0] in "VA" else HOPPER
