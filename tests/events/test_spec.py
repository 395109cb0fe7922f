"""Job specs, layouts and the support table: every refusal has a path, a reason and a hint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unicron.cli.commands import doctor
from unicron.events.errors import SpecError
from unicron.events.records import codec, reports
from unicron.events.spec.job import JobSpec, parse
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import (
    coordinates,
    holders,
    is_plain,
    num_positions,
    position_of,
    replica,
)
from unicron.events.spec.support import ROWS, Grade

TRAIN: dict[str, Any] = {"iterations": 10, "output": "out"}
LAYOUTS = [Axes(tp=tp, pp=pp, dp=dp) for tp in (1, 2, 3) for pp in (1, 2, 4) for dp in (1, 2, 3)]
ROOT = Path(__file__).resolve().parents[2]
REFUSED_KEYS: dict[str, dict[str, Any]] = {
    "sequence parallel": {"parallel": {"sequence": [2]}},
    "context parallel": {"parallel": {"context": [2]}},
    "expert parallel": {"parallel": {"expert": [2]}},
    "experts": {"model": {"num_experts": 2}},
    "experts, other options": {"model": {"moe_grouped_gemm": True}},
    "experts balanced over replicas": {"model": {"moe_router_load_balancing_type": "global"}},
    "overlapped reduction, other layouts": {"overlap": True, "parallel": {"tensor": [2]}},
    "overlapped parameter gather": {"overlap_param_gather": True},
    "parameter gather overlapped with the step": {"overlap_param_gather_with_step": True},
    "several instances of the distributed optimizer": {"parallel": {"optimizer": "partial"}},
    "FSDP": {"parallel": {"optimizer": "fsdp"}},
    "Transformer Engine": {"model": {"transformer_impl": "transformer_engine"}},
    "FP8 or FP4": {"precision": "fp8"},
    "CUDA graphs": {"cuda_graphs": True},
    "torch.compile": {"compile": True},
    "registered communication buffers": {"nccl_ub": True},
    "activation recomputation": {"model": {"recompute": "full"}},
    "offloading to the CPU": {"offload": True},
    "gradients summed in 16 bits": {"grad_reduce_in_fp32": False},
    "an optimizer other than Adam": {"optimizer": {"name": "sgd"}},
}
"""Row of the support table that a training task refuses -> the keys that would request it."""


def command(**more: Any) -> dict[str, Any]:
    return {"apiVersion": "unicron/v1", "name": "a", "command": ["true"], **more}


def train(**more: Any) -> dict[str, Any]:
    return {"apiVersion": "unicron/v1", "name": "a", "train": {**TRAIN, **more}}


def model(**more: Any) -> dict[str, Any]:
    return train(model=more)


def batch(**more: Any) -> dict[str, Any]:
    return train(batch=more)


def optimizer(**more: Any) -> dict[str, Any]:
    return train(optimizer=more)


REFUSED: list[tuple[Any, str]] = [
    (None, ""),
    ([], ""),
    ("text", ""),
    ({}, "apiVersion"),
    ({**command(), "apiVersion": "unicron/v2"}, "apiVersion"),
    ({"apiVersion": "unicron/v1", "command": ["a"]}, "name"),
    ({"apiVersion": "unicron/v1", "name": "a"}, ""),
    ({**command(), "train": TRAIN}, ""),
    (command(command=[]), "command"),
    ({**command(), 1: 2}, ""),
    ({**command(), None: 2}, ""),
    *(
        (command(name=name), "name")
        for name in ("", "A", "a b", "-a", "a-", "a\n", "a/b", "a}b", "ü", "a" * 64, "nodes", 7)
    ),
    (command(weigth=1), "weigth"),
    *(
        (command(weight=weight), "weight")
        for weight in (0, -1, -1e-9, math.nan, math.inf, 1e7, 1e-7, 10**400, "1", True)
    ),
    *(
        (command(slots=slots), path)
        for slots, path in (
            (3, "slots"),
            ({"min": 0}, "slots.min"),
            ({"min": 3, "max": 2}, "slots.max"),
            ({"max": 10**6}, "slots.max"),
            ({"max": 2.5}, "slots.max"),
            ({"mim": 1}, "slots.mim"),
            ({"max": 10**30}, "slots.max"),
            ({"sizes": [0, 2]}, "slots.sizes[0]"),
            ({"sizes": [2, 2]}, "slots.sizes[1]"),
            ({"sizes": [4, 2]}, "slots.sizes[1]"),
            ({"sizes": [2, 4], "max": 6}, "slots.max"),
            ({"sizes": [2, 4], "min": 1}, "slots.min"),
            ({"sizes": [10**6]}, "slots.max"),
            ({"sizes": 2}, "slots.sizes"),
            ({"sizes": [2, 4], "multiple_of": 2}, "slots.multiple_of"),
            ({"multiple_of": 0}, "slots.multiple_of"),
            ({"multiple_of": 8}, "slots.max"),
            ({"multiple_of": 8, "max": 12}, "slots.max"),
            ({"multiple_of": 8, "min": 4, "max": 16}, "slots.min"),
            ({"max": 4, "floor": 5}, "slots.floor"),
            ({"max": 4, "floor": -1}, "slots.floor"),
            ({"sizes": [2, 4], "floor": 3}, "slots.floor"),
            ({"floor": 1.5}, "slots.floor"),
            ({"multiple_of": 4, "max": 8, "floor": 6}, "slots.floor"),
        )
    ),
    *((command(priority=priority), "priority") for priority in (-1, 10, 1.5, "high")),
    *((command(team=team), "team") for team in ("A", "a b", 7)),
    *(
        (command(throughput=table), path)
        for table, path in (
            ([1], "throughput"),
            ({"two": 1}, "throughput"),
            ({0: 1}, "throughput[0]"),
            ({-1: 1}, "throughput[-1]"),
            ({2: -1}, "throughput[2]"),
            ({2: math.nan}, "throughput[2]"),
            ({2: math.inf}, "throughput[2]"),
            ({16: 1e12}, "throughput[16]"),
            ({10**12: 1e12}, f"throughput[{10**12}]"),
            ({2: 1e25}, "throughput[2]"),
            ({10**30: 1}, f"throughput[{10**30}]"),
            ({2: "fast"}, "throughput[...]"),
        )
    ),
    *(
        (command(command=argv), path)
        for argv, path in (
            ("ls", "command"),
            ([1], "command[0]"),
            ([""], "command[0]"),
            (["a", "b\0"], "command[1]"),
            (["\ud800"], "command[0]"),
        )
    ),
    ({**train(), "train": {"output": "o"}}, "train.iterations"),
    ({**train(), "train": {"iterations": 1}}, "train.output"),
    *((train(iterations=value), "train.iterations") for value in (0, -1, 2**31, 1.5, "1", True)),
    *((train(checkpoint_every=value), "train.checkpoint_every") for value in (-1, 2**31)),
    *((train(bucket_params=value, overlap=True), "train.bucket_params") for value in (-1, 2**31)),
    (train(bucket_params=1), "train.bucket_params"),
    (train(overlap="yes"), "train.overlap"),
    (train(kept_sum=4), "train.kept_sum"),
    (train(reproducible="exact"), "train.reproducible"),
    (train(reproducible="bitwise", parallel={"tensor": [1, 2]}), "train.reproducible"),
    (train(reproducible_bits=32), "train.reproducible_bits"),
    (train(skip_not_finite=1), "train.skip_not_finite"),
    (train(reproducible="bitwise", skip_not_finite=True), "train.skip_not_finite"),
    (train(digest_every=10), "train.digest_every"),
    *((train(seed=value), "train.seed") for value in (-1, 2**53, 10**30)),
    *(
        (train(output=value), "train.output")
        for value in (
            "",
            "a\0b",
            3,
            "s3://",
            "file:///",
            "memory://run",
            "simplecache::s3://bucket/run",
            "s3://bucket/run::zip://a",
            "ftp://me:secret@host/run",
            "https://host/run?sv=1&sig=abc",
            "s3://bucket/run?X-Amz-Signature=abc",
            "abfs://run@host/a?SAS_token=abc",
            "https://host/run#access_key=abc",
        )
    ),
    (train(data="file"), "train.data"),
    (train(data=["a\0"]), "train.data[0]"),
    (train(iterationz=1), "train.iterationz"),
    *(
        (model(**{name: value}), f"train.model.{name}")
        for name in ("num_layers", "hidden", "num_heads", "sequence")
        for value in (0, -4, 2**31)
    ),
    (train(precision="fp8"), "train.precision"),
    (train(precision=16), "train.precision"),
    (train(loss="per_sample"), "train.loss"),
    (train(loss_scale=1024), "train.loss_scale"),
    *(
        (train(precision="bf16", loss_scale=value), "train.loss_scale")
        for value in (0, -1, math.inf, math.nan, 1e39, 1e-31, "dynamic", True)
    ),
    (train(precision="bf16", dynamic_loss_scale={"initial": 8}), "train.dynamic_loss_scale"),
    (
        train(precision="fp16", loss_scale=8, dynamic_loss_scale={"initial": 8}),
        "train.dynamic_loss_scale",
    ),
    *(
        (
            train(precision="fp16", dynamic_loss_scale={name: value}),
            f"train.dynamic_loss_scale.{name}",
        )
        for name, value in (
            ("initial", 0),
            ("initial", math.inf),
            ("min", 0),
            ("min", 2.0**33),
            ("window", 0),
            ("window", 2**31),
            ("hysteresis", 0),
            ("hysteresis", 1.5),
            ("factor", 2),
        )
    ),
    (train(precision="fp16", dynamic_loss_scale={"initial": 0.5}), "train.dynamic_loss_scale.min"),
    (model(hidden=130, num_heads=4), "train.model.hidden"),
    *((model(dropout=value), "train.model.dropout") for value in (-0.1, 1, math.nan)),
    (model(tie_embeddings="yes"), "train.model.tie_embeddings"),
    (batch(micro=0), "train.batch.micro"),
    (batch(**{"global": 0}), "train.batch.global"),
    (batch(**{"global": 7, "micro": 2}), "train.batch.global"),
    (train(batch={"global": 2**20, "micro": 1}, model={"sequence": 2**11}), "train.batch.global"),
    (batch(global_=8), "train.batch.global_"),
    ({**batch(**{"global": 4, "micro": 2}), "slots": {"max": 3}}, "slots.max"),
    *(
        (optimizer(**{name: value}), f"train.optimizer.{name}")
        for name in ("lr", "min_lr", "weight_decay", "clip_grad")
        for value in (-1e-3, math.nan, math.inf)
    ),
    (optimizer(lr=1e-5), "train.optimizer.min_lr"),
    *(
        (optimizer(**{name: value}), f"train.optimizer.{name}")
        for name in ("beta1", "beta2")
        for value in (-0.1, 1.0, math.nan)
    ),
    *((optimizer(eps=value), "train.optimizer.eps") for value in (0, -1, math.inf, math.nan)),
    (optimizer(decay="step"), "train.optimizer.decay"),
    *(
        (optimizer(warmup_iterations=value), "train.optimizer.warmup_iterations")
        for value in (-1, 10)
    ),
    *(
        (train(parallel=sizes, model={"num_layers": 4, "num_heads": 6, "hidden": 96}), path)
        for sizes, path in (
            ({"tensor": [4]}, "train.parallel.tensor"),  # does not divide the heads
            ({"tensor": [3]}, "train.parallel.tensor"),  # does not divide the vocabulary
            ({"tensor": []}, "train.parallel.tensor"),
            ({"tensor": [2, 2]}, "train.parallel.tensor"),
            ({"pipeline": [3]}, "train.parallel.pipeline"),
            ({"chunks": 2}, "train.parallel.chunks"),
            ({"pipeline": [2], "chunks": 4}, "train.parallel.pipeline"),
            ({"optimizer": "split"}, "train.parallel.optimizer"),
        )
    ),
    (train(parallel={"optimizer": "sharded"}, overlap=True), "train.overlap"),
]


@pytest.mark.parametrize(("data", "path"), REFUSED)
def test_refused_with_path_and_hint(data: Any, path: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse(data)
    assert raised.value.path == path
    assert raised.value.hint
    assert str(raised.value).startswith(raised.value.path)
    assert "\n" not in str(raised.value)


def test_a_misspelt_key_is_corrected_in_the_hint() -> None:
    with pytest.raises(SpecError, match="is not a field") as raised:
        parse(model(hiden=64))
    assert raised.value.hint == "did you mean hidden?"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (2e6, "write 2000000"),
        ("2GB", "write digits alone, without quotes or a unit"),
        (1.5, "see docs/reference/job-spec.md"),
        ("many", "see docs/reference/job-spec.md"),
    ],
)
def test_the_hint_says_how_to_write_a_whole_number(value: object, hint: str) -> None:
    with pytest.raises(SpecError, match="expected a whole number") as raised:
        parse(train(iterations=value))
    assert raised.value.hint == hint


LOOP: dict[str, Any] = {"micro_batches": 4, "iterations": 9, "output": "out"}


def parallel(**more: Any) -> dict[str, Any]:
    return train(parallel=more)


def loop(more: dict[str, Any], **inner: Any) -> dict[str, Any]:
    return command(**{"heal": "in-memory", "loop": {**LOOP, **inner}, **more})


HINTED: list[tuple[dict[str, Any], str, str]] = [
    (train() | {"parallel": {}}, "parallel: is not a field", "it belongs under train:"),
    (loop({"parallel": {}}), "parallel: is not a field", "it belongs under loop:"),
    (train(tensor=[2]), "train.tensor: is not a field", "it belongs under train.parallel:"),
    (train(weight=2), "train.weight: is not a field", "it belongs at the top level"),
    (train() | {"itrations": 3}, "itrations: is not a field", "did you mean train.iterations?"),
    (train(itrations=3), "train.itrations: is not a field", "iterations is already given"),
    (train() | {"modle": {}}, "modle: is not a field", "did you mean train.model?"),
    (
        model(num_experts=8),
        "train.model.num_experts: is not a field",
        "it is a key of model:, which this file must not have",
    ),
    (
        loop({}, data=["x"]),
        "loop.data: is not a field",
        "it is a key of train:, which this file must not have",
    ),
    (train() | {"nonsense": 1}, "nonsense: is not a field", "see docs/reference/job-spec.md"),
    (parallel(tensr=[2]), "train.parallel.tensr: is not a field", "did you mean tensor?"),
    (parallel(tp=2), "train.parallel.tp: is not a field", "did you mean tensor?"),
    (loop({}, parallel={"pp": 2}), "loop.parallel.pp: is not a field", "did you mean pipeline?"),
    (parallel(pipelines=[2]), "train.parallel.pipelines: is not a field", "did you mean pipeline?"),
    (train(chunk=2), "train.chunk: is not a field", "did you mean train.parallel.chunks?"),
    (
        loop({}, parallel={"virtual_pipeline": 2}),
        "loop.parallel.virtual_pipeline: is not a field",
        "did you mean chunks?",
    ),
    (
        loop({"pipeline_model_parallel_size": 2}),
        "pipeline_model_parallel_size: is not a field",
        "did you mean loop.parallel.pipeline?",
    ),
    (
        parallel(zero1=True),
        "train.parallel.zero1: is not a field",
        "did you mean optimizer: sharded?",
    ),
    (
        loop({}, reproducible="bitwise", parallel={"tensor": [1, 2]}),
        "loop.reproducible: bitwise keeps the tensor-parallel size, but "
        "loop.parallel.tensor names 2 "
        "sizes: another size computes other bits",
        "name one size there, or leave reproducible out",
    ),
    (
        loop({}, reproducible_bits=32),
        "loop.reproducible_bits: has no effect with reproducible: rounding",
        "write reproducible: bitwise",
    ),
    (
        loop({}, digest_every=-1),
        "loop.digest_every: must be at least 0",
        "see docs/reference/job-spec.md",
    ),
    (
        loop({}, zero1=True),
        "loop.zero1: is not a field",
        "did you mean loop.parallel.optimizer: sharded?",
    ),
    (command(zero1=True), "zero1: is not a field", "it belongs under model: or under loop.model:"),
    *(
        (
            data,
            f"{path}.pipeline: is not a field",
            "a layout is no part of the model: with loop:, "
            "write it under loop.parallel; else Unicron chooses it, and the command reads "
            "UNICRON_TP, "
            "UNICRON_PP and so on",
        )
        for data, path in (
            (command(model={"pipeline": 2}), "model"),
            (loop({}, model={"pipeline": [2]}), "loop.model"),
        )
    ),
    (
        parallel(data=2),
        "train.parallel.data: is not a field",
        "leave it out: data parallelism takes the remaining slots; files are under train.data",
    ),
    *(
        (
            parallel(**{name: 2}),
            f"train.parallel.{name}: is not a field",
            "there is no such axis: unicron doctor --support",
        )
        for name in ("expert", "context", "sequence")
    ),
    (parallel(tensor=2), "train.parallel.tensor: expected a list, got a whole number", "write [2]"),
    (train(data="a.txt"), "train.data: expected a list, got text", "write [a.txt]"),
    (
        parallel(tensor=True),
        "train.parallel.tensor: expected a list, got true or false",
        "see docs/reference/job-spec.md",
    ),
    (
        train(parallel={"tensor": [3]}, model={"num_heads": 12, "hidden": 96}),
        "train.parallel.tensor: 3 does not divide the vocabulary, the 256 bytes",
        "possible: 1, 2, 4",
    ),
    (
        parallel(tensor=[3]),
        "train.parallel.tensor: 3 does not divide train.model.num_heads 4",
        "possible: 1, 2, 4",
    ),
    (
        parallel(pipeline=[3]),
        "train.parallel.pipeline: 3 does not divide train.model.num_layers 4",
        "possible: 1, 2, 4",
    ),
    (
        parallel(pipeline=[4], chunks=2),
        "train.parallel.pipeline: 4 with 2 chunks does not divide train.model.num_layers 4",
        "possible: 1, 2",
    ),
    (train() | {"loop": LOOP}, "loop: is for a command", "leave it out: train: recovers in memory"),
    (
        command(command=[]),
        "command: is empty",
        "name a program and its arguments, for example [python, train.py]",
    ),
    (
        command(model={"gpu": "H100"}),
        "model.gpu: invalid enum value 'H100'",
        "one of V100-32, A100-40, A100-80, A800-80, H100-80, H800-80, H20-96, H200-141, B200-180",
    ),
]


@pytest.mark.parametrize(("data", "told", "hint"), HINTED)
def test_a_hint_names_the_valid_keys(data: Any, told: str, hint: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(data)
    assert (str(refused.value), refused.value.hint) == (told, hint)


@pytest.mark.parametrize(
    ("key", "hint"),
    [("precision", "one of fp32, bf16, fp16"), ("loss", "one of per_token, per_micro_batch")],
)
def test_an_unknown_value_is_answered_with_the_known_ones(key: str, hint: str) -> None:
    with pytest.raises(SpecError, match="fp8") as raised:
        parse(train(**{key: "fp8"}))
    assert raised.value.hint == hint


def test_the_token_count_is_limited_for_per_token_loss_only() -> None:
    most: dict[str, Any] = {
        "batch": {"global": 2**20 - 1, "micro": 1},
        "model": {"sequence": 2**11},
    }
    assert parse(train(**most)).train is not None
    most["batch"]["global"] *= 2
    assert parse(train(**most, loss="per_micro_batch")).train is not None


def test_defaults_and_normal_form() -> None:
    spec = parse(train())
    assert spec.weight == 1.0
    assert spec.train is not None
    assert spec.train.num_micro_batches == 8
    assert parse(command(weight=2)).weight == 2.0
    assert type(parse(command(weight=2)).weight) is float, "an int must become a float"
    four = {"max": 4}
    assert parse(command(slots=four, throughput={"4": 1, 2: 3})).throughput == {4: 1.0, 2: 3.0}


@pytest.mark.parametrize(
    ("slots", "normal", "counts"),
    [
        ({"sizes": [2, 5]}, {"min": 2, "max": 5, "multiple_of": 1, "sizes": [2, 5]}, (2, 5)),
        ({"sizes": [3], "min": 3}, {"min": 3, "max": 3, "multiple_of": 1, "sizes": [3]}, (3,)),
        (
            {"multiple_of": 2, "max": 6},
            {"min": 2, "max": 6, "multiple_of": 2, "sizes": []},
            (2, 4, 6),
        ),
        ({"max": 3}, {"min": 1, "max": 3, "multiple_of": 1, "sizes": []}, (1, 2, 3)),
        (
            {"max": 2, "floor": 2},
            {"min": 1, "max": 2, "multiple_of": 1, "sizes": [], "floor": 2},
            (1, 2),
        ),
    ],
)
def test_which_numbers_of_slots_a_task_may_have(slots: Any, normal: Any, counts: Any) -> None:
    found = parse(command(slots=slots))
    assert msgspec.to_builtins(found.slots) == {
        "floor": 0,
        **normal,
        "sizes": tuple(normal["sizes"]),
    }
    assert found.slots.counts == counts
    assert parse(msgspec.to_builtins(found, str_keys=True)) == found


def test_the_normal_form_round_trips_by_json_and_log() -> None:
    for data in (
        train(seed=2**53 - 1),
        command(slots={"max": 8}, throughput={1: 0.0, 8: 1e24}, weight=1e6),
    ):
        spec = parse(data)
        assert parse(msgspec.json.decode(msgspec.json.encode(spec))) == spec
        body = reports.TaskSubmitted(spec=spec)
        assert codec.decode_body(*codec.encode_body(body)) == body


KEYS = st.sampled_from(
    [
        "train",
        "slots",
        "min",
        "max",
        "weight",
        "command",
        "throughput",
        "model",
        "batch",
        "global",
        "seed",
        "iterations",
        "output",
        "data",
        "optimizer",
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just(["true"])
    | st.characters(categories=["Cs"])
    | st.just(dict(TRAIN)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS | st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@example({"train": {"": None, 0: None}})
@given(st.dictionaries(KEYS | st.text(max_size=2), VALUES, max_size=5))
def test_any_input_is_refused_or_gives_a_writable_spec(data: Any) -> None:
    try:
        spec = parse({"apiVersion": "unicron/v1", "name": "a", **data})
    except SpecError:
        return
    assert isinstance(spec, JobSpec)
    codec.encode_body(reports.TaskSubmitted(spec=spec))


# --- positions in a layout -----------------------------------------------------------------------
@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: f"tp{axes.tp}pp{axes.pp}dp{axes.dp}")
def test_every_position_has_unique_coordinates(axes: Axes) -> None:
    found = [coordinates(axes, place) for place in range(num_positions(axes))]
    assert [position_of(axes, at) for at in found] == list(range(num_positions(axes)))
    assert len(set(found)) == axes.tp * axes.pp * axes.dp
    assert is_plain(axes) == (num_positions(axes) == axes.dp)


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: f"tp{axes.tp}pp{axes.pp}dp{axes.dp}")
def test_replicas_and_holders_partition_the_positions(axes: Axes) -> None:
    every_position = list(range(num_positions(axes)))
    replicas = [replica(axes, dp) for dp in range(axes.dp)]
    assert sorted(place for members in replicas for place in members) == every_position
    parts = [holders(axes, tp, pp) for tp in range(axes.tp) for pp in range(axes.pp)]
    assert sorted(place for members in parts for place in members) == every_position
    assert all(len(set(members) & set(part)) == 1 for members in replicas for part in parts)


def test_the_rank_order_is_megatrons() -> None:
    axes = Axes(tp=2, pp=2, dp=2)  # the example in Megatron's initialize_model_parallel
    assert [replica(axes, dp) for dp in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert holders(axes, 0, 0) == (0, 2)


def test_a_standby_position_has_no_coordinates() -> None:
    with pytest.raises(AssertionError, match="not a position"):
        coordinates(Axes(tp=2), 2)


# --- the support table ---------------------------------------------------------------------------
USUAL = (
    "sequence parallel",
    "overlapped reduction",
    "overlapped parameter gather",
    "activation recomputation",
)
"""Features of the usual Megatron job, which are exact in a script."""


def _spec(train: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "unicron/v1",
        "name": "t",
        "slots": {"min": 2, "max": 2},
        "train": {"iterations": 1, "output": "/tmp/t"} | train,
    }


def test_each_support_row_has_a_reason_and_an_existing_test() -> None:
    assert len({row.what for row in ROWS}) == len(ROWS)
    for answer in (answer for row in ROWS for answer in (row.train, row.loop)):
        assert answer.why
        assert not answer.shown or (ROOT / answer.shown).is_file()
        assert answer.grade != "exact" or answer.shown
        assert answer.grade not in ("not run", "refused") or not answer.shown


def test_refused_features_are_refused_in_a_spec() -> None:
    assert list(REFUSED_KEYS) == [row.what for row in ROWS if row.train.grade == "refused"]
    parse(_spec({}))
    for what, train in REFUSED_KEYS.items():
        with pytest.raises(SpecError):
            pytest.fail(f"{what}: {parse(_spec(train))} was accepted")


def test_doctor_prints_the_table_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.print_support(as_json=False) == 0
    printed = capsys.readouterr().out
    assert all(row.what in printed and row.loop.why in printed for row in ROWS)
    assert doctor.print_support(as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows] == [row.what for row in ROWS]
    assert {row["loop"]["grade"] for row in rows} <= set(get_args(Grade))
    assert {row["what"]: row["loop"]["grade"] for row in rows if row["what"] in USUAL} == (
        dict.fromkeys(USUAL, "exact")
    )
    assert not [line for line in printed.splitlines() if "not run here" in line]
