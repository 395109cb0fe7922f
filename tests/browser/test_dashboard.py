"""The dashboard in a real browser, on a real cluster with a real fault."""

from __future__ import annotations

import csv
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from browser.page import DEMO, Cable, Page, browsing, opened, viewing
from real_cluster import RealCluster, running
from selenium.webdriver.common.keys import Keys
from twins import small
from unicron.events.log import archive
from unicron.events.records.codec import from_plain, to_plain

HOSTILE = [
    "<img src=x onerror=document.title='taken'>",
    "<script>document.title='taken'</script>",
    "\"><svg onload=document.title='taken'>",
    "javascript:document.title='taken'",
    "{{7*7}} ${7*7}",
    "\u202egnp.exe",
    "a" * 300,
    "'; DROP TABLE nodes; --",
]
LOST = DEMO.parents[1] / "golden" / "heart-20.jsonl"
"""Its node n2 is lost."""
WORDS = ("host", "why", "reason", "team", "log_path", "accelerator")
LOOKS = {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster with one task that trains, and a second control plane that follows."""
    path = tmp_path_factory.mktemp("cluster")
    with running(path, num_control_planes=2) as made:
        task = made.submit(small("alpha", path / "out"))
        made.rest(task)
        made.wait_whole(task, 4)
        yield made


@pytest.fixture
def page() -> Iterator[Page]:
    with browsing() as found:
        yield found
        assert found.errors() == []


def log_in(page: Page, cluster: RealCluster) -> None:
    page.open(opened(cluster.state.path))
    page.wait_text("Needs a person")


# --- login ---------------------------------------------------------------------------------------
def test_the_url_of_open_lets_one_browser_in(cluster: RealCluster, page: Page) -> None:
    url = opened(cluster.state.path)
    page.open(url)
    page.wait_text("Needs a person")
    assert "code" not in page.url
    assert "unicron_" not in page.url
    secret = page.run("return JSON.parse(sessionStorage['unicron-session']).secret")
    assert secret.startswith("unicron_")
    assert page.run("return document.cookie + JSON.stringify(localStorage)") == "{}"
    page.browser.refresh()
    page.wait_text("alpha")
    with browsing() as other:
        other.open(url)
        other.wait_text("the code was used before")
        assert "alpha" not in other.text
    page.open("about:blank")
    page.open(url)
    page.wait_text("alpha")
    assert "code" not in page.url, "the old code does not end the session"


def test_an_address_can_be_pasted_instead(cluster: RealCluster, page: Page) -> None:
    url = opened(cluster.state.path)
    page.open(url.partition("#")[0] + "#/cluster?at=5")
    page.wait_text("unicron open")
    page.find("input").send_keys(url, Keys.ENTER)
    page.wait_text("record 5,")


def test_a_session_that_has_ended_says_what_to_do(cluster: RealCluster, page: Page) -> None:
    log_in(page, cluster)
    secret = page.run("return JSON.parse(sessionStorage['unicron-session']).secret")
    urllib.request.urlopen(
        urllib.request.Request(
            page.url.partition("#")[0] + "v1/sessions/end",
            b"{}",
            {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
        ),
        timeout=30,
    )
    page.wait_text("The session has ended.")
    page.wait_text("unicron open")


def test_without_scripts_a_line_says_what_to_do(cluster: RealCluster) -> None:
    with browsing(scripts=False) as page:
        page.open(opened(cluster.state.path))
        assert "needs JavaScript" in page.find("noscript").text
        assert "unicron status" in page.find("noscript").text


def test_a_follower_says_who_leads(cluster: RealCluster, page: Page) -> None:
    files = [json.loads(file.read_text()) for file in cluster.state.control_planes()]
    leader = opened(cluster.state.path).partition("/#")[0]
    (follower,) = [file["url"] for file in files if file["url"] != leader]
    page.open(follower)
    page.wait_text(f"This control plane follows {leader}")


# --- a fault, live and later ---------------------------------------------------------------------
def test_a_fault_appears_and_the_past_stays(cluster: RealCluster, page: Page) -> None:
    (task,) = [one["id"] for one in cluster.client().tasks() if one["name"] == "alpha"]
    log_in(page, cluster)
    page.wait_text("alpha")
    begun = cluster.seq()
    os.kill(cluster.pids(task)[1], signal.SIGKILL)
    opened_at = cluster.wait_told(begun, "IncidentOpened").seq
    page.wait_text(f"inc-{opened_at}")
    cluster.wait_healed(begun)
    page.wait(
        lambda: any(
            "healed" in row.text and f"inc-{opened_at}" in row.text
            for row in page.browser.find_elements("css selector", "tr")
        ),
        "the incident is healed",
    )
    page.go(f"cluster?at={opened_at - 1}")
    page.wait_text("past,")
    page.wait_no_text(f"inc-{opened_at}")
    slider = page.find("input[type=range]")
    assert int(slider.get_attribute("value")) == opened_at - 1
    slider.send_keys(Keys.END)
    page.wait_text(f"inc-{opened_at}")


def test_a_lost_connection_says_so_and_goes_on(cluster: RealCluster, page: Page) -> None:
    url, _, code = opened(cluster.state.path).partition("/#")
    cable = Cable(url)
    try:
        page.open(f"{cable.url}/#{code}")
        page.wait_text("Needs a person")
        cable.cut()
        page.wait_text("The connection is lost")
        cluster.client().post("/v1/freeze", {"reason": "<b>unseen</b>"})
        cable.mend()
        page.wait_no_text("The connection is lost")
        page.wait_text("frozen: <b>unseen</b>")
    finally:
        cable.close()
        cluster.client().post("/v1/unfreeze", {"reason": "seen"})


# --- the other views ------------------------------------------------------------------------------
def test_a_task_shows_its_ranks_its_curves_and_what_they_print(
    cluster: RealCluster, page: Page
) -> None:
    (task,) = [one["id"] for one in cluster.client().tasks() if one["name"] == "alpha"]
    cluster.wait_steps(task)
    log_in(page, cluster)
    page.go(f"task/{task}")
    page.wait(lambda: len(page.browser.find_elements("css selector", ".rank.member")) == 4, "ranks")
    page.wait(
        lambda: len(page.browser.find_elements("css selector", ".chart canvas")) == 2,
        "loss and iteration time",
    )
    ranks = {
        one.get_attribute("title").split(",")[0]: one.get_attribute("title")
        for one in page.browser.find_elements("css selector", ".rank")
    }
    for number, pid in cluster.pids(task).items():
        assert f"pid {pid}" in ranks[f"rank {number}"]
    page.wait_text("4 ranks on 2 nodes")
    page.wait_text("DP 4")
    (read,) = [
        one for one in page.browser.find_elements("css selector", "button") if one.text == "Read"
    ]
    read.click()
    page.wait(
        lambda: "iteration" in page.find("pre").text or "rank" in page.find("pre").text,
        "the output of rank 0",
    )


def test_what_if_a_node_was_drained(cluster: RealCluster, page: Page) -> None:
    log_in(page, cluster)
    begun = cluster.seq()
    page.go("plan")
    page.wait_text("What if")
    page.find(".form input").send_keys("n2", Keys.ENTER)
    page.wait_text("It would be")
    page.wait_text("4 → 2")
    page.find(".form input").send_keys(Keys.BACKSPACE, "99", Keys.ENTER)
    page.wait_text("n99")
    page.wait(lambda: page.browser.find_elements("css selector", ".trouble"), "it is refused")
    assert not cluster.told(begun, "NodeDrained")


def test_nodes_costs_and_who_did_what(cluster: RealCluster, page: Page) -> None:
    client = cluster.client()
    client.post("/v1/freeze", {"reason": "a switch changes"})
    client.post("/v1/unfreeze", {"reason": "it is changed"})
    log_in(page, cluster)
    page.go("nodes")
    page.wait(
        lambda: (
            [one.text.split()[0] for one in page.browser.find_elements("css selector", ".node")]
            == ["n1", "n2"]
        ),
        "the map",
    )
    page.go("audit")
    page.wait_text("a switch changes")
    page.wait_text("it is changed")
    client.post("/v1/freeze", {"reason": "again, while one looks"})
    page.wait_text("again, while one looks")
    client.post("/v1/unfreeze", {"reason": "done"})
    page.wait_text("owner (admin)")
    page.go("costs")
    page.wait_text("By day")
    text = unquote(page.find("a[download]").get_attribute("href").partition(",")[2])
    total = client.get("/v1/history")["total"]
    (day, *_) = csv.DictReader(text.splitlines())
    assert set(day) >= {
        "day",
        "used_slot_s",
        *(f"lost_{one}_slot_s" for one in total["lost_slot_s"]),
    }
    assert 0 < float(day["used_slot_s"]) <= total["used_slot_s"]


# --- made for people -----------------------------------------------------------------------------
def views(page: Page) -> list[str]:
    """The addresses of all views."""
    return [
        "cluster",
        "cluster?at=40",
        *(
            href.partition("#/")[2]
            for one in page.browser.find_elements("css selector", "nav a")
            if (href := str(one.get_attribute("href"))) and "cluster" not in href
        ),
    ]


@pytest.mark.parametrize("look", LOOKS)
def test_axe_has_no_serious_finding(demo: Page, look: str) -> None:
    demo.look_like(**LOOKS[look])
    for view in views(demo):
        demo.go(view)
        demo.wait(lambda: demo.run("return !document.body.innerText.includes('reading')"), view)
        assert demo.axe() == [], (look, view)
        width = demo.run("return document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, f"{view} is {width} px wider than the screen"
    demo.look_like()
    demo.run("document.querySelector('main').append(document.createElement('img'))")
    assert any(one.startswith("image-alt") for one in demo.axe()), "axe looks"
    demo.browser.refresh()


def test_the_login_page_has_no_serious_finding(page: Page) -> None:
    with viewing(DEMO) as url:
        page.open(url.partition("#")[0])
        page.wait_text("open the address that unicron view has printed")
        assert "unicron open" not in page.text, "there is no cluster to open"
        assert page.axe() == []


def test_the_timeline_zooms_by_keys_and_buttons(demo: Page) -> None:
    demo.go("cluster")
    demo.wait(
        lambda: demo.run("""
        const canvas = document.querySelector(".gantt canvas")
        if (!canvas?.width) return false
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
        const found = new Set()
        for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 4).join())
        return found.size > 5"""),
        "the timeline is drawn",
    )
    demo.find(".gantt .canvas").send_keys("++", Keys.ARROW_LEFT)
    demo.wait(lambda: "from=" in demo.url, "the window is in the address")

    def length_s() -> float:
        query = dict(part.split("=") for part in demo.url.partition("?")[2].split("&"))
        return float(query["to"]) - float(query["from"])

    assert length_s() == pytest.approx(66.97 / 4, rel=0.01)
    for button in demo.browser.find_elements("css selector", ".gantt button"):
        if button.text == "1 s":
            button.click()
    demo.wait(lambda: length_s() == pytest.approx(1, abs=0.01), "one second is shown")
    demo.find(".gantt .canvas").send_keys(Keys.HOME)
    demo.wait(lambda: "from=" not in demo.url, "all is shown")


def test_the_keyboard_alone_reaches_everything(demo: Page) -> None:
    demo.go("cluster")
    demo.wait_text("inc-33")
    demo.run("document.activeElement.blur()")
    wanted: list[Any] = demo.run("""return [...document.querySelectorAll(
        "a[href], button:not(:disabled), input, summary, [tabindex='0']")].length""")
    seen = set()
    for _ in range(int(str(wanted)) + 5):
        demo.browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.add(
            demo.run("""return document.activeElement.tagName + ":" + (
            document.activeElement.innerText || document.activeElement.ariaLabel)""")
        )
    for one in ("INPUT:History: record", "A:inc-33", "A:alpha", "BUTTON:All", "A:Cluster"):
        assert one in seen, seen


def test_focus_follows_a_link(demo: Page) -> None:
    demo.go("cluster")
    demo.wait_text("inc-33")
    demo.find("a[href='#/incident/33']").send_keys(Keys.ENTER)
    demo.wait(
        lambda: demo.run("return document.activeElement.textContent") == "Incident 33",
        "the heading has the focus",
    )


def test_wrong_addresses_lead_on(demo: Page) -> None:
    for view, link in (
        ("incident/77", "The newest incidents"),
        ("task/99", "Find a task"),
        ("task/nobody", "Find a task"),
        ("nowhere", "The cluster"),
    ):
        demo.go(view)
        demo.wait(
            lambda link=link: [
                one
                for one in demo.browser.find_elements("css selector", "main a")
                if one.text == link
            ],
            link,
        )


def test_a_node_has_its_incidents(demo: Page) -> None:
    demo.go("nodes/n2")
    demo.wait(lambda: "inc-33" in demo.find("[aria-label='Incidents of this node']").text, "inc-33")
    demo.go("nodes/n1")
    demo.wait_text("No incident so far.")


def test_a_plan_that_is_no_longer_in_force_is_named(demo: Page) -> None:
    demo.go("plan")
    demo.wait_text("No plan is in force: every task has ended. The last one is record 7")
    demo.go("plan?at=7")
    demo.wait_text("how long a plan is expected to last")


def test_a_phone_shows_the_records_on_request(demo: Page) -> None:
    demo.look_like(phone=True)
    demo.go("incident/33")
    demo.browser.refresh()
    demo.wait_text("The log of this incident")
    rows = "[aria-label='Records of the incident']"
    assert not demo.find(rows).is_displayed()
    demo.run("[...document.querySelectorAll('summary')].at(-1).click()")
    demo.wait(lambda: demo.find(rows).is_displayed(), "they are shown")
    demo.look_like()
    demo.browser.refresh()
    demo.wait_text("Effect on each task")
    assert demo.find(rows).is_displayed()


def test_a_node_that_was_just_lost_is_told_before_it_needs_a_person(page: Page) -> None:
    lost = next(one.seq for one in archive.read(LOST) if one.kind == "NodeUnreachable") + 1
    with viewing(LOST) as url:
        page.open(url)
        page.wait_text("Newest incidents")
        page.go(f"cluster?at={lost}")
        page.wait_text("its agent may come back by itself")
        assert "Nothing needs a person" not in page.text
        page.go(f"nodes?at={lost}")
        page.wait(lambda: "✕✕" in page.find(".node.lost").text, "no rank is drawn there")


def test_names_are_never_interpreted(tmp_path: Path, page: Page) -> None:
    """The demo's log with hostile names in place of the hosts, the reasons and the task's name."""

    def hostile(text: str, number: int) -> str:
        return HOSTILE[number % len(HOSTILE)]

    def changed(data: Any, number: int) -> Any:
        if isinstance(data, dict):
            return {
                key: hostile(value, number + place)
                if key in WORDS and isinstance(value, str)
                else changed(value, number + place)
                for place, (key, value) in enumerate(data.items())
            }
        if isinstance(data, list | tuple):
            return [changed(one, number + place) for place, one in enumerate(data)]
        return HOSTILE[0] if data == "alpha" else data

    records = [
        from_plain({**plain, "body": changed(plain["body"], plain["seq"])})
        for plain in map(to_plain, archive.read(DEMO))
    ]
    file = tmp_path / "hostile.jsonl"
    archive.write(file, records, cluster=HOSTILE[1], code="1")
    with viewing(file) as url:
        page.open(url)
        page.wait_text(HOSTILE[0])
        for view in views(page):
            page.go(view)
            page.wait(lambda: "reading" not in page.text, view)
            assert (
                page.run(
                    "return document.querySelectorAll('main img, main svg, main script, "
                    "header script').length"
                )
                == 0
            )
            assert page.run("return document.title") != "taken"
