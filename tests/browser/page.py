"""A headless Chromium on the dashboard, and a connection to it that a test can cut."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tests" / "data" / "demo.jsonl"
AXE = ROOT / "control_plane" / "web" / "node_modules" / "axe-core" / "axe.min.js"
UNICRON = Path(sys.executable).parent / "unicron"
WAIT_S_MAX = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Page:
    """One tab of a browser of its own."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of JavaScript."""
        return self.browser.execute_script(script, *arguments)  # type: ignore[no-untyped-call]

    def run_first(self, script: str) -> None:
        """Run JavaScript in each page that is opened from now on, before its own."""
        self.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})

    def open(self, url: str) -> None:
        self.browser.get(url)

    def go(self, view: str) -> None:
        """To a view of the dashboard, as by a link."""
        self.run("location.hash = arguments[0]", f"#/{view}")

    @property
    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    @property
    def url(self) -> str:
        return str(self.browser.current_url)

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def wait(self, look: Callable[[], T], what: str) -> T:
        """The first result of `look` that is true."""
        wait: Any = WebDriverWait(self.browser, WAIT_S_MAX, poll_frequency=0.1)
        try:
            return wait.until(lambda _: look())
        except Exception as error:
            raise AssertionError(f"{what}; the page is:\n{self.text}") from error

    def wait_text(self, text: str) -> None:
        self.wait(lambda: text in self.text, f"{text!r} is on the page")

    def wait_no_text(self, text: str) -> None:
        self.wait(lambda: text not in self.text, f"{text!r} is not on the page")

    def look_like(self, *, dark: bool = False, phone: bool = False) -> None:
        """The colours and the width of the screen."""
        self.browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
        )
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": 390 if phone else 1280,
                "height": 844 if phone else 900,
                "deviceScaleFactor": 1,
                "mobile": phone,
            },
        )

    def axe(self) -> list[str]:
        """The serious findings of axe."""
        self.run(AXE.read_text())
        found = self.browser.execute_async_script(  # type: ignore[no-untyped-call]
            "axe.run().then(found => arguments[0](JSON.stringify(found.violations)))"
        )
        return [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]} "
            f"{one['nodes'][0].get('failureSummary', '')[:200]}"
            for one in json.loads(found)
            if one["impact"] in ("serious", "critical")
        ]

    def errors(self) -> list[str]:
        """What the browser's console has of severe errors, without those of the network."""
        return [
            str(one["message"])
            for one in self.browser.get_log("browser")  # type: ignore[no-untyped-call]
            if one["level"] == "SEVERE" and "Failed to load resource" not in one["message"]
        ]


@contextmanager
def browsing(*, scripts: bool = True) -> Iterator[Page]:
    """A new browser with an empty profile."""
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.binary_location = "/usr/bin/chromium"
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        if not scripts:
            options.add_experimental_option(
                "prefs", {"profile.managed_default_content_settings.javascript": 2}
            )
        browser = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        try:
            browser.set_page_load_timeout(WAIT_S_MAX)
            browser.set_script_timeout(WAIT_S_MAX)
            yield Page(browser)
        finally:
            browser.quit()


def opened(state: Path, *words: str) -> str:
    """The URL that `unicron open` prints."""
    done = subprocess.run(
        [UNICRON, "open", "--print", "--state", state, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S_MAX,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def viewing(path: Path) -> Iterator[str]:
    """The URL of `unicron view`."""
    with subprocess.Popen(
        [UNICRON, "view", path, "--print"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


class Cable:
    """A TCP relay to a server: the browser's connection, which can be cut."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = str(parts.hostname), int(parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_cut = False
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.is_cut = True
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.is_cut = False

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_cut:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
