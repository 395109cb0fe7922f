"""Commands that describe their model: throughput is modelled; declared points set its level."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import past_screens
import pytest
from decider import Driver, kinds, spec, task_of, the, waits_of
from described_jobs import KNOWN, job, submitted
from http_site import serving
from unicron.control_plane.api import requests
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import History
from unicron.control_plane.throughput import table as throughput
from unicron.events.errors import SpecError
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.spec.job import JobSpec, parse
from unicron.events.spec.model import MegatronModel, Modelled

pytestmark = pytest.mark.nodes(3)


def test_a_submitted_task_has_a_modelled_throughput() -> None:
    body = submitted(job())
    assert body.modelled is not None
    assert body.modelled.sizes == (1, 2, 3, 4, 5, 6)
    assert body.modelled.rates_flops[0] > 1e14, "at least a third of the peak"
    assert "DP 6, micro-batch 1, no recomputation; " in body.modelled.layouts[5]
    plain = job()
    del plain["model"]
    assert submitted(plain).modelled is None


def test_the_layout_search_checks_the_model() -> None:
    requests.search_layouts(parse(job({"hidden": 1024})))
    with pytest.raises(SpecError, match=r"model\.hidden"):
        requests.search_layouts(parse(job({"hidden": 1000, "num_heads": 16})))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"num_heads": 15}, "model.hidden: 2048 is not divisible by num_heads 15"),
        ({"num_query_groups": 5}, "model.num_query_groups: 5 does not divide num_heads 16"),
        ({"micro_batch": 5}, "model.global_batch: 24 is not a multiple of micro_batch 5"),
        ({"top_k": 2}, "model.top_k: is for a mixture of experts"),
        ({"num_experts": 2, "top_k": 3}, "model.top_k: 3 of 2 experts"),
        ({"precision": "fp8"}, "model.precision: a A100-80 has no fp8"),
        ({"gpu": "V100-32"}, "model.precision: a V100-32 has no bf16"),
        ({"dropout": 1.0}, "model.dropout: must be in [0, 1)"),
        ({"num_layers": 0}, "model.num_layers: must be at least 1"),
        ({"gpu": "A100"}, "model.gpu: "),
        ({"layers": 3}, "model.layers: is not a field"),
    ],
)
def test_an_invalid_model_is_refused_in_one_line(model: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(job(model))
    assert str(error.value).startswith(path)
    assert error.value.hint


def test_a_train_task_has_a_model_of_its_own() -> None:
    with pytest.raises(SpecError, match="model: is for a command"):
        parse(job(command=[], train={"iterations": 1, "output": "build/x"}))


def test_the_origins_of_a_throughput_table() -> None:
    """No point: the model. One point: the model, scaled to the point. Two points: as declared."""
    plain = parse(job())
    alone = throughput.table(7, plain, modelled=KNOWN)
    assert (alone.origin, alone.sizes) == ("modelled", (1, 2, 4))
    assert alone.rates_flops == (1e14, 1.9e14, 3.5e14)
    one = throughput.table(7, parse(job(throughput={2: 1e14})), modelled=KNOWN)
    assert one.origin == "declared"
    assert one.rates_flops == pytest.approx((1e14 / 1.9, 1e14, 3.5e14 / 1.9))
    two = throughput.table(7, parse(job(throughput={2: 1e14, 4: 1.2e14})), modelled=KNOWN)
    assert two.rates_flops[1:] == (1e14, 1.2e14)
    measured = throughput.table_through(7, "measured", plain, {4: 7e14}, KNOWN)
    assert measured.origin == "measured"
    assert measured.rates_flops == pytest.approx((2e14, 3.8e14, 7e14))


def test_only_the_smallest_allowed_size_of_each_step() -> None:
    """With `slots.min` 3 the sizes are 3 and 4. On 3 slots the rate is that of 2."""
    table = throughput.table(7, parse(job(slots={"min": 3, "max": 6})), modelled=KNOWN)
    assert (table.sizes, table.rates_flops) == ((3, 4), (1.9e14, 3.5e14))


def test_a_declared_size_that_the_model_refuses() -> None:
    late = Modelled(sizes=(4,), rates_flops=(4e14,), layouts=("four",))
    table = throughput.table(7, parse(job(throughput={2: 1e14})), modelled=late)
    assert dict(zip(table.sizes, table.rates_flops, strict=True)) == {2: 1e14, 4: 0}


def test_the_plan_follows_the_model(d: Driver) -> None:
    records = d.tell("operator/a", r.TaskSubmitted(spec=parse(job()), modelled=KNOWN))
    task = records[0].seq
    assert the(decisions.ThroughputSet, records).origin == "modelled"
    assert len(task_of(d, task).target) == 4, "6 slots are no faster"
    shown = next(one for one in view(d.state)["tasks"] if one["id"] == task)
    assert shown["modelled_layout"] == "four"
    lines = past_screens.task_status(view(d.state), shown, History(), now_s=d.now_s)
    assert "by model   four" in lines
    d.obey(records)


def test_iteration_times_correct_the_level_and_keep_the_shape(d: Driver) -> None:
    """Iteration times do not set the rate per slot of tasks without a model."""
    records = d.tell("operator/a", r.TaskSubmitted(spec=spec(), modelled=KNOWN))
    task = records[0].seq
    d.obey(records)
    d.progress(task)
    new = d.progress(task, times_s=[0.25] * 21)
    table = the(decisions.ThroughputSet, new)
    assert table.origin == "measured"
    assert dict(zip(table.sizes, table.rates_flops, strict=True)) == pytest.approx(
        {1: 4e9 / 3.5, 2: 4e9 * 1.9 / 3.5, 4: 4e9}
    )
    assert d.state.slot_flops == 0


def test_a_task_waits_if_its_model_fits_nowhere(d: Driver) -> None:
    body = submitted(job({"num_layers": 96, "hidden": 12288, "num_heads": 96}))
    records = d.tell("operator/a", body)
    waits = the(decisions.TaskWaiting, records)
    assert waits.why.startswith("no layout on at most 6 GPUs fits into 79.2 GiB: TP 2 x PP 3 x")
    assert waits_of(d, records[0].seq).needs == "a larger slots.max, or a smaller model"
    assert "TaskPlaced" not in kinds(records)


def test_specs_without_a_model_are_valid() -> None:
    old: JobSpec = parse({"apiVersion": "unicron/v1", "name": "x", "command": ["true"]})
    assert old.model is None
    assert r.TaskSubmitted(spec=old).modelled is None


def test_over_http_the_search_runs_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    in_main_thread: list[bool] = []
    search = requests.modelled

    def watched(model: MegatronModel, slots_max: int) -> Modelled | None:
        in_main_thread.append(threading.current_thread() is threading.main_thread())
        return search(model, slots_max)

    async def run() -> None:
        async with serving() as site:
            status, answer = await site.ask("POST", "/v1/tasks", job({"hidden": 512}))
            assert status == 200
            written = await site.log.read(after=answer["seq"] - 1, num_max=2)
            bodies = [record.body for record in written]
            assert isinstance(bodies[0], r.TaskSubmitted)
            assert isinstance(bodies[1], decisions.ThroughputSet)
            assert bodies[0].modelled is not None
            assert bodies[0].modelled.rates_flops == bodies[1].rates_flops
            refused = await site.refused(422, "POST", "/v1/tasks", job({"num_heads": 15}))
            assert refused == "model.hidden: 2048 is not divisible by num_heads 15"

    monkeypatch.setattr(requests, "modelled", watched)
    asyncio.run(run())
    assert in_main_thread == [False, True], "the second time it is cached"
