"""A cluster of Unicron on a real Slurm, started by deploy/slurm/cluster.sbatch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from real_cluster import RealCluster, Spec
from slurm.site import Site
from unicron.cli.cluster.client import Client, connect

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"


class SlurmCluster(RealCluster):
    """`start` submits the job; the tests read its log as that of any cluster."""

    def __init__(
        self,
        path: Path,
        site: Site,
        policy: Mapping[str, object] | None = None,
        *,
        num_slots: int = 1,
    ) -> None:
        super().__init__(path, 0, {**(policy or {}), "shared_folders": [str(path)]})
        self.site, self.job = site, ""
        self.env = {
            "UNICRON_STATE": str(self.state.path),
            "UNICRON_SLOTS": str(num_slots),
            "UNICRON_POLICY": str(path / "policy.yaml"),
            "UNICRON_TRACE_DIR": str(path / "trace"),
            "UNICRON_HEALTH": "off",
            "UNICRON_LOOK_S": "2",
            "PATH": f"{Path(sys.executable).parent}:{site.env['PATH']}",
        }

    def submit_job(
        self, specs: Sequence[Spec], *options: str, env: Mapping[str, str] | None = None
    ) -> str:
        """Submit cluster.sbatch with these tasks."""
        files: list[str] = []
        for spec in specs:
            file = self.path / f"{spec['name']}.yaml"
            file.write_text(json.dumps(spec))  # JSON is YAML
            files.append(str(file))
        self.job = self.site.sbatch(
            *options, str(SCRIPTS / "cluster.sbatch"), *files, env={**self.env, **(env or {})}
        )
        return self.job

    def client(self) -> Client:
        self._client = self.wait(
            self._answering,
            lambda: (
                f"a control plane answers; {self.site.job(self.job)}\n{self.site.output(self.job)}"
            ),
        )
        return self._client

    def _answering(self) -> Client | None:
        client = connect(self.state)
        return client if client.get("/v1/health")["ok"] else None

    def wait_tasks(self, num: int) -> list[int]:
        """The tasks, when there are so many."""

        def look() -> list[int] | None:
            found = [int(task["id"]) for task in self.client().get("/v1/state")["tasks"]]
            return found if len(found) >= num else None

        return self.wait(look, lambda: f"{num} tasks\n{self.site.output(self.job)}")

    def slurm(self, *words: str) -> str:
        """The output of `unicron WORDS` on the login node."""
        return self.site.call("unicron", *words, env=self.env)
