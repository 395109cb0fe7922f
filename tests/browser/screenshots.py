"""`make screenshots`: each view in light, dark and on a phone, from the log of `make demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from browser.page import ROOT, Page, browsing, viewing

LOG = ROOT / "build" / "demo" / "log.jsonl"
FOLDER = ROOT / "build" / "screenshots"
LOOKS: dict[str, dict[str, bool]] = {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}
HEIGHT_PX_MAX = 1150


def main() -> None:
    log = Path(sys.argv[1]) if len(sys.argv) > 1 else LOG
    if not log.is_file():
        print(f"screenshots  there is no {log}\nhint: make demo, which writes it", file=sys.stderr)
        sys.exit(2)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with viewing(log) as url, browsing() as page:
        page.open(url)
        page.wait_text("Newest incidents")
        page.run("localStorage['unicron-utc'] = '1'")
        page.browser.refresh()
        for name, view in views(page).items():
            for look, screen in LOOKS.items():
                page.look_like(**screen)
                page.go(view)
                file = FOLDER / f"{name}-{look}.png"
                shoot(page, file, phone=look == "phone")
                print(
                    f"screenshots  {file.relative_to(ROOT)}, {file.stat().st_size // 1000} kB",
                    flush=True,
                )


def views(page: Page) -> dict[str, str]:
    """A name for each view, and its address: of the newest incident, also as a past moment."""
    page.go("cluster")
    page.wait_text("Newest incidents")
    links = [
        str(one.get_attribute("href")).partition("#/")[2]
        for one in (
            *page.browser.find_elements("css selector", "main a"),
            *page.browser.find_elements("css selector", "nav a"),
        )
    ]
    found: dict[str, str] = {}
    for link in links:
        found.setdefault(link.partition("/")[0].partition("?")[0], link)
    incident = int(found.get("incident", "incident/1").partition("/")[2] or 1)
    return {**found, "history": f"cluster?at={incident}"}


def shoot(page: Page, file: Path, *, phone: bool) -> None:
    """The page, as high as it is, when its answers are there."""
    page.wait(
        lambda: page.run(
            "return !/reading|computing/.test(document.body.innerText) && document.readyState"
        ),
        "the view is drawn",
    )
    page.run("return new Promise(done => setTimeout(done, 700))")
    height = min(page.run("return document.documentElement.scrollHeight"), HEIGHT_PX_MAX)
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {
            "width": 390 if phone else 1280,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": phone,
        },
    )
    page.run("return new Promise(done => setTimeout(done, 300))")
    page.browser.save_screenshot(str(file))


if __name__ == "__main__":
    main()
