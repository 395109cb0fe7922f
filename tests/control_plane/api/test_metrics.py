"""GET /metrics: every family on an idle cluster, and what records and state say in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import structlog
from decider import Driver
from http_site import Site, real, serving
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from simulated.seeds import quiet, simulate
from simulated.world import World
from two_tasks import lose, two_tasks
from unicron.control_plane.api.metrics import GAUGES, Metrics
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.history.history import usage
from unicron.control_plane.history.usage import CAUSES
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.errors import Unavailable
from unicron.events.records import decisions as d_
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

Samples = dict[tuple[str, str], float]
"""By name and the value of the only label, "" without one."""
UNITS = (
    "_seconds",
    "_seconds_total",
    "_flops_per_second",
    "_total",
    "_records",
    "_bytes",
    "_info",
    "_fds",
)
PLAIN = {
    "leader",
    "leader_epoch",
    "healing_active",
    "log_reachable",
    "spooled_reports",
    "dead_letters",
    "reports_lost",
    "nodes",
    "slots",
    "tasks",
    "incidents_open",
    "incidents_recovering",
    "needs_person",
    "failed_saves",
}


def read(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for label, value in sample.labels.items() if label != "le"]
            assert len(labels) <= 1, sample
            if "le" not in sample.labels:
                found[sample.name, "".join(labels)] = sample.value
    return found


async def scraped(site: Site) -> Samples:
    async with site.client.get(
        f"{site.url}/metrics", headers={"Authorization": "Bearer secret"}
    ) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return read(await answer.text())


def observed(metrics: Metrics) -> Samples:
    return read(generate_latest(metrics._registry).decode())  # pyright: ignore[reportPrivateUsage]


def folded(records: Sequence[Record], begin: int = 0) -> Metrics:
    """As a control plane that starts after `begin` records, and gets a report with its decisions
    at a time."""
    state, metrics = ClusterState(), Metrics()
    for record in records[:begin]:
        fold(state, record)
    metrics.observe(state, (), 0.0)
    turn: list[Record] = []
    for record in records[begin:]:
        if turn and not record.cause:
            metrics.observe(state, turn, 0.002)
            turn = []
        fold(state, record)
        turn.append(record)
    metrics.observe(state, turn, 0.002)
    return metrics


@real
async def test_an_idle_cluster_shows_every_family_with_all_its_labels(site: Site) -> None:
    found = await scraped(site)
    families = {re.sub("_(total|count|sum)$", "", name) for name, _ in found}
    assert len(families) >= 30
    for name, (_, label, values) in GAUGES.items():
        assert label == "" or values
        for value in values or ("",):
            assert (f"unicron_{name}", value) in found
    for name, _ in found:
        assert name.startswith("unicron_")
        stem = re.sub("_(count|sum)$", "", name.removeprefix("unicron_"))
        assert stem in PLAIN or stem.endswith(UNITS), name
    assert {cause for name, cause in found if name == "unicron_lost_slot_seconds_total"} == {
        *CAUSES
    }
    for name in ("detection", "decision", "rebuild", "pause", "step", "plan", "report_delay"):
        assert found[f"unicron_{name}_seconds_count", ""] == 0
    assert found["unicron_leader", ""] == found["unicron_log_reachable", ""] == 1
    assert found["unicron_healing_active", ""] == 1
    assert (found["unicron_log_records", ""], found["unicron_log_lag_records", ""]) == (2, 0)
    assert found["unicron_log_unsealed_records", ""] == 2


@real
async def test_any_role_of_the_api_reads_them_and_nobody_else(site: Site) -> None:
    await site.refused(401, "GET", "/metrics", Authorization="")
    for role, status in (("view", 200), ("operate", 200), ("join", 403)):
        _, made = await site.ask("POST", "/v1/tokens", {"name": role, "role": role})
        async with site.client.get(
            f"{site.url}/metrics", headers={"Authorization": f"Bearer {made['token']}"}
        ) as answer:
            assert answer.status == status


@real
async def test_openmetrics_is_answered_to_those_who_ask_for_it(site: Site) -> None:
    async with site.client.get(
        f"{site.url}/metrics",
        headers={
            "Authorization": "Bearer secret",
            "Accept": "application/openmetrics-text;version=1.0.0",
        },
    ) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await answer.text()).endswith("# EOF\n")


@real
async def test_the_state_its_reports_and_the_spools_of_agents(site: Site) -> None:
    await site.tell(r.NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=2))
    await site.log.beat("n1", 9, 17)
    async with asyncio.timeout(30):
        while (found := await scraped(site))["unicron_spooled_reports", ""] != 17:
            await asyncio.sleep(0.05)
    assert found["unicron_nodes", "healthy"] == 1
    assert (found["unicron_slots", "free"], found["unicron_slots", "busy"]) == (2, 0)
    assert found["unicron_report_delay_seconds_count", ""] == 1
    assert found["unicron_records_total", ""] == 1
    await site.ask("POST", "/v1/freeze", {"reason": "a test"})
    found = await scraped(site)
    assert found["unicron_healing_active", ""] == 0
    assert found["unicron_needs_person", "healing"] == 1


def test_without_the_logs_server_the_last_values_are_answered() -> None:
    async def main() -> None:
        async with serving() as site:
            before = await scraped(site)

            async def away() -> int:
                raise Unavailable("the server is away")

            site.log.last_seq = away  # type: ignore[method-assign]
            found = await scraped(site)
            assert found["unicron_log_reachable", ""] == 0
            assert found["unicron_log_records", ""] == before["unicron_log_records", ""] == 2

    asyncio.run(main())


def test_an_incident_from_its_fault_to_its_end() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    begin = len(d.log)
    lose(d, "n2", alpha)
    (opened,) = [one for one in d.log if isinstance(one.body, d_.IncidentOpened)]
    found = observed(folded(d.log, begin))
    assert found["unicron_incidents_total", "SEV1"] == 1
    assert found["unicron_detection_seconds_count", ""] == 1
    first = min(one.at_s for one in d.log[begin:] if one.seq in opened.body.evidence)
    assert found["unicron_decision_seconds_sum", ""] == pytest.approx(opened.at_s - first)
    stepped = next(
        one.at_s
        for one in d.log
        if one.seq > opened.seq
        and isinstance(one.body, r.TaskProgressed)
        and one.body.task == alpha
    )
    assert found["unicron_rebuild_seconds_count", ""] == 1
    assert found["unicron_rebuild_seconds_sum", ""] == pytest.approx(stepped - opened.at_s)
    plans = sum(isinstance(one.body, d_.PlanChosen) for one in d.log[begin:])
    assert found["unicron_plan_seconds_count", ""] == plans > 0
    assert found["unicron_plan_seconds_sum", ""] == pytest.approx(0.002 * plans)
    steps = [
        s
        for one in d.log[begin:]
        if isinstance(one.body, r.TaskProgressed)
        for s in one.body.step_s
    ]
    assert found["unicron_step_seconds_sum", ""] == pytest.approx(sum(steps))


def test_records_that_are_folded_anew_are_counted_once() -> None:
    d = Driver()
    d.running()
    metrics = folded(d.log)
    num = observed(metrics)["unicron_records_total", ""]
    state = ClusterState()
    for record in d.log:
        fold(state, record)
    metrics.observe(state, d.log[-3:], 0.0)
    assert observed(metrics)["unicron_records_total", ""] == num == len(d.log)


@cache
def log_of(seed: int) -> tuple[Record, ...]:
    quiet()
    try:
        return tuple(simulate(partial(World, seed))[1])
    finally:
        structlog.reset_defaults()


@pytest.mark.parametrize("seed", [4, 5, 6, 11, 12])
def test_lost_slot_time_is_that_of_the_history(seed: int) -> None:
    found = observed(folded(log_of(seed)))
    wanted = dict.fromkeys(CAUSES, 0.0)
    for figures in usage(log_of(seed), ClusterState()).days.values():
        for cause in CAUSES:
            wanted[cause] += figures.get(cause, 0.0) / 1e6
    assert {cause: found["unicron_lost_slot_seconds_total", cause] for cause in CAUSES} == (
        pytest.approx(wanted, rel=1e-3, abs=0.01)
    )


def test_the_guide_has_every_family() -> None:
    page = (Path(__file__).parents[3] / "docs/guides/metrics.md").read_text()
    named = set(re.findall(r"`(unicron_\w+)[{`]", page))
    shown = {re.sub("_(total|count|sum|bucket)$", "", name) for name, _ in observed(Metrics())}
    assert {re.sub("_total$", "", name) for name in named} == {
        name for name in shown if not name.startswith("unicron_process_")
    }
