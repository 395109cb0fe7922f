"""A real Prometheus that scrapes control planes: Debian's, installed if that is possible."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

INSTALL_S_MAX = 600.0
READY_S_MAX = 120.0


def why_not() -> str:
    """The reason why there is no Prometheus here, or "". Installs it if that is possible."""
    try:
        ran = subprocess.run(
            [Path(__file__).with_name("install.sh")],
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"Prometheus could not be installed within {INSTALL_S_MAX:g} s"
    if ran.returncode:
        return f"no Prometheus here: {(ran.stderr.strip() or 'install.sh failed').splitlines()[-1]}"
    return ""


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=30
        ) as answer:
            return json.load(answer)["data"]

    def wait(self, expression: str) -> Any:
        """The first result of an expression that is not empty."""
        end_s = time.monotonic() + READY_S_MAX
        while time.monotonic() < end_s:
            try:
                if found := self.get("/api/v1/query", query=expression)["result"]:
                    return found
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"{expression} has no result")


@contextmanager
def scraping(
    path: Path, scrape: dict[str, Any], rules: Path, targets: Sequence[str]
) -> Iterator[Prometheus]:
    """A Prometheus with this scrape configuration, each second, of these targets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = path / "prometheus.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [scrape | {"static_configs": [{"targets": list(targets)}]}],
            }
        )
    )
    with (path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={path / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
