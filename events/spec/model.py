"""The spec's `model:`: what determines the throughput of a command that trains with Megatron."""

from typing import ClassVar, Literal

from msgspec import Struct

from .validation import need

Gpu = Literal[
    "V100-32",
    "A100-40",
    "A100-80",
    "A800-80",
    "H100-80",
    "H800-80",
    "H20-96",
    "H200-141",
    "B200-180",
]
Recompute = Literal["any", "none", "selective", "full"]
LAYERS_NUM_MAX = 10_000
WIDTH_NUM_MAX = 1 << 20
TOKENS_NUM_MAX = 1 << 24
BATCH_NUM_MAX = 1 << 20
NODE_NUM_MAX = 1024
EXPERTS_NUM_MAX = 4096
_LAYOUT = (
    "a layout is no part of the model: with loop:, write it under loop.parallel; else "
    "Unicron chooses it, and the command reads UNICRON_TP, UNICRON_PP and so on"
)


class MegatronModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPT, how it is trained, and on which GPUs. The names are those of Megatron's arguments.

    0 selects a default: `num_query_groups` is then `num_heads`, and `ffn_hidden` 4 times `hidden`.
    With `micro_batch: 0` and `recompute: any`, the layout search chooses the value. `num_experts`
    above 0 makes each layer a mixture of experts: a token passes `top_k` experts, and `ffn_hidden`
    is the width of one. `dropout` above 0 stores masks. `flash_attention` does not write the scores
    to memory. `overlap` reduces gradients during the backward pass. `kept_sum` counts the memory of
    in-memory recovery: a rank's local gradients until their reduction has succeeded. For a task, it
    follows from `train.kept_sum` or `loop.kept_sum`, and `exact_sum_bits`, that of exact sums, from
    `reproducible`.
    """

    NOT_KEYS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("tensor", "pipeline", "chunks", "tp", "pp", "vpp"), _LAYOUT
    )
    """Hints for words that users write here and that are not keys (validation.py)."""
    num_layers: int
    hidden: int
    num_heads: int
    num_query_groups: int = 0
    ffn_hidden: int = 0
    swiglu: bool = False
    num_experts: int = 0
    top_k: int = 1
    sequence: int
    vocabulary: int
    tie_embeddings: bool = True
    dropout: float = 0.0
    flash_attention: bool = True
    gpu: Gpu
    gpus_per_node: int = 8
    precision: Literal["fp16", "bf16", "fp8"] = "bf16"
    global_batch: int
    micro_batch: int = 0
    zero1: bool = True
    overlap: bool = True
    recompute: Recompute = "any"
    kept_sum: bool = False
    exact_sum_bits: Literal[0, 32, 64] = 0

    @property
    def num_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_heads

    @property
    def ffn(self) -> int:
        """Width of the MLP, or of one expert."""
        return self.ffn_hidden or 4 * self.hidden


def check_model(model: MegatronModel, path: str) -> None:
    """Check the model at `path` of the spec. Raises SpecError."""
    _check_sizes(model, path)
    need(
        model.hidden % model.num_heads == 0,
        f"{path}.hidden",
        f"{model.hidden} is not divisible by num_heads {model.num_heads}",
        "each head gets an equal part of the width",
    )
    need(
        model.num_heads % model.num_groups == 0,
        f"{path}.num_query_groups",
        f"{model.num_query_groups} does not divide num_heads {model.num_heads}",
        "each group has the same number of heads",
    )
    need(
        model.global_batch % max(model.micro_batch, 1) == 0,
        f"{path}.global_batch",
        f"{model.global_batch} is not a multiple of micro_batch {model.micro_batch}",
        "micro-batches must all have the same size",
    )
    need(0 <= model.dropout < 1, f"{path}.dropout", "must be in [0, 1)")
    need(
        model.num_experts > 0 or model.top_k == 1,
        f"{path}.top_k",
        "is for a mixture of experts",
        "give num_experts, or leave it out",
    )
    need(
        model.top_k <= max(model.num_experts, 1),
        f"{path}.top_k",
        f"{model.top_k} of {model.num_experts} experts",
        "lower it",
    )
    need(
        model.precision != "fp8" or model.gpu[0] in "HB",
        f"{path}.precision",
        f"a {model.gpu} has no fp8",
        "write bf16",
    )
    need(
        model.precision == "fp16" or model.gpu[0] != "V",
        f"{path}.precision",
        f"a {model.gpu} has no {model.precision}",
        "write fp16",
    )


def _check_sizes(model: MegatronModel, path: str) -> None:
    for name, least, most in (
        ("num_layers", 1, LAYERS_NUM_MAX),
        ("hidden", 1, WIDTH_NUM_MAX),
        ("num_heads", 1, WIDTH_NUM_MAX),
        ("num_query_groups", 0, WIDTH_NUM_MAX),
        ("ffn_hidden", 0, WIDTH_NUM_MAX),
        ("num_experts", 0, EXPERTS_NUM_MAX),
        ("top_k", 1, EXPERTS_NUM_MAX),
        ("sequence", 1, TOKENS_NUM_MAX),
        ("vocabulary", 1, TOKENS_NUM_MAX),
        ("gpus_per_node", 1, NODE_NUM_MAX),
        ("global_batch", 1, BATCH_NUM_MAX),
        ("micro_batch", 0, BATCH_NUM_MAX),
    ):
        value = getattr(model, name)
        need(
            least <= value <= most, f"{path}.{name}", f"must be at least {least} and at most {most}"
        )


class Axes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layout on tp * cp * pp * dp GPUs, in Megatron's rank order: `tp` consecutive ranks form a
    tensor-parallel group. `chunks`: virtual pipeline stages per rank. `ep`: expert-parallel size.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    micro_batch: int = 1
    chunks: int = 1
    recompute: Literal["none", "selective", "full"] = "none"


class Modelled(Struct, frozen=True, forbid_unknown_fields=True):
    """T(t, x) by the analytical model. It has only sizes that are faster than all smaller ones."""

    sizes: tuple[int, ...]
    rates_flops: tuple[float, ...]
    layouts: tuple[str, ...]
    """For each size: the layout and its bottleneck."""
    refused: str = ""
    """Why no size is possible."""
    axes: tuple[Axes, ...] = ()
    """For each size: the layout as numbers; empty in logs of earlier releases."""
