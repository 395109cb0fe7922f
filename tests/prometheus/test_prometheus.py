"""Rules, alerts and the dashboard, by the real promtool and a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import site
from prometheus_client import generate_latest
from real_cluster import RealCluster, running
from twins import small
from unicron.control_plane.api.metrics import Metrics

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/unicron.rules.yaml"
DASHBOARD = ROOT / "deploy/grafana/unicron.json"
NAME = re.compile(r"unicron_[a-z0-9_]+")


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]


def expressions() -> list[str]:
    """Those of the dashboard, with values for Grafana's variables."""
    found = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    return [
        one.replace("$__rate_interval", "5s").replace("$__range", "1m").replace("$job", ".*")
        for one in found
    ]


def shown() -> str:
    return generate_latest(Metrics()._registry).decode()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if why := site.why_not():
        pytest.skip(why)


def promtool(
    *words: str, cwd: Path | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        input=stdin,
    )


def test_promtool_finds_nothing_in_rules_and_metrics() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert checked.returncode == 0, checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout
    linted = promtool("check", "metrics", stdin=shown())
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")


def test_the_unit_tests_of_promtool_pass() -> None:
    ran = promtool("test", "rules", "unicron.tests.yaml", cwd=RULES.parent)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_unit_test_that_fails_without_it(alert: str, tmp_path: Path) -> None:
    shutil.copy(RULES.parent / "unicron.tests.yaml", tmp_path)
    groups = yaml.safe_load(RULES.read_text())
    for group in groups["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") != alert]
    (tmp_path / RULES.name).write_text(yaml.safe_dump(groups))
    ran = promtool("test", "rules", "unicron.tests.yaml", cwd=tmp_path)
    assert ran.returncode == 1
    assert f"alertname: {alert}" in ran.stdout + ran.stderr


def test_each_alert_has_a_runbook() -> None:
    page = (ROOT / "docs/guides/alerts.md").read_text()
    assert re.findall("^## (.+)$", page, re.MULTILINE) == ALERTS
    for rule in rules():
        if "alert" in rule:
            assert rule["annotations"]["runbook_url"] == (
                f"docs/guides/alerts.md#{rule['alert'].lower()}"
            )


def test_rules_and_dashboard_name_metrics_that_there_are() -> None:
    known = {
        name
        for line in shown().splitlines()
        if not line.startswith("#")
        for name in NAME.findall(line)[:1]
    }
    assert len(known) > 30
    for expression in (*(rule["expr"] for rule in rules()), *expressions()):
        for name in NAME.findall(expression):
            assert name in known, expression


@pytest.fixture(scope="module")
def scraped(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RealCluster, site.Prometheus]]:
    """Two control planes, a task, and a Prometheus as the guide says."""
    path = tmp_path_factory.mktemp("prometheus")
    guide = (ROOT / "docs/guides/metrics.md").read_text()
    (block,) = [
        one for one in re.findall("```yaml\n(.*?)```", guide, re.DOTALL) if "scrape_configs" in one
    ]
    (scrape,) = yaml.safe_load(block)["scrape_configs"]
    with running(path / "cluster", num_control_planes=2) as cluster:
        cluster.submit(small("job", path / "out", iterations=100_000))
        token = cluster.client().post("/v1/tokens", {"name": "prometheus", "role": "view"})
        (path / "token").write_text(token["token"])
        scrape["authorization"]["credentials_file"] = str(path / "token")
        targets = [url.removeprefix("http://") for url in cluster.control_plane_urls()]
        assert len(targets) == 2
        with site.scraping(path, scrape, RULES, targets) as prometheus:
            prometheus.wait('unicron_tasks{state="running"} == 1')
            prometheus.wait("increase(unicron_step_seconds_count[5s]) > 0")
            yield cluster, prometheus


@pytest.mark.thorough
def test_each_expression_of_the_dashboard_has_a_value(
    scraped: tuple[RealCluster, site.Prometheus],
) -> None:
    _, prometheus = scraped
    for expression in expressions():
        query = expression.removesuffix(" > 0")
        assert prometheus.wait(query), expression
    jobs = prometheus.get("/api/v1/label/job/values")
    assert jobs == ["unicron"]


@pytest.mark.thorough
def test_the_leader_and_its_follower_tell_the_same(
    scraped: tuple[RealCluster, site.Prometheus],
) -> None:
    _, prometheus = scraped
    assert len(prometheus.wait("up == 1")) == 2
    assert [one["value"][1] for one in prometheus.wait("sum(unicron_leader)")] == ["1"]
    for name in ("nodes", "slots", "tasks"):
        assert prometheus.wait(
            f"count(count by (instance) (unicron_{name})) == 2 and on() "
            f"max(max by (state) (unicron_{name}) - min by (state) (unicron_{name})) == 0"
        )


@pytest.mark.thorough
def test_an_alert_fires_while_healing_is_frozen_and_rules_have_values(
    scraped: tuple[RealCluster, site.Prometheus],
) -> None:
    cluster, prometheus = scraped
    prometheus.wait("unicron:lost_slots:rate5m")
    cluster.client().post("/v1/freeze", {"reason": "a test"})
    prometheus.wait('ALERTS{alertname="UnicronHealingPaused", alertstate="pending"}')
    cluster.client().post("/v1/unfreeze", {"reason": "a test"})
    groups = prometheus.get("/api/v1/rules")["groups"]
    assert [
        rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"
    ] == []
