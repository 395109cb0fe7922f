"""Dumps from several files and folders: of all nodes together, of one job alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from decider import Driver
from hangs import deadline
from hangs import hung as hung_ranks
from hung_job import Layout
from locate_setup import hung
from two_tasks import facts
from unicron.cli.app import run_command
from unicron.cli.screens import incident
from unicron.cli.screens import task as task_screen
from unicron.cli.screens.incident import folders, in_words
from unicron.cli.terminal.format import UNBROKEN
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history


def write(folder: Path, dumps: dict[int, dict[str, Any]], **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    for rank, one in dumps.items():
        (folder / f"flight-rank-{rank}.json").write_text(json.dumps({**one, **more}))


def world(num: int) -> dict[str, Any]:
    return {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(num)))}}


def job(num: int, rank: int, **more: Any) -> dict[str, Any]:
    return {"entries": [{"process_group": ["0", "default_pg"], "collective_seq_id": 1, "op_id": 1,
                         "record_id": 0, "pg_id": 0, "profiling_name": "nccl:all_reduce",
                         "state": "scheduled", "is_p2p": False, "time_created_ns": 1}],
            "pg_config": world(num), **more}


def refused(capsys: pytest.CaptureFixture[str], *paths: Path) -> list[str]:
    assert run_command(["locate", *map(str, paths)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["error:", "hint:"]
    return lines


def test_each_nodes_folder_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks are numbered across nodes; a file that is named twice counts once."""
    dumps = hung(Layout(2, 2, 1), {3: 4})
    write(tmp_path / "a", {rank: dumps[rank] for rank in (0, 1)})
    write(tmp_path / "b", {rank: dumps[rank] for rank in (2, 3)})
    again = tmp_path / "a" / "flight-rank-0.json"
    folders = [str(tmp_path / "a"), str(again), f"{tmp_path}/b/../b"]
    assert run_command(["locate", *folders, "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in answer["suspects"]] == [3]
    assert (answer["ranks"], answer["missing"]) == (4, [])


def test_dumps_of_two_jobs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A larger job that ran there before has left the files of the ranks that this one lacks."""
    write(tmp_path, {rank: job(2, rank) for rank in (0, 1)})
    write(tmp_path, {rank: job(4, rank) for rank in (2, 3)})
    error, hint = refused(capsys, tmp_path)
    assert error == (
        "error: these dumps are of 2 jobs, or of several attempts: 2 ranks "
        f"({tmp_path}/flight-rank-0.json and 1 more), 4 ranks ({tmp_path}/flight-rank-2.json and "
        "1 more)")
    assert hint.startswith("hint: give only the files of one of them")


def test_so_are_our_own_of_two_tasks_or_generations(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", {0: job(2, 0, task=5, generation=1)})
    for at, other in enumerate(({"task": 9, "generation": 1}, {"task": 5, "generation": 2})):
        folder = tmp_path / f"b{at}"
        write(folder, {1: job(2, 1, **other)})
        error, _ = refused(capsys, tmp_path / "a", folder)
        assert "task 5 generation 1, 2 ranks" in error
        assert f"task {other['task']} generation {other['generation']}, 2 ranks" in error
    assert run_command(["locate", str(tmp_path / "a"), "-o", "json"]) == 0


def test_a_dump_that_does_not_say_of_which_job_is_taken(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that has not joined a generation yet, or an older torch."""
    write(tmp_path, {0: job(2, 0, task=5, generation=3)})
    write(tmp_path, {1: {"entries": [], "pg_config": {"0": {
        "name": "0", "desc": "default_pg", "ranks": "[]"}}, "task": 5, "generation": 0}})
    assert run_command(["locate", str(tmp_path), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_the_same_rank_twice_of_one_job_is_refused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, {0: job(2, 0)})
    error, hint = refused(capsys, tmp_path / "a", tmp_path / "b")
    assert "rank 0 is there twice" in error
    assert "numbered across all its nodes" in hint


def test_error_files_beside_the_dumps_are_left_out(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An agent's folder of a task holds its logs, and what torch wrote of an exception."""
    write(tmp_path, {rank: job(2, rank) for rank in (0, 1)})
    (tmp_path / "rank-0.1.log").write_text("a line\n")
    (tmp_path / "rank-0.1.error.json").write_text('{"message": {"message": "it broke"}}')
    assert run_command(["locate", str(tmp_path), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


# --- where they lie -------------------------------------------------------------------------------
def hosts(*found: str) -> list[dict[str, Any]]:
    return [{"id": f"n{at}", "host": host} for at, host in enumerate(found, start=1)]


def told(found: list[dict[str, Any]]) -> str:
    return in_words(found).replace(UNBROKEN, " ")


def test_on_one_machine_one_folder_is_named() -> None:
    found = folders([("n1", "/srv/u/logs/5-a/rank-0.log"), ("n2", "/srv/u/logs/5-a/rank-1.log"),
                     ("n2", "/srv/u/logs/5-a/rank-2.log")], hosts("127.0.0.1", "127.0.0.1"))
    assert [(one["node"], one["folder"]) for one in found] == [
        ("n1", "/srv/u/logs/5-a"), ("n2", "/srv/u/logs/5-a")]
    assert told(found).startswith("unicron locate /srv/u/logs/5-a: the flight recorders")


def test_of_several_machines_it_says_how_to_bring_them_together() -> None:
    found = folders([(f"n{at}", "/srv/u/logs/5-a/r.log") for at in range(1, 7)],
                    hosts(*(f"10.0.0.{at}" for at in range(1, 7))))
    words = told(found)
    assert "n1 10.0.0.1:/srv/u/logs/5-a, n2 10.0.0.2:/srv/u/logs/5-a, " in words
    assert "n4 10.0.0.4:/srv/u/logs/5-a and 2 more; " in words
    assert words.endswith("(scp -r HOST:FOLDER NODE), then unicron locate n1 n2 n3 n4 ...")


def test_the_pages_of_a_hang_name_them() -> None:
    d = Driver()
    task = d.running()
    hung_ranks(d, task, 2)
    seen_ = view(d.state)
    (one,) = seen_["tasks"]
    page = " ".join(task_screen.task_status(seen_, one, history(d.log), now_s=d.now_s))
    assert "dumps unicron locate /tmp" in " ".join(page.split())
    d.due(deadline(d, task))
    facts_ = facts(d.log)
    assert {x["folder"] for x in facts_["dumps"]} == {"/tmp"}
    assert {x["node"] for x in facts_["dumps"]} == {"n1", "n2"}
    assert any(line.startswith("dumps      unicron locate /tmp") for line in
               incident.page(facts_))
    d.exit(task, 2)
    assert facts(d.log)["dumps"] == facts_["dumps"]


def test_a_fault_that_is_no_hang_has_none() -> None:
    d = Driver()
    task = d.running()
    d.exit(task, 2)
    assert facts(d.log)["dumps"] == []
