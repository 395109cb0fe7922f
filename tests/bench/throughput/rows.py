"""Published throughput: the rows of tests/data/megatron_throughput.csv as models and layouts.

The table's missing values come from the sources of its rows.
Heads: Narayanan et al., SC'21, table 1, and Megatron-LM's images/tables.tex; 128 wide in
Megatron-Core's own table. Vocabulary: 51,200 and 131,072, Megatron-LM's README of the time. FLOPs
counted: with full recomputation (SC'21 and before); model FLOPs (Megatron-Core r0.8); 6 per
parameter and token, learned positions included, plus scores (llm-foundry). Megatron had no virtual
pipeline stages before April 2021. Shapes of MPT: llm-foundry's scripts/train/yamls; recomputation:
the column "Activation Checkpointing" of its benchmark's README.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import replace
from unicron.control_plane.throughput import flops as model_flops
from unicron.control_plane.throughput.layouts import (
    CHUNKS_NUM_MAX,
    Layout,
    divisors,
    recomputes,
    refusal,
)
from unicron.control_plane.throughput.memory import KINDS, WEIGHT_BYTES, capacity, memory
from unicron.control_plane.throughput.step_time import STEP_BYTES, Constants, iteration_s, parts
from unicron.events.spec.model import Gpu, MegatronModel

FILE = Path(__file__).parents[2] / "data/megatron_throughput.csv"
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, layers, heads."""
HEADS_2020 = {1920: 15, 2304: 18, 3072: 24, 4096: 32}
HEADS_2021 = {
    2304: 24,
    3072: 32,
    4096: 32,
    6144: 48,
    8192: 64,
    10240: 80,
    12288: 96,
    16384: 128,
    20480: 128,
    25600: 160,
}
GPUS: dict[str, Gpu] = {
    "V100 (DGX-2)": "V100-32",
    "A100-40GB (DGX-A100)": "A100-40",
    "A100-40GB": "A100-40",
    "A100-80GB": "A100-80",
    "H100": "H100-80",
    "H100-80GB": "H100-80",
}


class Sharded(Layout, frozen=True, kw_only=True):
    """FSDP (ZeRO-3), which the product's search does not use: dp GPUs that shard all state."""


class Published(NamedTuple):
    """One row: the model, the possible layouts, the measured rate."""

    line: int
    name: str
    source: str
    model: MegatronModel
    layouts: tuple[Layout, ...]
    """All layouts that agree with the row."""
    counted: Literal["model", "executed", "parameters"]
    num_gpus: int
    rate_flops: float
    """Of one GPU; `counted` says which FLOPs."""
    params: float
    oom: bool

    @property
    def kind(self) -> str:
        """V100, A100, H100."""
        return self.model.gpu.split("-")[0]


