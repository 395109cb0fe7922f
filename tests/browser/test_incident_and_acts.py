"""An incident's page and the acts, in a real browser on a real cluster."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from browser.page import Page, browsing, opened
from real_cluster import RealCluster, running
from selenium.common.exceptions import StaleElementReferenceException
from twins import small


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    path = tmp_path_factory.mktemp("acts")
    with running(path) as made:
        task = made.submit(small("alpha", path / "out"))
        made.rest(task)
        made.wait_whole(task, 4)
        yield made


@pytest.fixture(scope="module")
def page(cluster: RealCluster) -> Iterator[Page]:
    with browsing() as found:
        found.open(opened(cluster.state.path))
        found.wait_text("Needs a person")
        yield found
        assert found.errors() == []


def press(page: Page, label: str, within: str = "main") -> None:
    """Click the button with that text, as soon as it can be clicked."""
    page.wait(lambda: click(page, label, within), f"a button {label!r}")


def click(page: Page, label: str, within: str) -> bool:
    """Whether there was such a button that could be clicked."""
    for one in page.browser.find_elements("css selector", f"{within} button"):
        with suppress(StaleElementReferenceException):  # drawn again meanwhile
            if one.text == label and one.is_enabled():
                page.run("arguments[0].scrollIntoView({block: 'center'})", one)
                one.click()
                return True
    return False


def say(page: Page, reason: str) -> None:
    page.wait(lambda: page.browser.find_elements("css selector", "dialog form"), "the dialog")
    page.find("dialog input[autofocus], dialog p:last-of-type input").send_keys(reason)


def do(page: Page, label: str) -> None:
    """Press it in the dialog; again if a measured throughput has just changed the plan's input."""
    press(page, label, "dialog")

    def over() -> bool:
        click(page, "Do it all the same", "dialog")
        return "of the log. What follows" in page.text

    page.wait(over, "it is in the log")
    press(page, "Close", "dialog")


def body(cluster: RealCluster, begun: int, kind: str) -> Any:
    return cluster.wait_told(begun, kind).body


def test_the_page_of_a_killed_rank_tells_all(cluster: RealCluster, page: Page) -> None:
    (task,) = [one["id"] for one in cluster.client().tasks() if one["name"] == "alpha"]
    cluster.wait_whole(task, 4)
    begun = cluster.seq()
    os.kill(cluster.pids(task)[1], signal.SIGKILL)
    number = cluster.wait_told(begun, "IncidentOpened").seq
    page.go(f"incident/{number}")
    page.wait_text("exited abnormally")
    cluster.wait_healed(begun)
    cluster.wait_whole(task, 4)
    page.wait_text("✓ healed")  # it was recovering until then
    for words in (
        "Nothing is left to do.",
        "healed",
        "SEV2",
        "signal 9",
        "detect",
        "rebuild",
        "iterations lost",
        "rule:",
        "Plan that followed",
        "Effect on each task",
        "IncidentRecovering",
        f"unicron incident {number}",
    ):
        assert words in page.text, words
    facts = cluster.client().get(f"/v1/incidents/{number}/facts")
    assert f"{len(facts['timeline'])} of {len(facts['timeline'])}" in page.text
    page.find("input[type=search]").send_keys("Reconfigure ")
    page.wait_text(f" of {len(facts['timeline'])}")
    page.wait(lambda: "IncidentRecovering" not in page.text, "the filter holds")
    assert page.axe() == []
    page.go(f"incident/{number}?at={number}")
    page.wait_text("It is still open")


