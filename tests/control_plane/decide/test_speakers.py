"""An agent reports about its own node, its processes, its tasks, its orders, and nothing else."""

from __future__ import annotations

import pytest
from decider import Driver, task_of
from unicron.control_plane.decide.speakers import foreign, stranger
from unicron.control_plane.fold import edits
from unicron.control_plane.state.task import Task
from unicron.events.log.identity import AGENT_REPORTS
from unicron.events.records import reports as r
from unicron.events.records.envelope import Report
from unicron.events.records.types import Body


def said(body: Body, source: str) -> Report:
    return Report(source=source, source_seq=99, occurred_s=0.0, body=body)


@pytest.fixture
def driver() -> Driver:
    """n1 and n2 with a member each; n3 has joined and trains nothing."""
    d = Driver()
    d.running()
    d.join("n3")
    return d


def is_foreign(d: Driver, body: Body, node: str) -> bool:
    return bool(foreign(d.state, said(body, f"{node}/1")))


def test_only_the_node_of_a_process_reports_about_it() -> None:
    d = Driver()
    task = task_of(d, d.running())
    rank, orphan = task.ranks[0], task.ranks[1]
    edits.orphan_process(d.state, task, orphan, "is replaced")

    def continued(number: int, attempt: int) -> Body:
        return r.RankContinued(task=task.id, rank=number, attempt=attempt, pid=1)

    assert rank.slot.node == orphan.slot.node == "n1"
    for process in (rank, orphan):
        assert not is_foreign(d, continued(process.rank, process.attempt), "n1")
        assert is_foreign(d, continued(process.rank, process.attempt), "n2")
        unknown = continued(process.rank, process.attempt + 1)
        assert not is_foreign(d, unknown, "n2"), "there is no such process"


def of_task(task: Task, generation: int) -> list[Body]:
    """Each kind of report about a task, in this generation."""
    return [
        r.TaskProgressed(
            task=task.id,
            generation=generation,
            first_iteration=10**9,
            losses=(1.0,),
            step_s=(1.0,),
            rate_flops=1e24,
            micro_batches=1,
        ),
        r.LossNotFinite(task=task.id, generation=generation, iteration=10**9, text="nan"),
        r.LossFiniteAgain(task=task.id, generation=generation, iteration=9, num=1),
        r.CheckpointSaved(
            task=task.id,
            generation=generation,
            step_version=9,
            path="gen-1/iter-999",
            ckpt_bytes=1,
            final=True,
        ),
    ]


def test_only_a_node_with_a_member_reports_about_a_task(driver: Driver) -> None:
    """Whose progress, losses and checkpoints a stranger reported, hid stalls and falsified WAF."""
    d = driver
    (task,) = d.state.tasks.values()
    own = {member.node for member in task.members}
    assert own == {"n1", "n2"}
    bodies = of_task(task, task.generation)
    assert {type(one) for one in bodies} == {
        kind for kind, about in AGENT_REPORTS.items() if about == "member"
    }
    for body in bodies:
        assert not any(is_foreign(d, body, node) for node in own)
        assert is_foreign(d, body, "n3")
        assert stranger(d.state, said(body, "evil/1")) == "node evil has not joined"
    # The fold ignores what is about an earlier generation.
    assert not any(is_foreign(d, body, "n3") for body in of_task(task, task.generation - 1))


def test_only_the_node_of_a_process_reports_its_share(driver: Driver) -> None:
    """A share counts also when its process is gone: an unknown process has none."""
    d = driver
    (task,) = d.state.tasks.values()
    member = task.members[0]

    def stored(attempt: int) -> Body:
        return r.MemoryCheckpointStored(
            task=task.id,
            rank=member.rank,
            attempt=attempt,
            generation=task.generation,
            step_version=3,
            node="n3",
            copy_bytes=1,
            checksum="crc32:00000000",
        )

    assert not is_foreign(d, stored(member.attempt), member.node)
    assert is_foreign(d, stored(member.attempt), "n3")
    assert is_foreign(d, stored(member.attempt + 5), "n3")
    assert is_foreign(d, stored(member.attempt + 5), member.node)
    d.exit(task.id, member.rank)
    assert not is_foreign(d, stored(member.attempt), member.node), "it was a member"


def test_an_incarnation_is_known_from_its_first_report_on(driver: Driver) -> None:
    left = r.NodeLeft(node="n1", incarnation=2, reason="")
    known = driver.state.nodes["n1"].incarnation
    assert stranger(driver.state, said(left, f"n1/{known}")) == ""
    assert stranger(driver.state, said(left, f"n1/{known - 1}")) == ""
    why = f"incarnation {known + 1} of node n1 has not joined"
    assert stranger(driver.state, said(left, f"n1/{known + 1}")) == why
    joins = r.NodeJoined(node="n1", incarnation=known + 1, host="h", pid=1, num_slots=1)
    assert stranger(driver.state, said(joins, f"n1/{known + 1}")) == ""


def test_the_copies_of_a_store_end_only_by_the_word_of_its_node() -> None:
    """A rank said that the store of another node was a later one: the copies of every task there
    were forgotten, and what the node stored later did not count."""
    d = Driver()
    task = task_of(d, d.running())
    rank = next(one for one in task.ranks.values() if one.slot.node == "n2")
    start = d.state.nodes["n1"].keeper_start

    def stored(keeper_start: int, node: str = "n1") -> Body:
        return r.MemoryCheckpointStored(
            task=task.id,
            rank=rank.rank,
            attempt=rank.attempt,
            generation=task.generation,
            step_version=1,
            node=node,
            copy_bytes=1,
            checksum="crc32:00000000",
            keeper_start=keeper_start,
        )

    assert not is_foreign(d, stored(start), "n2")
    assert not is_foreign(d, stored(0), "n2"), "of an older agent"
    for later in (start + 1, 2**53 - 1):
        assert is_foreign(d, stored(later), "n2")
        assert is_foreign(d, stored(later, "n2"), "n2"), "its ranks do not speak for the node"
    lost = r.MemoryCheckpointsLost(
        node="n1", incarnation=1, task=0, why="it has exited", keeper_start=start
    )
    d.tell(d.source("n1"), lost)
    assert not is_foreign(d, stored(start + 1), "n2")
