"""Clusters on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import site as sites
from slurm.cluster import SlurmCluster
from slurm.site import Site
from twins import small
from unicron.workers.host import linux

LONG_S = 240.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if why := sites.why_not():
        pytest.skip(why)
    with sites.running(tmp_path / "site", "n1", "n2", "n3") as made:
        yield made


def test_one_job_trains_a_task_and_gives_its_nodes_back(tmp_path: Path, site: Site) -> None:
    cluster = SlurmCluster(tmp_path, site)
    job = cluster.submit_job([small("a", tmp_path / "out", slots=(2, 2), iterations=20)], "-N2")
    (task,) = cluster.wait_tasks(1)
    assert {rank["node"] for rank in cluster.wait_whole(task, 2)["ranks"]} == {"n1", "n2"}
    # The join token is in no argument and no environment but the agents' own, which erase it.
    for proc in linux.table():
        for text in (Path(f"/proc/{proc.pid}/cmdline"), Path(f"/proc/{proc.pid}/environ")):
            try:
                assert b"unicron_" not in text.read_bytes(), (proc, text)
            except OSError:  # it has ended
                continue
    site.wait(lambda: site.ended(job), "the job ends", LONG_S)
    assert site.ended(job) == "COMPLETED", site.output(job)
    assert "a finished" in site.output(job)
    site.wait(lambda: all(site.state(node) == "idle" for node in site.nodes), "all are idle")
