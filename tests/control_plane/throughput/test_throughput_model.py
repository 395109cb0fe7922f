"""The throughput and memory models, against formulas, published runs and brute force."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product
from typing import Any

import pytest
from bench.throughput.fit import BOUNDS, Fitted, mape
from bench.throughput.rows import (
    Published,
    counted_flops,
    executed_flops,
    fits,
    predicted,
    published,
)
from msgspec.structs import replace
from unicron.control_plane.throughput.flops import iteration_flops, parameters
from unicron.control_plane.throughput.layout_search import Search, losses, modelled
from unicron.control_plane.throughput.layouts import (
    MICRO_NUM_MAX,
    Layout,
    Recomputed,
    divisors,
    refusal,
)
from unicron.control_plane.throughput.memory import KINDS, capacity, layer_activations, memory
from unicron.control_plane.throughput.memory import layer_scores as scores_bytes
from unicron.control_plane.throughput.step_time import (
    AMPERE,
    HOPPER,
    Constants,
    constants_of,
    iteration_s,
    parts,
)
from unicron.events.spec.model import MegatronModel

ROWS = published()


def gpt(**changes: Any) -> MegatronModel:
    facts: dict[str, Any] = {
        "num_layers": 32,
        "hidden": 4096,
        "num_heads": 32,
        "sequence": 2048,
        "vocabulary": 51200,
        "gpu": "A100-80",
        "global_batch": 512,
    }
    return MegatronModel(**{**facts, **changes})


GIBI = 1 << 30
LLAMA_70B = gpt(
    num_layers=80,
    hidden=8192,
    num_heads=64,
    num_query_groups=8,
    ffn_hidden=28672,
    swiglu=True,
    sequence=4096,
    vocabulary=32000,
    tie_embeddings=False,
    gpu="H100-80",
)
MIXTRAL = gpt(
    num_query_groups=8,
    ffn_hidden=14336,
    swiglu=True,
    num_experts=8,
    top_k=2,
    sequence=4096,
    vocabulary=32000,
    tie_embeddings=False,
    gpu="H100-80",
)


# --- FLOPs and parameters ------------------------------------------------------------------------
def test_the_formulas_of_the_papers() -> None:
    model = gpt(num_layers=96, hidden=12288, num_heads=96, global_batch=1536)
    batch, s, v, h, layers = 1536, 2048, 51200, 12288, 96
    once = 72 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    again = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert math.isclose(iteration_flops(model), once, rel_tol=1e-12)
    assert math.isclose(executed_flops(model, "full"), again, rel_tol=1e-12)
    assert executed_flops(model, "none") == iteration_flops(model)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (LLAMA_70B, 68.98),
        (MIXTRAL, 46.70),
        (replace(MIXTRAL, num_experts=0, top_k=1, vocabulary=128256), 8.03),
    ],
    ids=["Llama 2 70B", "Mixtral 8x7B", "Llama 3 8B"],
)
def test_parameters_equal_the_published_counts(model: MegatronModel, billions: float) -> None:
    assert parameters(model).total / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_token_passes_only_top_k_experts() -> None:
    dense = replace(MIXTRAL, num_experts=0, top_k=1)
    one, two = iteration_flops(replace(MIXTRAL, top_k=1)), iteration_flops(MIXTRAL)
    mlp = 6 * 3 * 4096 * 14336 * 32 * 4096 * 512
    assert two - one == mlp
    router = 6 * 4096 * 8 * 32 * 4096 * 512
    assert one - iteration_flops(dense) == router


def test_published_rates_match_our_flops() -> None:
    """If a row has an iteration time, our FLOPs divided by this time give the row's rate."""
    times = {
        row.line: float(line.split(",fp16,")[1].split(",")[0])
        for row in ROWS
        if row.source == "megatron 2020"
        for line in [_line(row.line)]
    }
    assert len(times) == 12
    for row in ROWS:
        if row.line in times:
            rate = counted_flops(row, row.layouts[0]) / times[row.line] / row.num_gpus
            assert rate == pytest.approx(row.rate_flops, rel=0.002), row.name


def _line(number: int) -> str:
    from bench.throughput.rows import FILE

    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return lines[number - 1]


def test_published_parameters_match_ours() -> None:
    """The counts agree within the published rounding. The MPT counts include learned positions."""
    for row in ROWS:
        ours = parameters(row.model).total
        if row.source == "llm-foundry":
            ours += row.model.hidden * row.model.sequence
        assert ours == pytest.approx(row.params, rel=0.035), row.name


