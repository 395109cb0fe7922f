"""A real hang: the task's page names the folder of its flight recorders, and locate reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import RealCluster, running
from twins import small
from unicron.cli.app import run_command
from unicron.cli.screens import task as task_screen
from unicron.cli.terminal.format import UNBROKEN
from unicron.control_plane.history.history import History

VICTIM = 1
NUM = 4
DUMPED_S_MAX = 30.0


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster that acts on no stall while the test lasts."""
    with running(tmp_path_factory.mktemp("named"), policy={
            "evidence_s_max": 4.0, "hang_s_min": 600.0}) as made:
        yield made


def test_the_page_of_a_task_that_stands_says_what_to_type(
        patient: RealCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = patient.submit(small("hangs", tmp_path, checkpoint_every=0))
    patient.wait_whole(task, NUM)
    patient.wait_paced(task, NUM)
    after = patient.seq()
    patient.hold(task, VICTIM, event="forward", then="gil")
    for rank in range(NUM):
        patient.wait_told(after, "RankStalled", task=task, rank=rank)
    seen = patient.client().get("/v1/state")
    (one,) = [x for x in seen["tasks"] if x["id"] == task]
    page = task_screen.task_status(seen, one, History(), now_s=time.time())
    (line,) = [x.replace(UNBROKEN, " ") for x in page if x.startswith("dumps")]
    folder = Path(line.partition("unicron locate ")[2].partition(":")[0])
    (folder / "rank-0.attempt-1.error.json").write_text('{"message": "of an earlier process"}')
    last_s = time.monotonic() + DUMPED_S_MAX
    while len(list(folder.glob("flight-rank-*.json"))) < NUM - 1:
        assert time.monotonic() < last_s, patient.tail(after)
        time.sleep(0.05)
    assert run_command(["locate", str(folder), "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [x["rank"] for x in answer["suspects"]] == [VICTIM], answer