def test_a_drain_goes_from_the_dialog_into_the_log(cluster: RealCluster, page: Page) -> None:
    (task,) = [one["id"] for one in cluster.client().tasks() if one["name"] == "alpha"]
    cluster.wait_whole(task, 4)
    incident = max(one["id"] for one in cluster.client().get("/v1/state")["incidents"])
    node = cluster.client().get(f"/v1/incidents/{incident}/facts")["node"]
    begun = cluster.seq()
    page.go(f"incident/{incident}")
    press(page, f"Drain {node}")
    page.wait_text("of WAF")
    page.wait_text("2 ranks move away or stop")
    assert "4 → 2" in page.text, "what it will cost is said before"
    assert page.axe() == []
    say(page, "a trial of <b>fans</b>")
    do(page, f"Drain {node}")
    told = body(cluster, begun, "NodeDrained")
    assert (told.node, told.reason, told.role) == (node, "a trial of <b>fans</b>", "operate")
    page.go("cluster")
    page.wait_text(f"1 drained or in quarantine: {node}")
    page.go(f"nodes/{node}")
    page.wait_text("a trial of <b>fans</b>")
    press(page, f"Undrain {node}")
    page.wait_text("2 → 4")
    say(page, "fans are well")
    do(page, f"Undrain {node}")
    assert body(cluster, begun, "NodeUndrained").reason == "fans are well"
    cluster.wait_whole(task, 4)


def test_of_two_operators_the_second_sees_what_has_changed(
    cluster: RealCluster, page: Page
) -> None:
    (task,) = [one["id"] for one in cluster.client().tasks() if one["name"] == "alpha"]
    cluster.wait_whole(task, 4)
    begun = cluster.seq()
    page.run("location.hash = '#/cluster'")
    incident = max(one["id"] for one in cluster.client().get("/v1/state")["incidents"])
    node = cluster.client().get(f"/v1/incidents/{incident}/facts")["node"]
    page.go(f"incident/{incident}")
    press(page, f"Drain {node}")
    page.wait_text("of WAF")
    with browsing() as other:
        other.open(opened(cluster.state.path))
        other.wait_text("Needs a person")
        other.go(f"task/{task}")
        press(other, f"Set the weight of task {task}")
        other.wait(
            lambda: other.find("dialog input[type=number]").get_attribute("value") == "1",
            "the weight",
        )
        other.find("dialog input[type=number]").send_keys("\b5")
        other.wait_text("Only the ratio")
        say(other, "I was first")
        do(other, f"Set the weight of task {task}")
        assert other.errors() == []
    assert body(cluster, begun, "TaskWeightSet").reason == "I was first"
    say(page, "I am second")
    press(page, f"Drain {node}", "dialog")
    page.wait_text("something has changed since")
    page.wait_text("I was first")
    assert cluster.told(begun, "NodeDrained") == []
    press(page, "Leave it", "dialog")
    page.wait(lambda: not page.browser.find_elements("css selector", "dialog"), "it is closed")
    assert cluster.told(begun, "NodeDrained") == []


def test_freeze_and_unfreeze_say_what_they_mean(cluster: RealCluster, page: Page) -> None:
    begun = cluster.seq()
    page.go("cluster")
    press(page, "Freeze healing")
    page.wait_text("a task that fails stands until you unfreeze")
    say(page, "switch work")
    do(page, "Freeze healing")
    assert body(cluster, begun, "HealingFrozen").reason == "switch work"
    press(page, "Unfreeze healing", "section")
    say(page, "done")
    do(page, "Unfreeze healing")
    assert body(cluster, begun, "HealingResumed").reason == "done"


def test_other_choices_are_simulated_on_request(demo: Page) -> None:
    demo.go("incident/33")
    press(demo, "Simulate")
    demo.wait_text("This incident is alpha rank 2, n2: exited abnormally")
    table = demo.find("[aria-label='What other choices would have done']").text
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        "recorded",
        "simulated,",
        "megatron",
    ]
    demo.find(".what-if input[type=number]").send_keys("4")
    press(demo, "Simulate")
    demo.wait_text("weight of alpha 4")
    table = demo.find("[aria-label='What other choices would have done']").text
    (ours,) = [line for line in table.splitlines() if line.startswith("unicron, weight")]
    assert re.search(r"[ +-]0\.0 %", ours), "twice the weight earns twice, which is no gain"
    assert demo.axe() == []


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"phone": True}])
def test_the_incident_page_fits_every_screen(demo: Page, look: dict[str, bool]) -> None:
    demo.look_like(**look)
    demo.go("incident/33")
    demo.wait_text("Effect on each task")
    assert demo.axe() == []
    assert demo.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    demo.look_like()
