"""Layouts: how Megatron can distribute one model over GPUs."""

import math
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ...events.spec.model import Axes, MegatronModel

Recomputed = Literal["none", "selective", "full"]
Shards = Literal["none", "optimizer", "mirrored"]
MICRO_NUM_MAX = 8
"""Largest micro-batch that the search tries if the spec does not set one."""
CONTEXT_LENGTH = 4096
"""Context parallelism leaves each rank at least this many tokens of a sample."""
CHUNKS_NUM_MAX = 32


class Layout(Struct, frozen=True, kw_only=True):
    """A distribution of the model over tp * cp * pp * dp GPUs. `ep` GPUs with the same layers and
    different samples share the experts. `chunks` is Megatron's number of virtual pipeline stages.
    `shards` is what data-parallel ranks shard: `optimizer` is ZeRO-1; with `mirrored`, each rank
    also has the optimizer's shard of another."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    micro: int = 1
    chunks: int = 1
    recompute: Recomputed = "none"
    sequence_parallel: bool = True
    shards: Shards = "none"

    @property
    def model_parallel(self) -> int:
        """GPUs of one replica; the layout has dp times as many."""
        return self.tp * self.cp * self.pp

    @property
    def axes(self) -> Axes:
        """The layout in the form that a command gets."""
        return Axes(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            dp=self.dp,
            micro_batch=self.micro,
            chunks=self.chunks,
            recompute=self.recompute,
        )

    def axes_in_words(self) -> str:
        """The sizes of the axes: `TP 8 x PP 4 x DP 6`."""
        parts = [("TP", self.tp), ("PP", self.pp), ("CP", self.cp), ("EP", self.ep)]
        axes = [f"{name} {count}" for name, count in parts if count > 1]
        return " x ".join([*axes, f"DP {self.dp}"])

    def passes_in_words(self) -> str:
        """How a replica trains: `micro-batch 2, 5 chunks a stage, no recomputation`."""
        chunks = f", {self.chunks} chunks a stage" if self.chunks > 1 else ""
        how = {
            "none": "no recomputation",
            "selective": "attention recomputed",
            "full": "all recomputed",
        }
        return f"micro-batch {self.micro}{chunks}, {how[self.recompute]}"

    def told(self) -> str:
        """A readable description: `TP 8 x PP 4 x DP 6, micro-batch 2, ...`."""
        return f"{self.axes_in_words()}, {self.passes_in_words()}"


def refusal(model: MegatronModel, layout: Layout) -> str:
    """Why megatron-core 0.16 (TransformerConfig, parallel_state, schedules) would not start with
    this layout; empty if it would. Our own rule: tensor parallelism stays inside a node."""
    tp, pp, cp, ep = layout.tp, layout.pp, layout.cp, layout.ep
    rules = (
        (tp > model.gpus_per_node, f"TP {tp} is more than a node's {model.gpus_per_node} GPUs"),
        (model.num_heads % tp != 0, f"TP {tp} does not divide {model.num_heads} heads"),
        (model.num_groups % tp != 0, f"TP {tp} does not divide {model.num_groups} query groups"),
        (model.ffn % tp != 0, f"TP {tp} does not divide the MLP's width {model.ffn}"),
        (
            tp > 1 and layout.sequence_parallel and model.sequence % (tp * cp) != 0,
            f"TP {tp} does not divide the sequence of {model.sequence}",
        ),
        (
            model.num_layers % (pp * layout.chunks) != 0,
            f"PP {pp} with {layout.chunks} chunks does not divide {model.num_layers} layers",
        ),
        (layout.chunks > 1 and pp == 1, "chunks without a pipeline"),
        (
            cp > 1 and model.sequence % (2 * cp) != 0,
            f"twice CP {cp} does not divide the sequence of {model.sequence}",
        ),
        (
            ep > 1 and (not model.num_experts or model.num_experts % ep != 0),
            f"EP {ep} does not divide {model.num_experts} experts",
        ),
        (layout.dp * cp % ep != 0, f"EP {ep} does not divide the DP {layout.dp} x CP {cp} ranks"),
        (
            model.global_batch % layout.micro != 0,
            f"micro-batch {layout.micro} does not divide the batch of {model.global_batch}",
        ),
    )
    for broken, why in rules:
        if broken:
            return why
    num = model.global_batch // layout.micro
    if layout.dp > num:
        return f"DP {layout.dp} is more than the {num} micro-batches"
    if layout.chunks > 1 and num % (layout.dp * pp) != 0:
        return f"with chunks, PP {pp} must divide the micro-batches of each of DP {layout.dp}"
    return ""


def divisors(number: int, most: int) -> list[int]:
    """Divisors of `number` up to `most`, ascending."""
    return [x for x in range(1, min(number, most) + 1) if number % x == 0]


def shapes(model: MegatronModel, num_gpus: int) -> Iterator[Layout]:
    """Every layout of at most `num_gpus` GPUs, with the smallest dp and without chunks. Context
    parallelism is tried if each rank keeps CONTEXT_LENGTH tokens, expert parallelism if there are
    experts. Layouts that differ only in recomputation follow each other, least first."""
    micros = (
        [model.micro_batch] if model.micro_batch else divisors(model.global_batch, MICRO_NUM_MAX)
    )
    shards: Shards = "optimizer" if model.zero1 else "none"
    for tp in divisors(model.gpus_per_node, num_gpus):
        most = max(min(model.sequence // CONTEXT_LENGTH, num_gpus // tp), 1)
        for cp in (1 << bit for bit in range(most.bit_length())):
            for ep in divisors(model.num_experts, num_gpus) or [1]:
                dp = ep // math.gcd(cp, ep)
                for pp in divisors(model.num_layers, num_gpus // (tp * cp * dp)):
                    for micro in micros:
                        layout = Layout(
                            tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, micro=micro, shards=shards
                        )
                        if not refusal(model, layout):
                            for recompute in recomputes(model):
                                yield replace(layout, recompute=recompute)


def recomputes(model: MegatronModel) -> tuple[Recomputed, ...]:
    """Permitted recomputation, least first. Flash attention always recomputes: no `selective`."""
    if model.recompute != "any":
        return (model.recompute,)
    return ("none", "full") if model.flash_attention else ("none", "selective", "full")
