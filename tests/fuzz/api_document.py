"""`make fuzz-api`: requests that schemathesis draws from the OpenAPI document, to a real control
plane over a real server; it checks each answer against the document, and the status for wrong ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fuzz.areas import control_plane
from http_site import JOB
from unicron.cli.cluster.client import Client

CONFIG = """
[parameters]
task = {task}
node = "n1"
nodes = "n1"
name = "ana"

[checks.positive_data_acceptance]
# What a document cannot say: there is such a task, its state allows the request, a code is valid.
expected-statuses = [200, 400, 401, 403, 404, 409, 410, 412, 413, 422]

[checks.missing_required_header]
expected-statuses = [400, 428]

[[operations]]
include-name = "GET /v1/log"
parameters = {{ follow = false }}
"""
RUN_S_MAX = 3_000


def fuzz(folder: Path, *, examples: int, seed: int) -> dict[str, Any]:
    """schemathesis's report of one run; raises if the control plane has logged a traceback."""
    with control_plane(folder, num_agents=1) as (port, token):
        url = f"http://127.0.0.1:{port}"
        client = Client(url, token)
        task = client.post("/v1/tasks", JOB)["task"]
        client.post("/v1/tokens", {"name": "ana", "role": "view"})
        config, report = folder / "schemathesis.toml", folder / "report.json"
        config.write_text(CONFIG.format(task=task))
        done = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                "--no-color",
                "--config-file",
                config,
                "run",
                f"{url}/v1/openapi.json",
                "-H",
                f"Authorization: Bearer {token}",
                "-n",
                str(examples),
                "--seed",
                str(seed),
                "--continue-on-failure",
                "--request-timeout",
                "60",
                "--suppress-health-check",
                "all",
                "--report",
                "json",
                "--report-json-path",
                report,
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
        assert report.exists(), done.stdout + done.stderr
        return {**json.loads(report.read_text()), "output": done.stdout}


def main() -> int:
    asks = argparse.ArgumentParser(description=__doc__)
    asks.add_argument("--seed", type=int, default=1)
    asks.add_argument("--examples", type=int, default=100, help="of each call")
    asked = asks.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-fuzz-") as folder:
        found = fuzz(Path(folder), examples=asked.examples, seed=asked.seed)
    if found["exit_code"]:
        print(found["output"])
    cases = found["test_cases"]
    print(
        f"{found['operations']['tested']} of {found['operations']['total']} calls, "
        f"{cases['generated']} requests, {cases['unique_failures']} failures, "
        f"{cases['errored']} errors, {found['running_time']:.0f} s, seed {asked.seed}"
    )
    return int(found["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
