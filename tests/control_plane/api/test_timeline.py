"""The timeline: what slots did over time, equal to the figures by day, whatever the window."""

from __future__ import annotations

import itertools
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
    for since_s, until_s, slots in spans:
        for use, num in slots.items():
            found[use] += num * (until_s - since_s)
    return found


@pytest.mark.parametrize("buckets", [1, 3, 40, 2000])
def test_the_spans_add_up_to_the_figures_by_day(demo: Timeline, buckets: int) -> None:
    by_day = usage(RECORDS, ClusterState()).days
    wanted = {use: math.fsum(day.get(use, 0.0) for day in by_day.values()) / 1e6 for use in USES}
    answer = timeline_answer.window(demo, TimelineQuery(buckets=buckets))
    total = slot_s([*answer["free"], *(span for row in answer["rows"] for span in row["spans"])])
    for use, value in wanted.items():
        assert total[use] == pytest.approx(value, abs=0.35), use
    for row in answer["rows"]:
        assert len(row["spans"]) <= 2 * buckets + 1
        for one, after in itertools.pairwise(row["spans"]):
            assert one[0] < one[1] <= after[0]


def test_a_window_shows_its_part(demo: Timeline) -> None:
    (row,) = timeline_answer.window(demo, TimelineQuery())["rows"]
    fault_s = next(since_s for since_s, _, slots in row["spans"] if "rebuild" in slots)
    query = TimelineQuery(from_s=fault_s - 0.01, to_s=fault_s + 0.01)
    near = timeline_answer.window(demo, query)
    spans = near["rows"][0]["spans"]
    assert [slots for _, _, slots in spans] == [{"used": 4}, {"rebuild": 4}]
    assert spans[0][0] == pytest.approx(query.from_s)
    assert spans[-1][1] == pytest.approx(query.to_s)
    (mark,) = near["incidents"]
    assert (mark["severity"], mark["num"]) == ("SEV2", 1)
    with pytest.raises(Refusal, match="ends before"):
        timeline_answer.window(demo, TimelineQuery(from_s=2.0, to_s=1.0))


def test_curves(demo: Timeline) -> None:
    (task,) = demo.past.tasks
    curves = timeline_answer.curves(demo, task)
    assert curves["iterations"] == list(range(len(curves["iterations"])))
    assert None not in curves["losses"] + curves["step_s"]
    assert [one["layout"] for one in curves["layouts"]] == ["DP 4", "DP 3", "DP 4"]
    with pytest.raises(Refusal, match="no task 999"):
        timeline_answer.curves(demo, 999)


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
    await site.refused(400, "GET", "/v1/timeline?from=-1")
