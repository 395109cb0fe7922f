"""A report about a process is taken from the agent of its node only."""

from __future__ import annotations

from decider import Driver, task_of
from unicron.control_plane.decide.advance import is_foreign
from unicron.control_plane.fold import edits
from unicron.events.records import reports as r
from unicron.events.records.envelope import Report


def test_only_the_node_of_a_process_reports_about_it() -> None:
    d = Driver()
    task = task_of(d, d.running())
    rank, orphan = task.ranks[0], task.ranks[1]
    edits.orphan_process(d.state, task, orphan, "is replaced")

    def foreign(node: str, number: int, attempt: int) -> bool:
        return is_foreign(
            d.state,
            Report(
                source=f"{node}/1",
                source_seq=99,
                occurred_s=0.0,
                body=r.RankContinued(task=task.id, rank=number, attempt=attempt, pid=1),
            ),
        )

    assert rank.slot.node == orphan.slot.node == "n1"
    for process in (rank, orphan):
        assert not foreign("n1", process.rank, process.attempt)
        assert foreign("n2", process.rank, process.attempt)
        assert not foreign("n2", process.rank, process.attempt + 1), "there is no such process"
