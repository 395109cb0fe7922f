"""Custom loops under real agents: the example, and a script like Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_driver import NOT_A_NUMBER, SAMPLE, changed_example
from megatron_trial import stand_in
from real_cluster import RealCluster
from source_changes import changed

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "examples" / "loop.py"
ITERATIONS, MICRO_BATCHES = 12, 6
VICTIM, STRUCK, GROWN = 1, 3, 8
LOOP_S = 200.0
MEGATRON = [sys.executable, "-P", "-m", "unicron.cli.main", "megatron"]


def words(losses: Path) -> list[str]:
    return [
        str(EXAMPLE),
        "--iterations",
        str(ITERATIONS),
        "--micro-batches",
        str(MICRO_BATCHES),
        "--losses",
        str(losses),
    ]


def lines(file: Path) -> dict[int, dict[str, Any]]:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["iteration"]: line for line in entries}


def test_a_killed_rank_of_a_loop_changes_no_result(cluster: RealCluster, tmp_path: Path) -> None:
    undisturbed = subprocess.Popen(
        [sys.executable, *words(tmp_path / "alone")], stdin=subprocess.DEVNULL
    )
    try:
        after = cluster.seq()
        # The shell survives a kill of its child; the process that adopted Unicron counts.
        task = cluster.submit(
            {
                "apiVersion": "unicron/v1",
                "name": "loop",
                "slots": {"min": 1, "max": 3},
                "command": [
                    "sh",
                    "-c",
                    '"$0" "$@" && exit; sleep 300',
                    sys.executable,
                    *words(tmp_path / "struck"),
                ],
                "heal": "in-memory",
                "loop": {
                    "micro_batches": MICRO_BATCHES,
                    "iterations": ITERATIONS,
                    "output": str(tmp_path / "out"),
                },
            }
        )
        cluster.hold(task, VICTIM, event="backward", iteration=STRUCK)
        held = cluster.hold(task, 0, event="forward", iteration=GROWN)
        line = cluster.wait_held(task, VICTIM, 0.0)
        before = {one["rank"]: one["pid"] for one in cluster.traced(task)}
        cluster.hold(task, VICTIM, event="forward", iteration=-1)
        os.kill(line["pid"], signal.SIGKILL)
        cluster.wait_told(after, "Quiesce", task=task, mode="boundary")  # the newcomer is ready
        held.unlink()
        cluster.wait_told(after, "RankFinished", task=task)
        ended = cluster.wait_ended(task)
        assert ended["state"] == "finished", (ended, cluster.endings(task))
        assert undisturbed.wait(LOOP_S) == 0
    finally:
        if undisturbed.poll() is None:
            undisturbed.kill()
            undisturbed.wait()

    pids: dict[int, set[int]] = {}
    for traced in cluster.traced(task):
        pids.setdefault(traced["rank"], set()).add(traced["pid"])
    assert {rank for rank, found in pids.items() if found == {before[rank]}} == {0, 2}
    cluster.wait_healed(after)

    alone, struck = lines(tmp_path / "alone"), lines(tmp_path / "struck")
    assert sorted(struck) == sorted(alone) == list(range(ITERATIONS))
    for iteration, one in struck.items():
        assert one["loss"] == pytest.approx(alone[iteration]["loss"], rel=1e-6)
    assert {struck[0]["ranks"], struck[STRUCK]["ranks"], struck[ITERATIONS - 1]["ranks"]} == {2, 3}
    assert struck[STRUCK]["ranks"] == 2
    assert struck[4]["validation"] is not None


@pytest.mark.thorough
def test_a_loop_that_declines_restarts_as_a_whole(cluster: RealCluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    step = "        iteration = job.step()\n"
    changes = (
        ("calculate_per_token_loss=True", "calculate_per_token_loss=False"),
        (step, f"{step}        time.sleep(0.3)\n"),
    )
    script.write_text(changed(EXAMPLE.read_text(), changes))
    losses = tmp_path / "losses"
    after = cluster.seq()
    task = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "scaled",
            "slots": {"min": 2, "max": 2},
            "command": [sys.executable, str(script), *words(losses)[1:]],
            "heal": "in-memory",
            "loop": {
                "micro_batches": MICRO_BATCHES,
                "iterations": ITERATIONS,
                "checkpoint_every": 1,
                "output": str(tmp_path / "out"),
            },
        }
    )
    declined: Any = cluster.wait_told(after, "InMemoryRecoveryDeclined", task=task).body
    assert declined.why.startswith("gradients scaled by the number of replicas")
    cluster.wait(
        lambda: (losses.exists() and len(lines(losses)) > STRUCK) or None, "the loop trains"
    )
    first = cluster.wait_told(after, "RankStarted", task=task, rank=VICTIM).body
    os.kill(first.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    assert ended["declined"] == declined.why
    starts = [
        (one.body.rank, one.body.attempt)  # type: ignore[attr-defined]
        for one in cluster.told(after, "RankStarted")
    ]
    assert sorted(starts) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    found = [json.loads(line)["iteration"] for line in losses.read_text().splitlines()]
    assert sorted(set(found)) == list(range(ITERATIONS))
    assert found.count(0) == 1, "the restarted loop did not resume from its checkpoint"
    assert len(list((tmp_path / "out").glob("task-*/iter-*"))) == 1


# --- the launcher of Megatron-LM's scripts --------------------------------------------------------
@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The stand-in's script, laid out as in a clone of Megatron-LM."""
    return stand_in(tmp_path / "megatron-lm") / "pretrain_gpt.py"


