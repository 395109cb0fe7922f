"""The timeline: what slots did over time, equal to the figures by day, whatever the window."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from http_site import JOB, Site, real
from unicron.control_plane.api import timeline_answer
from unicron.control_plane.api.messages import TimelineQuery
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.history.history import usage
from unicron.control_plane.history.timeline import COPY_RECORDS, Span, Timeline
from unicron.control_plane.history.usage import USES
from unicron.control_plane.state.cluster import ClusterState, encode_state
from unicron.events.log import archive
from unicron.events.records.reports import NodeJoined

DEMO = Path(__file__).parents[2] / "data" / "demo.jsonl"
RECORDS = list(archive.read(DEMO))


@pytest.fixture(scope="module")
def demo() -> Timeline:
    found = Timeline(ClusterState())
    found.add(RECORDS)
    return found


def slot_s(spans: list[Span]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in spans:
        for use, num in one.slots.items():
            found[use] += num * (one.to_s - one.from_s)
    return found


@pytest.mark.parametrize("buckets", [1, 3, 40, 2000])
def test_the_spans_add_up_to_the_figures_by_day(demo: Timeline, buckets: int) -> None:
    by_day = usage(RECORDS, ClusterState()).days
    wanted = {use: math.fsum(day.get(use, 0.0) for day in by_day.values()) / 1e6 for use in USES}
    answer = timeline_answer.timeline(demo, TimelineQuery(buckets=buckets))
    total = slot_s([*answer.free, *(span for row in answer.rows for span in row.spans)])
    for use, value in wanted.items():
        assert total[use] == pytest.approx(value, abs=0.35), use
    for row in answer.rows:
        assert len(row.spans) <= 2 * buckets + 1
        for one, after in zip(row.spans, row.spans[1:], strict=False):
            assert one.from_s < one.to_s <= after.from_s


def test_a_window_shows_its_part(demo: Timeline) -> None:
    (row,) = timeline_answer.timeline(demo, TimelineQuery()).rows
    fault = next(one for one in row.spans if "rebuild" in one.slots)
    query = TimelineQuery(from_s=fault.from_s - 0.01, to_s=fault.from_s + 0.01)
    near = timeline_answer.timeline(demo, query)
    assert [one.slots for one in near.rows[0].spans] == [{"used": 4}, {"rebuild": 4}]
    assert near.rows[0].spans[0].from_s == pytest.approx(query.from_s)
    assert near.rows[0].spans[-1].to_s == pytest.approx(query.to_s)
    (mark,) = near.incidents
    assert (mark.severity, mark.num) == ("SEV2", 1)
    with pytest.raises(Refusal, match="ends before"):
        timeline_answer.timeline(demo, TimelineQuery(from_s=2.0, to_s=1.0))


def test_curves_and_phases(demo: Timeline) -> None:
    (task,) = demo.tasks
    found = timeline_answer.curves(demo, task, 10_000)
    assert [one.iteration for one in found.points] == list(range(len(found.points)))
    assert all(one.loss is not None and one.step_s is not None for one in found.points)
    assert [one.layout for one in found.layouts] == ["DP 4", "DP 3", "DP 4"]
    few = timeline_answer.curves(demo, task, 10).points
    assert len(few) <= 10
    assert few[-1].loss == found.points[-1].loss
    (fault,) = found.faults
    phases = timeline_answer.phases(demo, fault.incident)
    assert phases.resumed_s is not None
    assert phases.stepped_s is not None
    assert phases.fault_s <= phases.detected_s <= phases.decided_s <= phases.resumed_s
    assert phases.resumed_s <= phases.stepped_s
    for call in (timeline_answer.phases, lambda of, key: timeline_answer.curves(of, key, 1)):
        with pytest.raises(Refusal, match="no"):
            call(demo, 999)


def test_a_copy_of_the_state_is_that_of_the_fold(demo: Timeline) -> None:
    kept = demo.state_before(COPY_RECORDS - 1)
    assert kept is not None
    assert encode_state(kept) == encode_state(ClusterState())


@real
async def test_it_goes_on_with_the_log(site: Site) -> None:
    _, first = await site.ask("GET", "/v1/timeline")
    assert (first["read_seq"], first["rows"]) == (2, [])
    await site.tell(NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=2))
    await site.ask("POST", "/v1/tasks", JOB)
    _, then = await site.ask("GET", "/v1/timeline?to=4e9")
    assert then["read_seq"] == then["last_seq"] == site.coordinator.seq
    assert [row["name"] for row in then["rows"]] == ["job"]
    assert "no task 99" in await site.refused(404, "GET", "/v1/tasks/99/curves")
    assert "no incident 9" in await site.refused(404, "GET", "/v1/incidents/9/phases")
    await site.refused(400, "GET", "/v1/timeline?from=-1")
