"""The order to start a rank names the slots of its task on its node, by rank."""

from __future__ import annotations

from decider import Driver, only, spec
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.statuses import GPU_DRIVER_ERRORS


def local(records: list[Record]) -> dict[int, tuple[str, int, tuple[int, ...]]]:
    """By rank, of the last order to start it: node, slot, and the slots of the task there."""
    return {
        record.body.rank: (record.body.slot.node, record.body.slot.index, record.body.local_slots)
        for record in only(o.StartRank, records)
    }


def test_two_tasks_of_a_node_have_their_own_slots() -> None:
    d = Driver(nodes=2, slots=4)
    first = d.submit(spec(slots={"min": 3, "max": 3}))
    d.obey(d.log)
    begin = len(d.log)
    second = d.submit(spec(name="beta", slots={"min": 5, "max": 5}))
    begun = local(d.log[begin:])
    for task, starts in ((first, local(d.log[:begin])), (second, begun)):
        target = {seat.rank: seat.slot for seat in d.state.tasks[task].target}
        for rank, (node, slot, slots) in starts.items():
            assert (node, slot) == (target[rank].node, target[rank].index)
            assert slots == tuple(
                target[other].index for other in sorted(target) if target[other].node == node
            )
            assert slot in slots
    assert {slots for _, _, slots in begun.values()} - {(0, 1, 2, 3)}, "a node is shared"


def test_a_slot_that_is_out_is_not_among_them() -> None:
    d = Driver(nodes=1, slots=4)
    task = d.submit(spec(slots={"min": 2, "max": 3}))
    d.obey(d.log)
    d.progress(task)
    (lost,) = [seat.slot.index for seat in d.state.tasks[task].target if seat.rank == 1]
    began = len(d.log)
    new = d.tell(
        "n1/1",
        r.DeviceErred(
            node="n1",
            incarnation=1,
            origin="nvml",
            status=GPU_DRIVER_ERRORS,
            rule="nvml-lost",
            text="GPU is lost",
            devices=(lost,),
            code=79,
            pid=0,
        ),
    )
    d.obey(new + d.exit(task, 1))
    starts = local(d.log[began:])
    assert starts
    for _, slot, slots in starts.values():
        assert lost not in slots
        assert slot in slots
    target = {seat.rank: seat.slot.index for seat in d.state.tasks[task].target}
    assert starts[1][2] == tuple(target[rank] for rank in sorted(target))
    assert list(starts[1][2]) != sorted(starts[1][2]), "the rank has the last slot now"
