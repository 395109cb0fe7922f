"""Clusters on a real Slurm."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_story import RATES
from slurm import site as sites
from slurm.cluster import SCRIPTS, SlurmCluster
from slurm.site import DOWN_S, Site
from twins import small
from unicron.cli.cluster.state_dir import read_json
from unicron.workers.host import linux

LONG_S = 240.0
BATCH = {"global": 24, "micro": 2}


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


@pytest.mark.thorough
def test_a_command_finds_its_gpu_and_may_use_srun(tmp_path: Path, site: Site) -> None:
    """A rank gets what srun would have set for it, and nothing of the agent's own step."""
    say = (
        'echo "rank $SLURM_PROCID of $SLURM_NTASKS gpu $CUDA_VISIBLE_DEVICES '
        "job $SLURM_JOB_ID steps $(env | grep -cE 'SLURM_(STEP|TASKS)')\"; "
        'srun --overlap -N1 -n1 -w "$SLURMD_NODENAME" sh -c \'echo "step of $SLURM_NTASKS"\''
    )
    cluster = SlurmCluster(tmp_path, site)
    del cluster.env["UNICRON_SLOTS"]
    job = cluster.submit_job(
        [
            {
                "apiVersion": "unicron/v1",
                "name": "say",
                "slots": {"min": 2, "max": 2},
                "throughput": {"2": 1e12},
                "command": ["sh", "-c", say],
            }
        ],
        "-N1",
        "--gpus-per-node=2",
    )
    site.wait(lambda: site.ended(job), "the job ends", LONG_S)
    assert site.ended(job) == "COMPLETED", site.output(job)
    assert "1 of 1 nodes have joined, with 2 slots" in site.output(job)
    said = sorted(file.read_text() for file in cluster.state.path.glob("nodes/n1/logs/*/*.log"))
    assert [text.splitlines() for text in said] == [
        [f"rank {rank} of 2 gpu 0,1 job {job} steps 0", "step of 1"] for rank in (0, 1)
    ], said


def untouched(cluster: SlurmCluster, task: int, after: int = 0) -> None:
    """No fault was seen after `after`, and no iteration of the task was lost."""
    assert not cluster.told(after, "IncidentOpened"), cluster.tail(after)
    assert cluster.task(task)["iterations_lost"] == 0


@pytest.mark.thorough
def test_nodes_join_and_leave_when_slurm_preempts_them(tmp_path: Path, site: Site) -> None:
    cluster = SlurmCluster(tmp_path, site)
    spec = small("a", tmp_path / "out", slots=(1, 3), rates=RATES, batch=BATCH)
    cluster.submit_job([spec], "-N2")
    (task,) = cluster.wait_tasks(1)
    cluster.rest(task)
    cluster.wait_whole(task, 2)
    said = cluster.slurm("slurm", "grow", "1")
    joined = said.split()[1]
    cluster.wait_whole(task, 3)
    node = next(
        rank["node"] for rank in cluster.task(task)["ranks"] if rank["node"] not in ("n1", "n2")
    )
    # A job of a partition that preempts wants the node: it leaves, and comes back after that job.
    urgent = site.sbatch("-p", "high", "-w", node, "--wrap", "sleep 5")
    cluster.wait_whole(task, 2)
    drained = cluster.wait_told(0, "NodeDrained", node=node)
    assert f"slurm job {joined}" in str(drained.body)
    site.wait(lambda: site.ended(urgent) == "COMPLETED", "the urgent job runs", LONG_S)
    site.start_again(joined)
    cluster.wait_whole(task, 3)
    untouched(cluster, task)
    # For good.
    site.call("scancel", "--batch", "--signal=USR2", joined)
    cluster.wait_whole(task, 2)
    site.wait(lambda: site.ended(joined), "the job has ended", LONG_S)
    assert site.ended(joined) == "COMPLETED", site.output(joined)
    untouched(cluster, task)


@pytest.mark.thorough
def test_a_requeued_job_finds_its_log_again(tmp_path: Path, site: Site) -> None:
    cluster = SlurmCluster(tmp_path, site)
    spec = small("a", tmp_path / "out", slots=(1, 2), rates=RATES, iterations=600)
    job = cluster.submit_job([spec], "-N2")
    (task,) = cluster.wait_tasks(1)
    cluster.rest(task)
    cluster.wait_whole(task, 2)
    cluster.wait_steps(task, 5)
    site.call("scancel", "--batch", "--signal=USR1", job)  # as --signal and preemption do
    site.start_again(job)
    site.wait(lambda: site.output(job).count("control plane at") == 2, "it runs again", LONG_S)
    cluster.wait_whole(task, 2)
    untouched(cluster, task)
    assert [one["id"] for one in cluster.client().get("/v1/state")["tasks"]] == [task]
    cluster.rest(task, rest_s=0)
    site.wait(lambda: site.ended(job), "the job ends", LONG_S)
    assert site.ended(job) == "COMPLETED", site.output(job)