def published() -> list[Published]:
    """All rows, in their order."""
    with FILE.open(encoding="utf-8", newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    return [_row(number, row) for number, row in enumerate(csv.DictReader(lines), 2)]


def _row(number: int, row: dict[str, str]) -> Published:
    fsdp = "FSDP" in row["framework"]
    model = _mpt(row) if fsdp else _megatron(row)
    layouts = tuple(_sharded(row, model) if fsdp else _laid_out(row, model))
    name = f"{row['model']} {row['gpu']} x {row['gpus']}, sequence {row['seq']}"
    where = {
        "llm-foundry (FSDP)": "llm-foundry",
        "Megatron-Core r0.8.0": "megatron-core 0.8",
        "Megatron-LM": "megatron 2021-04",
        "Megatron-LM (Jan 2021)": "megatron 2021-01",
        "Megatron-LM (2020)": "megatron 2020",
    }[row["framework"]]
    return Published(
        line=number,
        name=name,
        source=where,
        model=model,
        layouts=layouts,
        counted=("parameters" if fsdp else "model" if "Core" in row["framework"] else "executed"),
        num_gpus=int(row["gpus"]),
        rate_flops=float(row["tflops_per_gpu"]) * 1e12,
        params=float(row["params_b"]) * 1e9,
        oom=row["oom"] == "yes",
    )


def _mpt(row: dict[str, str]) -> MegatronModel:
    hidden, num_layers, num_heads = MPT[row["model"].split()[1]]
    return MegatronModel(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        sequence=int(row["seq"]),
        vocabulary=50368,
        gpu=GPUS[row["gpu"]],
        global_batch=int(row["gbs"]),
        precision="fp8" if "fp8" in row["precision"] else "bf16",
    )


def _megatron(row: dict[str, str]) -> MegatronModel:
    hidden, gpu = int(row["hidden"]), GPUS[row["gpu"]]
    model = MegatronModel(
        num_layers=int(row["layers"]),
        hidden=hidden,
        num_heads=hidden // 128,
        sequence=int(row["seq"]),
        vocabulary=131072,
        tie_embeddings=False,
        gpu=gpu,
        global_batch=int(row["gbs"]),
    )
    if "Core" in row["framework"]:
        return model
    heads = HEADS_2020 if "2020" in row["framework"] else HEADS_2021
    return replace(
        model,
        num_heads=heads[hidden],
        vocabulary=51200,
        tie_embeddings=True,
        dropout=0.1,
        flash_attention=False,
        precision="fp16",
        zero1=False,
        overlap=False,
        recompute="full",
        gpus_per_node=16 if gpu == "V100-32" else 8,
    )


def _sharded(row: dict[str, str], model: MegatronModel) -> Iterator[Layout]:
    """FSDP layouts. The newest rows, on more than 64 H100, do not say what they recompute."""
    told = _recomputed(row) if not (model.gpu == "H100-80" and int(row["gpus"]) > 64) else None
    for recompute in recomputes(model):
        if told is None or told == (recompute == "full"):
            yield Sharded(dp=int(row["gpus"]), micro=int(row["mbs"]), recompute=recompute)


def _recomputed(row: dict[str, str]) -> bool:
    """True if the row recomputes activations, according to the README's column."""
    size, sequence, micro = row["model"].split()[1], int(row["seq"]), int(row["mbs"])
    if GPUS[row["gpu"]] == "A100-40":
        least = {"3b": 16384, "1b": 32768, "760m": 32768}
    else:
        least = {"3b": 32768, "1b": 65536, "760m": 65536}
        if (size, sequence) in (("13b", 2048), ("7b", 2048)):
            return micro > 6
    return size in ("70b", "30b", "13b", "7b") or sequence >= least.get(size, 1 << 30)


def _laid_out(row: dict[str, str], model: MegatronModel) -> Iterator[Layout]:
    """If a row has only the GPUs per replica, tensor parallelism is as wide as the node allows."""
    if row["tp"]:
        tp, pp = int(row["tp"]), int(row["pp"])
    else:
        replica = int(row["note"].split()[-1])
        tp, pp = min(replica, 8), replica // min(replica, 8)
    dp, modern = int(row["gpus"]) // (tp * pp), model.flash_attention
    chunked = pp > 1 and "Jan" not in row["framework"]
    for micro in divisors(model.global_batch // dp, model.global_batch):
        for chunks in divisors(model.num_layers // pp, CHUNKS_NUM_MAX) if chunked else [1]:
            for recompute in recomputes(model):
                layout = Layout(
                    tp=tp,
                    pp=pp,
                    dp=dp,
                    micro=micro,
                    chunks=chunks,
                    recompute=recompute,
                    sequence_parallel=modern,
                    shards="optimizer" if modern else "none",
                )
                if not refusal(model, layout):
                    yield layout


def predicted(row: Published, constants: Constants) -> tuple[float, Layout]:
    """(FLOP/s of one GPU, counted as in the row; the layout): the fastest layout that fits.

    If no layout fits, the fastest of all that agree with the row.
    """
    open_to = [x for x in row.layouts if fits(row.model, x)] or row.layouts
    best = min(open_to, key=lambda layout: predicted_s(row.model, layout, constants))
    flops = counted_flops(row, best)
    return flops / predicted_s(row.model, best, constants) / row.num_gpus, best


def predicted_s(model: MegatronModel, layout: Layout, constants: Constants) -> float:
    """The time of an iteration. With FSDP every micro-batch gathers weights for each pass and
    scatters gradients."""
    if not isinstance(layout, Sharded):
        return iteration_s(model, layout, constants)
    kind, num_params = KINDS[model.gpu], model_flops.parameters(model).total
    bytes_s = kind.nvlink_bytes_s * constants.link_share
    if layout.dp > model.gpus_per_node:
        bytes_s = min(bytes_s, kind.network_bytes_s * constants.network_share * model.gpus_per_node)
    gather_s = 3 * (2 * num_params * (layout.dp - 1) / layout.dp) / bytes_s
    num = -(-(model.global_batch // layout.micro) // layout.dp)
    step_s = STEP_BYTES * num_params / kind.memory_bytes_s / layout.dp
    return num * (parts(model, layout, constants).total_s + gather_s) + step_s


def fits(model: MegatronModel, layout: Layout) -> bool:
    """True if the layout fits into the memory of the model's GPU."""
    found = memory(model, layout)
    if not isinstance(layout, Sharded):
        return found.total <= capacity(model)
    # 16 bytes a parameter: fp32 weight, gradient and Adam's two moments; two gathered layers.
    each = model_flops.parameters(model)
    gathered = 2 * WEIGHT_BYTES * max(each.shared_layer, each.embedding)
    return 16 * each.total / layout.dp + gathered + found.activations + found.reserved <= capacity(
        model
    )


def executed_flops(model: MegatronModel, recompute: str) -> float:
    """Hardware FLOPs of one iteration, with recomputation.

    Full recomputation: 96 B s l h^2 (1 + s/6h + V/16lh) (Narayanan et al., SC'21, appendix).
    """
    weights, scores = model_flops.layer_flops(model)
    again = {"none": 0, "selective": scores, "full": weights + scores}[recompute]
    return model_flops.iteration_flops(model) + float(model.global_batch * model.num_layers * again)


def counted_flops(row: Published, layout: Layout) -> float:
    """FLOPs of one iteration, counted as in the row."""
    model = row.model
    if row.counted == "executed":
        return executed_flops(model, layout.recompute)
    if row.counted == "model":
        return model_flops.iteration_flops(model)
    scores = 12 * model.num_layers * model.hidden * model.sequence
    return (6 * row.params + scores) * model.sequence * model.global_batch
