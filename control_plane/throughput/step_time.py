"""The analytical model: how long an iteration takes in one layout.

Arithmetic at a share of the peak, element-wise work at a share of the memory's rate, tensor
parallel over NVLink, everything else over NVLink or the network, the bubble of the pipeline, the
reduction of gradients and the optimizer's step. No power, exponent or logarithm: the same bits on
every machine.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ...events.spec.model import MegatronModel
from .flops import head_flops, layer_flops, parameters
from .gpus import KINDS, GpuKind
from .layouts import Layout
from .memory import LOGIT_BYTES, layer_activations, layer_scores, rank_parameters

Floats = NDArray[np.float64]

STEP_BYTES = 34
"""Moved by one step of the optimizer for each parameter: read 18, write 16."""


class Constants(Struct, frozen=True, kw_only=True):
    """What is fitted: docs/guides/throughput-model.md says to what, and how well."""

    gemm_share: float
    """Of the peak, by a large matrix product."""
    scores_share: float
    """Of the peak, by attention's scores, counted whole."""
    passes: float
    """Times that a byte of activations is moved in a forward and a backward pass."""
    link_share: float
    """Of NVLink's rate, by a collective."""
    network_share: float
    """Of the network's rate, by a collective."""


class Parts(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch on the slowest stage, by what takes them."""

    arithmetic_s: float
    elements_s: float
    tensor_s: float
    context_s: float
    experts_s: float
    pipeline_s: float
    gather_s: float
    """FSDP's weights and gradients."""

    @property
    def total_s(self) -> float:
        return (self.arithmetic_s + self.elements_s + self.tensor_s + self.context_s
                + self.experts_s + self.pipeline_s + self.gather_s)


class Ending(Struct, frozen=True, kw_only=True):
    """What ends an iteration, by dp: gradients are reduced, the optimizer steps."""

    shared_bytes: float
    experts_bytes: float
    """Sent for each GPU's parameters were dp without end; experts' are alike on fewer."""
    step_s: float
    """On one GPU, if nothing is spread."""
    spread: bool
    cp: int
    ep: int
    node_ranks: int
    """Data-parallel ranks, cp times dp, that share a node."""
    link_bytes_s: float
    shared_bytes_s: float
    experts_bytes_s: float
    """NVLink, and the network for each of the two."""
    hidden_s: float
    """So much of the reduction goes on behind the last micro-batch."""

    def seconds(self, dp: int) -> tuple[float, float]:
        """(reduction that is seen, step)."""
        ranks = dp * self.cp
        alike, near = ranks / self.ep, ranks <= self.node_ranks
        sent_s = self.shared_bytes * (ranks - 1) / ranks / (
            self.link_bytes_s if near else self.shared_bytes_s)
        sent_s += self.experts_bytes * (alike - 1) / alike / (
            self.link_bytes_s if near else self.experts_bytes_s)
        return max(sent_s - self.hidden_s, 0.0), self.step_s / (ranks if self.spread else 1)

    def seconds_each(self, dp: Floats) -> Floats:
        """The sum of both for each dp, to the last bit as `seconds` has them."""
        ranks = dp * self.cp
        alike, near = ranks / self.ep, ranks <= self.node_ranks
        sent_s = self.shared_bytes * (ranks - 1) / ranks / np.where(
            near, self.link_bytes_s, self.shared_bytes_s)
        sent_s += self.experts_bytes * (alike - 1) / alike / np.where(
            near, self.link_bytes_s, self.experts_bytes_s)
        step_s = self.step_s / (ranks if self.spread else np.ones_like(ranks))
        found: Floats = np.maximum(sent_s - self.hidden_s, 0.0) + step_s
        return found


def bubble(layout: Layout) -> float:
    """Micro-batches for which a stage stands idle in each iteration."""
    return (layout.pp - 1) / layout.chunks


def iteration_s(model: MegatronModel, layout: Layout, constants: Constants) -> float:
    """What one iteration takes. The layout is taken as one that Megatron accepts.

    As long as the replica with most micro-batches: they may be dealt unevenly.
    """
    num = -(-(model.global_batch // layout.micro) // layout.dp)
    micro_s = parts(model, layout, constants).total_s
    reduce_s, step_s = ending(model, layout, constants, micro_s).seconds(layout.dp)
    return (num + bubble(layout)) * micro_s + (reduce_s + step_s)


def parts(model: MegatronModel, layout: Layout, constants: Constants) -> Parts:
    """Of one micro-batch. They do not depend on dp, but with FSDP."""
    kind, layers = KINDS[model.gpu], model.num_layers / layout.pp
    head = _head_s(model, layout, kind, constants)
    return Parts(
        arithmetic_s=_arithmetic_s(model, layout, kind, constants) * layers + head[0],
        elements_s=_elements_s(model, layout, kind, constants) * layers + head[1],
        tensor_s=_tensor_s(model, layout, kind, constants) * layers,
        context_s=_context_s(model, layout, kind, constants) * layers,
        experts_s=_experts_s(model, layout, kind, constants) * layers,
        pipeline_s=_pipeline_s(model, layout, kind, constants),
        gather_s=_gather_s(model, layout, kind, constants))


def ending(model: MegatronModel, layout: Layout, constants: Constants, micro_s: float) -> Ending:
    """Gradients there and back; with ZeRO-1 there, and weights in 16 bits back.

    In fp32, but with precision fp16, where Megatron sums them in fp16 unless told otherwise.
    """
    kind = KINDS[model.gpu]
    shared, experts = rank_parameters(model, layout, 1)
    gradient = 2 if model.precision == "fp16" else 4
    size = {"none": 2 * gradient, "optimizer": gradient + 2, "all": 0}[layout.shards]
    far = 1 << 62
    return Ending(
        shared_bytes=size * shared, experts_bytes=size * experts,
        step_s=STEP_BYTES * (shared + experts) / kind.memory_bytes_s,
        spread=layout.shards != "none", cp=layout.cp, ep=layout.ep,
        node_ranks=model.gpus_per_node // layout.tp,
        link_bytes_s=kind.nvlink_bytes_s * constants.link_share,
        shared_bytes_s=_rate(model, far, layout.tp, kind, constants),
        experts_bytes_s=_rate(model, far, layout.tp * layout.ep, kind, constants),
        hidden_s=micro_s if model.overlap else 0.0)


def _peak(model: MegatronModel, kind: GpuKind) -> float:
    return kind.fp8_flops if model.precision == "fp8" else kind.peak_flops


def _arithmetic_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Matrix products of one layer, forward and backward. Attention's are in 16 bits always."""
    weights, scores = layer_flops(model)
    share = layout.micro / (layout.tp * layout.cp)
    weights_s = weights * share / (_peak(model, kind) * is_.gemm_share)
    scores_s = scores * share / (kind.peak_flops * is_.scores_share)
    again = {"none": 0.0, "selective": scores_s, "full": weights_s + scores_s}
    return 3 * (weights_s + scores_s) + again[layout.recompute]


def _elements_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    layer, scores = layer_activations(model, layout), layer_scores(model, layout)
    again = {"none": 0.0, "selective": scores / 3, "full": (layer + scores) / 3}
    return (layer + scores + again[layout.recompute]) * is_.passes / kind.memory_bytes_s


def _tensor_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Two all-reduces in each pass: of b s h in 16 bits."""
    if layout.tp == 1:
        return 0.0
    num = 6 if layout.recompute == "full" else 4
    ring = 2 * (layout.tp - 1) / layout.tp
    size = 2 * model.sequence * layout.micro * model.hidden / layout.cp
    return num * ring * size / (kind.nvlink_bytes_s * is_.link_share)


def _context_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Keys and values go round, forward and twice that backward, behind the scores."""
    if layout.cp == 1:
        return 0.0
    keys = model.hidden // model.num_heads * model.num_groups
    size = 2 * 2 * model.sequence * layout.micro * keys / layout.tp
    rate = _rate(model, layout.tp * layout.cp, model.gpus_per_node, kind, is_)
    scores = layer_flops(model)[1] * layout.micro / (layout.tp * layout.cp)
    hidden_s = 3 * scores / (kind.peak_flops * is_.scores_share)
    return max(3 * size * (layout.cp - 1) / layout.cp / rate - hidden_s, 0.0)


def _experts_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Tokens to their experts and back, in each pass."""
    if layout.ep == 1:
        return 0.0
    num = 6 if layout.recompute == "full" else 4
    size = 2 * model.sequence * layout.micro * model.hidden * model.top_k / (layout.tp * layout.cp)
    rate = _rate(model, layout.tp * layout.ep, model.gpus_per_node, kind, is_)
    return num * size * (layout.ep - 1) / layout.ep / rate


def _head_s(model: MegatronModel, layout: Layout, kind: GpuKind,
            is_: Constants) -> tuple[float, float]:
    """Logits and loss: (arithmetic, elements). The last stage has them beside its layers."""
    share = layout.micro / (layout.tp * layout.cp)
    products_s = 3 * head_flops(model) * share / (kind.peak_flops * is_.gemm_share)
    size = LOGIT_BYTES * model.sequence * share * model.vocabulary
    return products_s, size * is_.passes / kind.memory_bytes_s


def _pipeline_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """Activations to the next stage, gradients to the one before; more often with chunks."""
    if layout.pp == 1:
        return 0.0
    size = 2 * model.sequence * layout.micro * model.hidden / (layout.tp * layout.cp)
    rate = _rate(model, layout.model_parallel, model.gpus_per_node, kind, is_)
    return 2 * size * layout.chunks / rate


def _gather_s(model: MegatronModel, layout: Layout, kind: GpuKind, is_: Constants) -> float:
    """FSDP: weights gathered for each pass, gradients scattered, of every micro-batch."""
    if layout.shards != "all":
        return 0.0
    size = 2 * parameters(model).total * (layout.dp - 1) / layout.dp
    return 3 * size / _rate(model, layout.dp, 1, kind, is_)


def _rate(model: MegatronModel, span: int, groups: int, kind: GpuKind, is_: Constants) -> float:
    """Bytes per second of a collective among GPUs within `span` neighbours.

    Beyond a node, the node's network is shared by the `groups` that speak at once; what is in one
    node is put together over NVLink first.
    """
    link = kind.nvlink_bytes_s * is_.link_share
    if span <= model.gpus_per_node:
        return link
    wires = max(model.gpus_per_node // groups, 1)
    return min(link, kind.network_bytes_s * is_.network_share * wires)


# --- The throughput model's constants, as `make bench-throughput` fits them. ---
#
# To 246 published rows of A100 and H100 in 16 bits, each source counting the same: what they are
# worth in and out of sample stands in docs/guides/throughput-model.md. A kind without rows takes
# those of the kind that is built most alike: its level is a guess, and one measured point corrects
# it.

AMPERE = Constants(gemm_share=0.679, scores_share=0.556, passes=6.94, link_share=0.628,
                   network_share=0.993)
HOPPER = Constants(gemm_share=0.686, scores_share=0.279, passes=6.94, link_share=0.628,
                   network_share=0.993)


def constants_of(model: MegatronModel) -> Constants:
    """Of the model's kind of GPU."""
    return AMPERE if model.gpu[0] in "VA" else HOPPER
