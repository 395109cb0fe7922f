"""`make bench-web`: the dashboard on the log of a large cluster, in a headless Chromium.

The log has 1,000 nodes of 8 slots and 100,000 records; `unicron view` serves it. `open_s`: from
the navigation until the cluster's view is drawn. `interaction_p95_ms`: from an input of the user
(a key, a click) until the next frame is painted. `bundle_kb`: what the browser loads, compressed.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from bench.log import records as life
from bench.recovery.rows import Row, finish, row
from bench.scale.main import percentile
from browser.page import ROOT, Page, browsing, viewing
from selenium.webdriver.common.keys import Keys
from unicron.events.log import archive
from unicron.events.records.envelope import Record

SYSTEM, CASE = "unicron", "nodes_1000_records_100000"
NUM_NODES, NUM_TASKS, NUM_RANKS, NUM_RECORDS = 1_000, 40, 200, 100_000
GOALS = {"open_s": 2.0, "interaction_p95_ms": 100.0, "bundle_kb": 300.0}
UNITS = {"open_s": "s", "interaction_p95_ms": "ms", "bundle_kb": "kB"}
DIST = ROOT / "control_plane" / "web" / "dist"
MEASURED = ROOT / "build" / "bench"
READY_S_MAX = 300.0
ROUNDS_NUM = 8
"""Of the interactions of one trial."""

WATCH = """
    window.painted_ms = []
    const drawn = () => {
      const canvas = document.querySelector(".gantt canvas")
      if (!canvas || !canvas.width || !document.body.innerText.includes("Newest incidents")) return
      watch.disconnect()
      requestAnimationFrame(() => setTimeout(() => { window.drawn_ms = performance.now() }, 0))
    }
    const watch = new MutationObserver(drawn)
    watch.observe(document, { subtree: true, childList: true, attributes: true })
    for (const kind of ["click", "keydown", "input", "wheel"]) addEventListener(kind, event => {
      requestAnimationFrame(() => setTimeout(() => {
        window.painted_ms.push([performance.now() - event.timeStamp, kind, location.hash])
      }, 0))
    }, { capture: true, passive: true })
"""
"""The task that a frame's callback posts runs when that frame has been painted."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-web")
    parser.add_argument("-n", type=int, default=5, help="trials (5)")
    count = parser.parse_args().n
    began_s = time.monotonic()
    if not DIST.is_dir():
        print("bench-web  the page is not built\nhint: make web", file=sys.stderr)
        sys.exit(2)
    log = MEASURED / "web-log.jsonl"
    if not log.exists():
        print(f"bench-web  a log of {NUM_RECORDS:,} records, once: {log}", flush=True)
        MEASURED.mkdir(parents=True, exist_ok=True)
        archive.write(log, islice(records(), NUM_RECORDS), cluster="bench", code="bench")
    found: dict[str, list[float]] = {"bundle_kb": [bundle_kb()]}
    interactions = 0
    with viewing(log) as url, browsing() as page:
        page.browser.set_page_load_timeout(READY_S_MAX)
        page.run_first(WATCH)
        page.open(url)
        page.wait(lambda: page.run("return window.drawn_ms"), "the view is drawn")
        for _ in range(count):
            found.setdefault("open_s", []).append(open_s(page))
            painted = interact(page)
            interactions += len(painted)
            found.setdefault("interaction_p95_ms", []).append(
                percentile([one[0] for one in painted], 0.95)
            )
            slowest = max(painted)
            print(
                f"bench-web  open {found['open_s'][-1]:.2f} s, {len(painted)} interactions, p95 "
                f"{found['interaction_p95_ms'][-1]:.0f} ms, slowest {slowest[0]:.0f} ms "
                f"({slowest[1]} at {slowest[2][:40]})",
                flush=True,
            )
    rows = [row(CASE, SYSTEM, metric, found[metric], unit) for metric, unit in UNITS.items()]
    finish(rows, MEASURED / "web.json", began_s, held_to(rows), interactions=interactions)


def records() -> Iterator[Record]:
    """A cluster's life, by the real decider: tasks train, ranks fail and heal."""
    life.NUM_NODES, life.NUM_TASKS, life.NUM_RANKS = NUM_NODES, NUM_TASKS, NUM_RANKS
    for made in life.Life().turns():
        yield from made


def bundle_kb() -> float:
    """All files that the page loads, each as gzip -9."""
    return (
        sum(len(gzip.compress(file.read_bytes(), 9)) for file in DIST.rglob("*") if file.is_file())
        / 1e3
    )


def open_s(page: Page) -> float:
    """From the navigation until the cluster's view is painted."""
    page.go("cluster")
    page.browser.refresh()
    return float(page.wait(lambda: page.run("return window.drawn_ms"), "it is drawn")) / 1e3


def interact(page: Page) -> list[tuple[float, str, str]]:
    """The times to the next paint, of zooms, moves, the slider, and changes of the view."""
    page.run("window.painted_ms = []")
    for _ in range(ROUNDS_NUM):
        page.find("nav a[href*=cluster]").click()
        page.wait(lambda: page.browser.find_elements("css selector", ".gantt .canvas"), "gantt")
        for key in ("+", "+", Keys.ARROW_LEFT, Keys.ARROW_LEFT, "+", "-", Keys.HOME):
            page.find(".gantt .canvas").send_keys(key)
            time.sleep(0.1)
        for key in (Keys.PAGE_DOWN, Keys.ARROW_LEFT, Keys.PAGE_DOWN):
            page.find("input[type=range]").send_keys(key)
            time.sleep(0.3)
        for link in range(len(page.browser.find_elements("css selector", "nav a"))):
            page.browser.find_elements("css selector", "nav a")[link].click()
            time.sleep(0.5)
        page.find(".moment button").click()
    painted: list[Any] = page.run("return window.painted_ms")
    return [(float(took_ms), str(kind), str(where)) for took_ms, kind, where in painted]


def held_to(rows: list[Row]) -> list[str]:
    return [
        f"{'holds ' if one.value <= GOALS[one.metric] else 'misses'}  {one.metric}: "
        f"{one.value:.3g}, goal at most {GOALS[one.metric]:g}"
        for one in rows
        if one.value is not None
    ]


if __name__ == "__main__":
    main()