# --- memory --------------------------------------------------------------------------------------
def test_activations_of_korthikanti() -> None:
    """Equation 1: s b h (34 + 5 a s / h). Equation 2: 10 + 24 / t. Equation 4: all divided by t."""
    model, size = gpt(dropout=0.1, flash_attention=False), 2048 * 4096
    one = Layout()
    assert layer_activations(model, one) == 34 * size
    assert scores_bytes(model, one) == 5 * 32 * 2048 * 2048
    split = Layout(tp=8, sequence_parallel=False)
    assert layer_activations(model, split) == (10 + 24 / 8) * size
    assert layer_activations(model, replace(split, sequence_parallel=True)) == 34 / 8 * size


def test_states_as_megatron_counts_them() -> None:
    model = gpt()
    for dp, bytes_each in ((1, 18.0), (8, 6 + 12 / 8)):
        found = memory(model, Layout(dp=dp, shards="optimizer"))
        states = found.weights + found.gradients + found.optimizer
        assert states == pytest.approx(parameters(model).total * bytes_each, rel=1e-9)
    plain = memory(model, Layout(dp=8))
    assert plain.optimizer == 12 * parameters(model).total
    kept = memory(replace(model, kept_sum=True), Layout(dp=8))
    assert kept.total - plain.total == 4 * parameters(model).total


def test_more_recomputation_stores_fewer_activations() -> None:
    model = gpt(flash_attention=False, dropout=0.1)
    ways: tuple[Recomputed, ...] = ("none", "selective", "full")
    none, selective, full = (memory(model, Layout(recompute=way)).activations for way in ways)
    assert none > selective > full
    assert none - selective == pytest.approx(31 * scores_bytes(model, Layout()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.line}-{row.name}")
def test_published_layouts_are_accepted(row: Published) -> None:
    """Each published run worked, so its layout and recomputation must be accepted."""
    assert row.layouts, "no layout is accepted"
    assert any(fits(row.model, layout) for layout in row.layouts)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (gpt(), Layout()),  # 6.7e9 parameters of 18 bytes
        (gpt(num_layers=96, hidden=12288, num_heads=96), Layout(tp=8, recompute="full")),
        (
            gpt(gpu="A100-40", num_layers=40, hidden=5120, num_heads=40),
            Layout(tp=4, dp=2, recompute="full"),
        ),
        (gpt(sequence=65536), Layout(tp=2, dp=8, shards="optimizer")),  # too many activations
        (gpt(flash_attention=False, sequence=16384), Layout(tp=4, dp=8, shards="optimizer")),
        (MIXTRAL, Layout(tp=2, dp=8, ep=1, shards="optimizer")),
    ],
)
def test_layouts_that_exceed_the_memory_do_not_fit(model: MegatronModel, layout: Layout) -> None:
    assert refusal(model, layout) == ""
    assert not fits(model, layout)


def test_expert_parallel_makes_the_mixture_fit() -> None:
    assert fits(MIXTRAL, Layout(tp=2, pp=2, dp=8, ep=8, shards="optimizer", recompute="full"))


# --- layouts that Megatron rejects ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp": 16}, "a node's 8 GPUs"),
        ({"tp": 3}, "32 heads"),
        ({"pp": 5}, "32 layers"),
        ({"pp": 4, "chunks": 3}, "32 layers"),
        ({"chunks": 2}, "without a pipeline"),
        ({"dp": 513}, "512 micro-batches"),
        ({"micro": 3}, "the batch of 512"),
        ({"pp": 8, "chunks": 2, "dp": 48}, "must divide the micro-batches"),
        ({"ep": 2, "dp": 2}, "0 experts"),
        ({"cp": 3}, "the sequence of 2048"),
    ],
)
def test_layouts_that_megatron_rejects_are_refused(changes: dict[str, Any], why: str) -> None:
    assert why in refusal(gpt(), Layout(**changes))


def test_query_groups_limit_tensor_parallel() -> None:
    assert "4 query groups" in refusal(gpt(num_query_groups=4), Layout(tp=8))
    assert refusal(gpt(num_query_groups=4), Layout(tp=4)) == ""


def test_experts_divide_ranks() -> None:
    assert "EP 4 does not divide the DP 2" in refusal(MIXTRAL, Layout(ep=4, dp=2))
    assert "EP 3 does not divide 8 experts" in refusal(MIXTRAL, Layout(ep=3, dp=3))


