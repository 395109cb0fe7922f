"""Reports of device errors and of health changes, for tests of root causes."""

from __future__ import annotations

from typing import Any

from decider import Driver, task_of
from unicron.events.records import reports, statuses
from unicron.events.records.envelope import Record

XID_79 = "NVRM: Xid (PCI:0000:4e:00): 79, GPU has fallen off the bus"


def erred(
    d: Driver,
    node: str = "n2",
    *,
    devices: tuple[int, ...] = (0,),
    status: str = statuses.GPU_DRIVER_ERRORS,
    rule: str = "xid-79",
    code: int = 79,
    origin: Any = "kernel",
    text: str = XID_79,
    pid: int = 0,
) -> list[Record]:
    return d.tell(
        d.source(node),
        reports.DeviceErred(
            node=node,
            incarnation=d.state.nodes[node].incarnation,
            origin=origin,
            status=status,
            rule=rule,
            text=text,
            devices=devices,
            code=code,
            pid=pid,
        ),
    )


def health(
    d: Driver,
    node: str,
    said: Any,
    *,
    check: str = "gpu",
    why: str = "",
    devices: tuple[int, ...] = (),
    status: str = "",
    rule: str = "",
) -> list[Record]:
    return d.tell(
        d.source(node),
        reports.HealthChanged(
            node=node,
            incarnation=d.state.nodes[node].incarnation,
            check=check,
            health=said,
            why=why or f"{check} is {said}",
            devices=devices,
            status=status,
            rule=rule or (status and "a rule"),
        ),
    )


def four(d: Driver) -> int:
    """A task of four ranks on n1 and n2; n3 has no ranks."""
    task = d.running()
    d.progress(task, 3)
    assert {x.slot.node for x in task_of(d, task).ranks.values()} == {"n1", "n2"}
    return task


# --- a device alone ---------------------------------------------------------------------------
def alone(d: Driver, told: list[Record]) -> list[Record]:
    return d.due(f"device/{told[0].body.node}/{told[0].seq}")  # type: ignore[attr-defined]
