"""The dashboard on a log of 10,000 tasks."""

from __future__ import annotations

from collections.abc import Iterator

import many_tasks
import pytest
from browser.page import Page, browsing, viewing
from unicron.events.log import archive

NUM = 10_000
ANSWER_MB_MAX = 1.0
ELEMENTS_NUM_MAX = 4_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    file = tmp_path_factory.mktemp("many") / "log.jsonl"
    archive.write(file, many_tasks.records(NUM), cluster="many", code="test")
    with viewing(file) as url, browsing() as found:
        found.open(url)
        found.wait_text("Newest incidents")
        found.wait_text("10,000")
        yield found
        assert found.errors() == []


def test_the_cluster_page_has_what_lives_and_says_what_it_leaves_out(page: Page) -> None:
    page.go("cluster")
    page.wait_text("9,850 that ended earlier are not in this list")
    for name in ("run-0", "wait-0"):
        assert name in page.find("[aria-label=Tasks]").text
    held_to(page)


def test_a_task_of_long_ago_is_found_by_a_filter(page: Page) -> None:
    page.go("task")
    page.wait(lambda: len(page.browser.find_elements("css selector", "tbody tr")) == 100, "a page")
    page.find("input[type=search]").send_keys("sweep-17 cancelled")
    page.wait(
        lambda: (
            len(page.browser.find_elements("css selector", "tbody tr")) == 100
            and "sweep-1700" in page.text
        ),
        "those that the filter allows",
    )
    (before,) = [
        one
        for one in page.browser.find_elements("css selector", "button")
        if one.text == "Next page"
    ]
    before.click()
    page.wait(
        lambda: len(page.browser.find_elements("css selector", "tbody tr")) == 11,
        "sweep-17, ten of sweep-170 and a hundred of sweep-1700, in two pages",
    )
    held_to(page)
    page.find("input[type=search]").send_keys("\b" * len("17 cancelled") + "4242")
    page.wait(lambda: len(page.browser.find_elements("css selector", "tbody tr")) == 1, "one")
    page.find("tbody a").click()
    page.wait_text("cancelled: superseded")
    page.wait_text("sweep-4242")
    page.browser.refresh()
    page.wait_text("sweep-4242")


@pytest.mark.parametrize("view", ["incident", "nodes", "plan", "costs", "audit"])
def test_the_other_views_stay_small(page: Page, view: str) -> None:
    page.go(view)
    page.wait(lambda: "reading" not in page.text, view)
    held_to(page)


def held_to(page: Page) -> None:
    """No long list, and no large answer."""
    page.run("return new Promise(done => setTimeout(done, 500))")
    assert page.run("return document.querySelectorAll('*').length") < ELEMENTS_NUM_MAX
    largest = page.run("""return Math.max(...performance.getEntriesByType("resource")
        .map(one => one.decodedBodySize))""")
    assert largest < ANSWER_MB_MAX * 1e6
