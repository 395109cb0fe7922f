"""A page whose control plane is killed and starts again."""

from __future__ import annotations

from pathlib import Path

from browser.page import browsing, opened
from browser.test_incident_and_acts import body, do, press, say
from real_cluster import running
from selenium.webdriver.common.keys import Keys
from twins import small


def test_the_page_says_so_and_goes_on_without_a_reload(tmp_path: Path) -> None:
    """Its session was in the memory of the control plane: a new code, and it is where it was."""
    with running(tmp_path) as cluster, browsing() as page:
        task = cluster.submit(small("alpha", tmp_path / "out"))
        cluster.rest(task)
        cluster.wait_whole(task, 4)
        page.open(opened(cluster.state.path))
        page.wait_text("Needs a person")
        page.go(f"task/{task}")
        page.wait_text("4 ranks on 2 nodes")
        page.run("window.isTheSame = true")
        cluster.kill_control_plane()
        page.wait_text("The connection is lost")
        assert "4 ranks on 2 nodes" in page.text, "what was shown stays"
        cluster.start_control_plane()
        page.wait_text("The session has ended.")
        page.wait_text("Run unicron open in a terminal.")
        begun = cluster.seq()
        page.find("input").send_keys(opened(cluster.state.path), Keys.ENTER)
        page.wait_text("4 ranks on 2 nodes")
        page.wait_no_text("The connection is lost")
        assert f"#/task/{task}" in page.url
        press(page, f"Set the weight of task {task}")
        page.wait(
            lambda: page.find("dialog input[type=number]").get_attribute("value") == "1",
            "the weight",
        )
        page.find("dialog input[type=number]").send_keys("\b3")
        say(page, "after the restart")
        do(page, f"Set the weight of task {task}")
        assert body(cluster, begun, "TaskWeightSet").weight == 3
        page.wait_text("weight 3")
        assert page.run("return window.isTheSame") is True, "it was not loaded again"
        assert page.errors() == []