# --- the search ----------------------------------------------------------------------------------
SMALL = {
    "tight": (gpt(num_layers=6, hidden=1024, num_heads=8, global_batch=24), 3.4),
    "roomy": (gpt(num_layers=4, hidden=512, num_heads=4, global_batch=30, zero1=False), 40.0),
    "old": (
        gpt(
            num_layers=4,
            hidden=1024,
            num_heads=16,
            global_batch=16,
            flash_attention=False,
            dropout=0.1,
            overlap=False,
            sequence=1024,
        ),
        3.0,
    ),
    "experts": (
        gpt(
            num_layers=2,
            hidden=512,
            num_heads=4,
            num_query_groups=2,
            num_experts=6,
            top_k=2,
            swiglu=True,
            ffn_hidden=1024,
            global_batch=12,
        ),
        3.1,
    ),
    "long": (
        gpt(num_layers=2, hidden=512, num_heads=4, sequence=32768, global_batch=8, gpus_per_node=4),
        4.4,
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_search_agrees_with_brute_force(name: str) -> None:
    """The rates are equal to the last bit. Of equal splits, brute force uses the least DP."""
    model, gib = SMALL[name]
    num_gpus, best, seen = 24, defaultdict[int, float](float), set[object]()
    for layout in _all(model, num_gpus):
        most_each = -(-(model.global_batch // layout.micro) // layout.dp)
        deal = (replace(layout, dp=1), most_each)
        if deal not in seen and memory(model, layout).total <= gib * GIBI:
            seen.add(deal)
            rate = iteration_flops(model) / iteration_s(model, layout, constants_of(model))
            size = layout.model_parallel * layout.dp
            best[size] = max(best[size], rate)
    most, steps = 0.0, {}
    for size in range(1, num_gpus + 1):
        if best[size] > most:
            most = steps[size] = best[size]
    found = Search(model, num_gpus, gib * GIBI).best()
    assert {one.size: one.rate_flops for one in found} == steps
    assert len(steps) > 3
    for one in found:
        assert refusal(model, one.layout) == ""
        assert memory(model, one.layout).total <= gib * GIBI
        assert one.layout.model_parallel * one.layout.dp == one.size


def _all(model: MegatronModel, num_gpus: int) -> list[Layout]:
    counts = range(1, num_gpus + 1)
    shards = "optimizer" if model.zero1 else "none"
    context = [x for x in (1, 2, 4, 8) if x == 1 or model.sequence // x >= 4096]
    ways: tuple[Recomputed, ...] = ("none", "selective", "full")
    micros = divisors(model.global_batch, MICRO_NUM_MAX)
    shapes = product(
        divisors(8, 8),
        divisors(model.num_layers, num_gpus),
        context,
        divisors(model.num_experts, 8) or [1],
        micros,
        divisors(model.num_layers, model.num_layers),
        ways,
    )
    return [
        layout
        for tp, pp, cp, ep, micro, chunks, way in shapes
        for dp in counts
        if tp * pp * cp * dp <= num_gpus
        for layout in [
            Layout(
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                dp=dp,
                micro=micro,
                chunks=chunks,
                recompute=way,
                shards=shards,
            )
        ]
        if not refusal(model, layout)
    ]


def test_an_uneven_split_is_as_slow_as_its_fullest_replica() -> None:
    model, constants = gpt(global_batch=12, zero1=False, overlap=False), constants_of(gpt())
    flat = replace(constants, link_share=1e9, network_share=1e9)
    times = [iteration_s(model, Layout(dp=dp), flat) for dp in (4, 5, 6)]
    assert times[0] == pytest.approx(times[1], rel=1e-6)
    assert times[2] < times[1]


def test_the_layout_text_names_the_bottleneck() -> None:
    found = modelled(LLAMA_70B, 64)
    assert found.sizes[0] == 16
    assert found.layouts[0] == (
        "TP 2 x PP 8 x DP 1, micro-batch 1, all recomputed; 78.6 of 79.1 GiB; memory binds: "
        "TP 2 x PP 4 x DP 2, micro-batch 1, 5 chunks a stage, no recomputation needs 146.8 GiB and "
        "would be 37 % faster"
    )
    roomy = modelled(gpt(num_layers=12, hidden=1024, num_heads=16), 8)
    assert "of 79.2 GiB; most is lost to element-wise work: " in roomy.layouts[-1]


def test_losses_and_arithmetic_add_up_to_the_iteration() -> None:
    layout = Layout(tp=4, pp=4, dp=7, chunks=1, shards="optimizer")
    constants = constants_of(LLAMA_70B)
    one = parts(LLAMA_70B, layout, constants)
    whole = iteration_s(LLAMA_70B, layout, constants)
    lost = math.fsum(share for _, share in losses(LLAMA_70B, layout))
    assert lost + 512 / 7 * one.arithmetic_s / whole == pytest.approx(1)


def test_a_model_that_fits_nowhere_is_refused_with_figures() -> None:
    found = modelled(LLAMA_70B, 8)
    assert found.sizes == ()
    assert found.refused.startswith(
        "no layout on at most 8 GPUs fits into 79.1 GiB: TP 8 x DP 1, micro-batch 1, all recomp"
    )


def test_the_same_bits_on_every_machine() -> None:
    found = modelled(LLAMA_70B, 64)
    assert [(size, rate.hex()) for size, rate in zip(found.sizes, found.rates_flops, strict=True)][
        :3
    ] == PINNED


PINNED = [
    (16, "0x1.68eb7a86185e1p+52"),
    (20, "0x1.bfbcb836d9635p+52"),
    (30, "0x1.545a549b8e48fp+53"),
]


def test_every_kind_of_gpu_is_complete() -> None:
    for name, kind in KINDS.items():
        assert kind.memory_bytes_s > kind.nvlink_bytes_s > kind.network_bytes_s > 0
        printed = int(name.split("-")[1])
        assert 0.9 * printed < kind.memory_bytes / 1e9 < 1.1 * printed
        assert (kind.fp8_flops > 0) == (name[0] in "HB")


# --- against published runs ----------------------------------------------------------------------
SOURCES = {
    ("A100", "megatron 2021-04"): 3.5,
    ("A100", "megatron 2021-01"): 4.0,
    ("A100", "megatron 2020"): 5.0,
    ("H100", "megatron-core 0.8"): 4.5,
    ("A100", "llm-foundry"): 8.5,
    ("H100", "llm-foundry"): 8.5,
}


def by_source() -> dict[tuple[str, str], list[Published]]:
    found = defaultdict[tuple[str, str], list[Published]](list)
    for row in ROWS:
        if row.kind in ("A100", "H100") and row.model.precision != "fp8":
            found[row.kind, row.source].append(row)
    return found


def test_the_constants_predict_the_published_rates() -> None:
    groups = by_source()
    assert groups.keys() == SOURCES.keys()
    for group, most in SOURCES.items():
        pairs = [
            (predicted(row, constants_of(row.model))[0], row.rate_flops) for row in groups[group]
        ]
        assert mape(pairs) < most, group


def test_no_constant_would_fit_much_better_a_tenth_away() -> None:
    """The constants in the code are a local minimum of the error of the fit."""
    values = [
        AMPERE.gemm_share,
        HOPPER.gemm_share,
        AMPERE.scores_share,
        HOPPER.scores_share,
        AMPERE.passes,
        AMPERE.link_share,
        AMPERE.network_share,
    ]
    assert replace(AMPERE, gemm_share=0, scores_share=0) == replace(
        HOPPER, gemm_share=0, scores_share=0
    )
    thinned = {group: rows[::4] if len(rows) > 20 else rows for group, rows in by_source().items()}

    def error(constants: list[float]) -> float:
        fitted = Fitted(constants)
        return math.fsum(
            mape([(fitted.predict(row), row.rate_flops) for row in rows])
            for rows in thinned.values()
        ) / len(thinned)

    here = error(values)
    for place, (low, high) in enumerate(BOUNDS):
        for factor in (1.1, 1 / 1.1):
            tried = list(values)
            tried[place] = min(max(tried[place] * factor, low), high)
            assert error(tried) > here - 0.1, (place, factor)


def test_constants_are_used() -> None:
    """Each constant changes the prediction for at least one published row."""
    for name in Constants.__struct_fields__:
        changed = {
            row.line: replace(
                constants_of(row.model), **{name: 0.9 * getattr(constants_of(row.model), name)}
            )
            for row in ROWS
        }
        assert any(
            predicted(row, changed[row.line])[0] < predicted(row, constants_of(row.model))[0]
            for row in ROWS[::7]
        ) or (
            name == "passes"
            and any(
                predicted(row, changed[row.line])[0] > predicted(row, constants_of(row.model))[0]
                for row in ROWS[::7]
            )
        )


def test_capacity_depends_on_the_kind_of_gpu() -> None:
    assert (
        capacity(gpt(gpu="H200-141")) > capacity(gpt(gpu="H100-80")) > capacity(gpt(gpu="A100-40"))
    )