@pytest.mark.thorough
def test_tasks_on_other_nodes_train_on_while_the_control_plane_moves(
    tmp_path: Path, site: Site
) -> None:
    cluster = SlurmCluster(tmp_path, site)
    (tmp_path / "a.yaml").write_text(
        json.dumps(small("a", tmp_path / "out", slots=(1, 2), rates=RATES))
    )
    script = tmp_path / "moves.sh"  # all nodes have one address here, so the port changes instead
    script.write_text(
        "#!/bin/bash\n"
        "export UNICRON_PORT=$((21000 + ${SLURM_RESTART_COUNT:-0} * 2))\n"
        f"exec bash {SCRIPTS}/cluster.sbatch {tmp_path}/a.yaml\n"
    )
    job = cluster.job = site.sbatch(
        "-N1", "--exclusive", "--requeue", "--open-mode=append", str(script), env=cluster.env
    )
    (task,) = cluster.wait_tasks(1)
    cluster.rest(task)
    cluster.slurm("slurm", "grow", "1")
    cluster.wait_whole(task, 2)
    before = cluster.pids(task)
    site.call("scancel", "--batch", "--signal=USR1", job)
    site.start_again(job)
    site.wait(lambda: site.output(job).count("control plane at") == 2, "it runs again", LONG_S)
    assert cluster.client().url.endswith(":21002")
    cluster.wait_whole(task, 2)
    untouched(cluster, task)
    assert len(cluster.kept(task, before)) == 1, "the other node's rank has trained on"


@pytest.mark.thorough
def test_slurm_and_unicron_tell_each_other_of_bad_nodes(tmp_path: Path, site: Site) -> None:
    cluster = SlurmCluster(tmp_path, site, {"quarantine_faults": 1})
    job = cluster.submit_job(
        [small("a", tmp_path / "out", slots=(1, 2), rates=RATES)],
        "-N2",
        env={"UNICRON_FOLLOW_OPTIONS": "--both-ways --every 1"},
    )
    (task,) = cluster.wait_tasks(1)
    cluster.rest(task)
    cluster.wait_whole(task, 2)
    site.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a fan is loud")
    cluster.wait_whole(task, 1)
    assert "slurm: draining, a fan is loud" in cluster.slurm("status", "nodes")
    site.call("scontrol", "update", "NodeName=n2", "State=RESUME")
    cluster.wait_whole(task, 2)
    untouched(cluster, task)
    # While slurmctld is away, nothing changes. It stores its state some seconds after a change.
    after, resumed_s = cluster.seq(), time.time()
    site.wait(
        lambda: (site.path / "state" / "node_state").stat().st_mtime > resumed_s,
        "slurmctld stores the node's state",
        LONG_S,
    )
    site.kill("slurmctld")
    site.wait(lambda: "nodes stay as they are" in site.output(job), "it is missed", LONG_S)
    cluster.wait_steps(task)
    site.start_slurmctld()
    site.wait(lambda: "slurm: answers again" in site.output(job), "it is back", LONG_S)
    untouched(cluster, task, after)
    assert not cluster.told(after, "NodeDrained")
    # The agent's processes are killed: a fault of the node, and its quarantine is Slurm's too.
    assert linux.kill_marked(f"UNICRON_PROCESS={cluster.state.path}/nodes/n2".encode())
    cluster.wait_told(after, "NodeQuarantined", node="n2")
    site.wait(lambda: site.state("n2").startswith("drain"), "Slurm drains n2", LONG_S)
    assert site.reason("n2").startswith("unicron: "), site.reason("n2")
    cluster.slurm("lift", "n2", "--reason", "repaired")
    site.wait(lambda: site.state("n2").startswith("alloc"), "Slurm uses n2", LONG_S)
    assert not cluster.told(after, "NodeDrained")
    cluster.wait_whole(task, 2)


@pytest.mark.thorough
def test_when_the_first_node_is_lost_the_job_runs_again(tmp_path: Path, site: Site) -> None:
    cluster = SlurmCluster(tmp_path, site)
    spec = small("a", tmp_path / "out", slots=(1, 2), rates=RATES, checkpoint_every=10)
    job = cluster.submit_job([spec], "-N2")
    (task,) = cluster.wait_tasks(1)
    cluster.rest(task)
    cluster.wait_whole(task, 2)
    cluster.wait_told(0, "CheckpointPublished", task=task)
    saved, seq = cluster.task(task)["checkpoint_iteration"], cluster.seq()
    site.kill("n1")
    site.start_again(job)
    site.wait(lambda: site.output(job).count("control plane at") == 2, "it runs again", LONG_S)
    cluster.wait(
        lambda: {rank["node"] for rank in cluster.task(task)["ranks"]} == {"n2", "n3"} or None,
        "the task is on the nodes of the job",
    )
    cluster.wait_whole(task, 2)
    assert cluster.task(task)["iteration"] >= saved > 0
    assert cluster.seq() > seq  # the log goes on