def job(name: str, script: Path, slots: int, *words: str) -> dict[str, Any]:
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "slots": {"min": slots, "max": slots},
        "command": [*MEGATRON, str(script), *words],
        "heal": "in-memory",
        "loop": {
            "micro_batches": MICRO_BATCHES,
            "iterations": ITERATIONS,
            "output": str(script.parent / name),
        },
    }


def test_an_unmodified_script_recovers_in_memory(cluster: RealCluster, script: Path) -> None:
    after = cluster.seq()
    struck = cluster.submit(job("struck", script, 3))
    twin = cluster.submit(job("twin", script, 1))
    cluster.hold(struck, VICTIM, event="backward", iteration=STRUCK)
    line = cluster.wait_held(struck, VICTIM, 0.0)
    cluster.hold(struck, VICTIM, event="forward", iteration=-1)
    os.kill(line["pid"], signal.SIGKILL)
    for task in (struck, twin):
        ended = cluster.wait_ended(task)
        assert ended["state"] == "finished", (ended, cluster.endings(task))
    # The outcome is "ended" if the task finished before a replacement rank had loaded.
    (closed,) = [record.body for record in cluster.told(after, "IncidentClosed")]
    assert closed.outcome in ("healed", "ended")  # type: ignore[attr-defined]
    assert (closed.iterations_lost, closed.ckpt_read) == (0, False)  # type: ignore[attr-defined]
    attempts = {line["attempt"] for line in cluster.traced(struck) if line["rank"] != VICTIM}
    assert attempts == {1}
    losses = cluster.losses(struck)
    assert len(losses) == ITERATIONS
    assert losses == pytest.approx(cluster.losses(twin), rel=1e-6)
    output = "".join(log.read_text() for log in cluster.state.logs.glob(f"{struck}-*/*.log"))
    for iteration in range(1, ITERATIONS + 1):  # printed by the last rank at that time
        assert output.count(f"iteration {iteration:8d}/{ITERATIONS:8d} |") == 1, output
    assert output.count(" validation loss at iteration ") == 4
    # Another rank prints the lines now: who stops printing has not stalled.
    assert not cluster.told(after, "IterationsLogged", task=struck)


@pytest.mark.thorough
def test_a_script_that_declines_trains_as_a_command(cluster: RealCluster, script: Path) -> None:
    after = cluster.seq()
    declined_job = job("declined", script, 2, "--use-torch-fsdp2")
    declined_job["loop"]["copy_every"] = 0  # nothing to restart from memory
    task = cluster.submit(declined_job)
    declined: Any = cluster.wait_told(after, "InMemoryRecoveryDeclined", task=task).body
    assert declined.why == "FSDP shards the parameters (--use-torch-fsdp2)"
    assert cluster.wait_ended(task)["state"] == "finished", cluster.endings(task)
    output = "".join(log.read_text() for log in cluster.state.logs.glob(f"{task}-*/*.log"))
    assert f"this loop cannot heal in memory: {declined.why}" in output
    assert "stock pretrain, rank 0 of 2" in output
    assert cluster.told(after, "IterationsLogged", task=task)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            [(SAMPLE, f"    if (iteration, micro_batch) == (2, 1):\n        int('x')\n{SAMPLE}")],
            "`sample` raised ValueError: invalid literal for int() with base 10: 'x' "
            "in micro-batch 1 of "
            "iteration 2",
        ),
        # The rank's own part of these is in tests/workers/training/test_not_a_number.py.
        pytest.param(
            NOT_A_NUMBER["loss"],
            "found NaN in local forward loss calculation: nan, in micro-batch 1 of iteration 2",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            NOT_A_NUMBER["gradient"],
            "data-parallel communication collective: nan, in micro-batch 1 of iteration 2",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["data", "loss", "gradient"],
)
@pytest.mark.thorough
def test_data_that_any_process_refuses_end_the_task(
    cluster: RealCluster, tmp_path: Path, changes: list[tuple[str, str]], line: str
) -> None:
    """Rank 1 meets it, then the rank that takes its micro-batch: nothing is started again for it
    after that, and no slot is disabled."""
    script = changed_example(tmp_path, changes)
    after = cluster.seq()
    task = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "data",
            "slots": {"min": 2, "max": 2},
            "command": [sys.executable, str(script), *words(tmp_path / "losses")[1:]],
            "heal": "in-memory",
            "loop": {
                "micro_batches": MICRO_BATCHES,
                "iterations": ITERATIONS,
                "output": str(tmp_path / "out"),
            },
        }
    )
    ended = cluster.wait_ended(task)
    assert ended["state"] == "failed", (ended, cluster.endings(task))
    assert ended["why"].startswith("2 times the same (wrong input) at iteration ")
    assert line in ended["why"]
    starts = cluster.told(after, "StartRank", task=task)
    assert len(starts) <= 4, starts
