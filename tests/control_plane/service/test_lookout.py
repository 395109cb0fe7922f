"""A leader that has foreseen an event decides upon it as one that has not, from its table."""

from __future__ import annotations

import asyncio
import operator
import time

import pytest
from coordinators import joined, told
from msgspec.structs import replace
from planner_cases import case
from unicron.control_plane.decide.replay import verify
from unicron.control_plane.planner.problem_of_state import plan_input
from unicron.control_plane.service import lookout
from unicron.control_plane.service.coordinator import Coordinator
from unicron.events.log.memory import MemoryLog
from unicron.events.records.decisions import PlanChosen
from unicron.events.records.reports import NodeLeft, TaskSubmitted
from unicron.events.spec import job as spec
from unicron.events.spec.policy import Policy

LIMIT_S = 30.0
POLICY = Policy(silence_s_max=1e6)
"""No node here beats."""


def job(name: str, most: int) -> TaskSubmitted:
    return TaskSubmitted(spec=spec.parse({
        "apiVersion": spec.API_VERSION, "name": name, "slots": {"min": 1, "max": most},
        "train": {"iterations": 3, "output": f"/{name}", "batch": {"global": 16, "micro": 2}}}))


async def has_looked(leader: Coordinator) -> None:
    """Until the table is that of what the log tells now."""
    assert leader.lookout is not None
    async with asyncio.timeout(LIMIT_S):
        while True:
            asked = plan_input(await leader.settled()).asked
            if leader.lookout.table is not None and leader.lookout.table.asked == asked:
                return
            await asyncio.sleep(0.005)


async def lived(log: MemoryLog) -> tuple[int, list[PlanChosen]]:
    """Two tasks on three nodes; one node is lost, another joins. How many plans were looked up."""
    leader = Coordinator(log, clock=time.time, nonce="a", code="test", policy=POLICY, foresees=True)
    running = asyncio.create_task(leader.run())
    try:
        await leader.settled()
        for number in (1, 2, 3):
            await log.send([told(1, joined(f"n{number}"), f"n{number}/1")])
        for name, most in (("alpha", 4), ("beta", 2)):
            await leader.write(name, job(name, most))
        used = leader.lookout.num_used if leader.lookout is not None else 0
        for source, number, body in (("n3/1", 2, NodeLeft(node="n3", incarnation=1, reason="gone")),
                                     ("n4/1", 1, joined("n4"))):
            await has_looked(leader)
            seq = leader.seq
            await log.send([told(number, body, source)])
            async with asyncio.timeout(LIMIT_S):
                while not any(record.seq > seq and isinstance(record.body, PlanChosen)
                              for record in await log.read(after=0, num_max=10_000)):
                    await asyncio.sleep(0.005)
        assert leader.lookout is not None
        return leader.lookout.num_used - used, [
            record.body for record in await log.read(after=0, num_max=10_000)
            if isinstance(record.body, PlanChosen)]
    finally:
        leader.stop()
        await asyncio.wait_for(running, LIMIT_S)


def test_what_was_foreseen_is_looked_up_and_is_the_plan_that_would_be_made() -> None:
    async def main() -> None:
        log = MemoryLog(time.time)
        num, plans = await lived(log)
        assert num == 2
        assert {plans[-2].num_slots, plans[-1].num_slots} == {4, 6}
        verdict = verify(await log.read(after=0, num_max=10_000))
        assert verdict.ok, verdict.words
        assert verdict.recomputed["PlanChosen"] == len(plans)

    asyncio.run(main())


def test_what_binds_a_plan_counts_for_the_size_of_a_table() -> None:
    """Each event is then a search of its own."""
    large, small = case(100, 4096), case(12, 256)
    assert lookout.work_num(large) < lookout.WORK_NUM_MAX
    for asked, more in ((large, operator.gt), (small, operator.lt)):
        wishes = asked.wishes
        for bound in (
                replace(asked, moves_max=4), replace(asked, floor=True),
                replace(asked, wishes=tuple(replace(wish, priority=i % 3)
                                            for i, wish in enumerate(wishes))),
                replace(asked, wishes=tuple(replace(wish, team="red") for wish in wishes),
                        quotas=(("red", asked.num_slots // 2),))):
            assert lookout.work_num(asked) < lookout.work_num(bound)
            assert more(lookout.work_num(bound), lookout.WORK_NUM_MAX)


def test_above_a_size_there_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "WORK_NUM_MAX", 0)

    async def main() -> None:
        leader = Coordinator(log := MemoryLog(time.time), clock=time.time, nonce="a", code="test",
                             policy=POLICY, foresees=True)
        running = asyncio.create_task(leader.run())
        await leader.settled()
        assert leader.lookout is not None
        await has_looked(leader)
        await log.send([told(1, joined())])
        await leader.write("alpha", job("alpha", 2))
        async with asyncio.timeout(LIMIT_S):
            while leader.lookout.table is not None:
                await asyncio.sleep(0.005)
        leader.stop()
        await asyncio.wait_for(running, LIMIT_S)

    asyncio.run(main())