@pytest.mark.thorough
def test_a_node_that_a_job_has_lost_is_no_longer_its_own(tmp_path: Path, site: Site) -> None:
    """A task that was only there moves when Slurm marks the node down, and a later job has it."""
    cluster = SlurmCluster(tmp_path, site)
    job = cluster.submit_job(
        [small(name, tmp_path / name, slots=(1, 1), rates=RATES) for name in "ab"],
        "-N2",
        "--no-requeue",
        env={"UNICRON_FOLLOW_OPTIONS": "--every 1"},
    )
    tasks = cluster.wait_tasks(2)
    for task in tasks:
        cluster.wait_whole(task, 1)
    cluster.slurm("slurm", "grow", "1")
    cluster.wait(lambda: len(cluster.client().get("/v1/state")["nodes"]) == 3 or None, "n3 joins")
    (task,) = (task for task in tasks if cluster.on(task, "n2"))
    after = cluster.seq()
    site.kill("n2")
    drained: Any = cluster.wait_told(after, "NodeDrained", node="n2").body
    assert drained.down, drained
    cluster.wait(lambda: cluster.on(task, "n3") or None, "it moves to n3")
    closed: Any = cluster.wait_told(after, "IncidentClosed").body
    assert closed.pause_s > DOWN_S - 1.0, "since the node fell silent"
    site.start_slurmd("n2")
    cluster.slurm("slurm", "grow", "1")
    cluster.wait_told(after, "NodeJoined", node="n2")
    site.call("scancel", "--batch", "--signal=USR1", job)
    site.wait(lambda: site.ended(job), "the job ends", LONG_S)
    assert "leaves n1: Slurm takes its nodes back" in site.output(job), site.output(job)


@pytest.mark.thorough
def test_an_allocation_for_a_control_plane_elsewhere(tmp_path: Path, site: Site) -> None:
    there = SlurmCluster(tmp_path / "there", site)
    first = there.submit_job([], "-N1")  # without tasks it stays
    there.wait(lambda: there.client().get("/v1/state")["nodes"] or None, "its node has joined")
    here = SlurmCluster(tmp_path / "here", site)
    job = here.submit_job(
        [small("a", tmp_path / "out", slots=(3, 3), iterations=20)],
        "-N2",
        env={
            "UNICRON_URL": there.client().url,
            "UNICRON_CA": read_json(there.state.control_planes()[0])["ca"],
            "UNICRON_TOKEN_FILE": str(there.state.path / "token"),
        },
    )
    (task,) = there.wait_tasks(1)
    assert {rank["node"] for rank in there.wait_whole(task, 3)["ranks"]} == set(site.nodes)
    site.wait(lambda: site.ended(job), "the job ends", LONG_S)
    assert site.ended(job) == "COMPLETED", site.output(job)
    assert site.job(first) == "RUNNING"
    assert not here.state.control_planes()


def failed(site: Site, job: str) -> str:
    site.wait(lambda: site.ended(job), "the job ends", LONG_S)
    assert site.ended(job) == "FAILED", site.output(job)
    return site.output(job)


@pytest.mark.thorough
def test_what_cannot_work_is_told_in_a_line(tmp_path: Path, site: Site) -> None:
    cluster = SlurmCluster(tmp_path, site)
    # More slots than the allocation has.
    wide = small("wide", tmp_path / "out", slots=(3, 3))
    said = failed(site, cluster.submit_job([wide], "-N2"))
    assert "wide.yaml: slots.min: 3, but the cluster has had at most 2 slots" in said, said
    # No such program on the nodes.
    job = cluster.submit_job([wide], "-N1", env={"PATH": "/usr/bin:/bin"})
    assert "error: there is no unicron on n1" in failed(site, job)
    # A second cluster in one allocation.
    script = tmp_path / "two.sh"
    script.write_text(
        f"#!/bin/bash\nbash {SCRIPTS}/cluster.sbatch & sleep 10\n"
        f"UNICRON_STATE={tmp_path}/other bash {SCRIPTS}/cluster.sbatch\n"
        "echo code $?; kill %1; exit 1\n"
    )
    said = failed(site, site.sbatch("-N1", str(script), env=cluster.env))
    assert "error: the control plane does not start" in said, said
    assert "code 2" in said
    # A second cluster on the same folder.
    first = cluster.submit_job([small("a", tmp_path / "out", slots=(1, 1))], "-N1")
    cluster.wait_tasks(1)
    second = cluster.submit_job([wide], "-N1")
    assert f"runs in job {first}" in failed(site, second)
    assert site.job(first) == "RUNNING"
