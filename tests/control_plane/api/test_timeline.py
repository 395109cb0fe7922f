"""The timeline: what slots did over time, equal to the figures by day, whatever the window."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest
from http_site import JOB, Site, real
from unicron.cli.cluster.client import Client, Unable
from unicron.cli.commands import offline
from unicron.cli.screens import task
from unicron.control_plane.api import http, messages, timeline_answer
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
    (number,) = demo.past.tasks
    curves = timeline_answer.curves(demo, str(number))
    assert curves["iterations"] == list(range(len(curves["iterations"])))
    assert None not in curves["losses"] + curves["step_s"]
    assert [one["layout"] for one in curves["layouts"]] == ["DP 4", "DP 3", "DP 4"]
    assert timeline_answer.curves(demo, demo.past.tasks[number].name) == curves
    assert timeline_answer.curves(demo, f"task-{number}") == curves
    assert (curves["first_seq"], curves["read_seq"]) == (1, RECORDS[-1].seq)
    assert (curves["view"], curves["ended"]) == (None, True)
    assert [(one["rank"], one["attempt"]) for one in curves["outputs"]] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (2, 2),
    ]
    assert [one["outcome"] for one in curves["incidents"]] == ["healed"]
    with pytest.raises(Refusal, match="no task 999"):
        timeline_answer.curves(demo, "999")
    unread = timeline_answer.curves(demo, "999", RECORDS[-1].seq + 1)
    assert (unread["task"], unread["read_seq"] < unread["last_seq"]) == (0, True)


def test_the_answers_are_as_the_openapi_document_says(demo: Timeline) -> None:
    (number,) = demo.past.tasks
    curves = timeline_answer.curves(demo, str(number))
    demo.past.tasks[number].task.members = []
    demo.past.tasks[number].paces_s[0] = [1.0, 3.0, 2.0]
    curves["pace"] = timeline_answer.past_of(demo.past, number, 0.0)["pace"]
    found = timeline_answer.incidents(demo)
    for data, kind in (
        (curves, messages.Curves),
        (curves["pace"], messages.Pace),
        (curves["incidents"][0], messages.IncidentRow),
        (found, messages.AllIncidents),
        (found["incidents"][0], messages.IncidentInFull),
    ):
        assert data is not None
        assert set(data) == set(kind.__annotations__), kind
        msgspec.convert(msgspec.to_builtins(data), kind)
    assert timeline_answer.incidents(demo, since_s=1e11)["incidents"] == []


@real
async def test_a_past_moment_has_its_own_timeline(site: Site) -> None:
    _, submitted = await site.ask("POST", "/v1/tasks", JOB)
    await site.ask("POST", f"/v1/tasks/{submitted['task']}/cancel", {})
    path = f"/v1/tasks/{submitted['task']}/curves"
    assert (await site.ask("GET", path))[1]["ended"]
    _, then = await site.ask("GET", f"{path}?at={submitted['seq']}")
    assert (then["ended"], then["read_seq"], then["last_seq"]) == (False, *[submitted["seq"]] * 2)
    await site.refused(404, "GET", f"{path}?at={submitted['seq'] - 1}")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request reads one record."""
    monkeypatch.setattr(http, "EXTEND_S_MAX", 0.0)
    monkeypatch.setattr(http, "PAGE_RECORDS_MAX", 1)


async def with_tasks(site: Site, *names: str) -> Client:
    for name in names:
        await site.ask(
            "POST",
            "/v1/tasks",
            {**JOB, "name": name, "train": {"iterations": 3, "output": f"/{name}"}},
        )
    return Client(site.url, "secret")


@pytest.mark.usefixtures("small_parts")
def test_a_command_asks_as_long_as_the_log_is_read_further(monkeypatch: pytest.MonkeyPatch) -> None:
    @real
    async def check(site: Site) -> None:
        client = await with_tasks(site, "j1", "j2", "j3")
        read = partial(offline.read_to_end, client, "/v1/tasks/j3/curves")
        assert (await asyncio.to_thread(read))["name"] == "j3"
        await with_tasks(site, "j4")
        monkeypatch.setattr(http, "PAGE_RECORDS_MAX", 0)  # it reads none
        with pytest.raises(Unable, match="reads its log no further"):
            await asyncio.to_thread(read)

    check()


@pytest.mark.usefixtures("small_parts")
def test_the_rest_is_read_behind_the_first_answer() -> None:
    @real
    async def check(site: Site) -> None:
        client = await with_tasks(site, "j1", "j2", "j3")
        read = partial(offline.read_to_end, client, "/v1/tasks/j3/curves", whole=False)
        view = await asyncio.to_thread(client.state)
        first = await asyncio.to_thread(read)
        assert (first["read_seq"], first["last_seq"]) == (1, site.coordinator.seq)
        screen = partial(task.task_status, view, view["tasks"][-1], now_s=0.0)
        assert any(
            line.startswith("past       the control plane reads its log, 1 of ")
            for line in screen(first)
        )
        await asyncio.sleep(0.5)  # nobody asks
        again = await asyncio.to_thread(read)
        assert again["read_seq"] == again["last_seq"]
        assert not any(line.startswith("past") for line in screen(again))

    check()


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
