"""Slots return over HTTP: after a check of their devices by the agent, one clear answer each."""

from __future__ import annotations

import asyncio
from typing import Any

from http_site import Site, real
from unicron.events.records import statuses
from unicron.events.records.reports import DeviceErred, NodeJoined, QuarantineLifted
from unicron.events.spec.policy import Policy

SOON = Policy(evidence_s_max=0.05, quarantine_faults=1000)


async def two_slots_out(site: Site, accelerator: str = "cuda") -> None:
    await site.tell(
        NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=3, accelerator=accelerator)
    )
    for slot in (0, 1):
        await site.tell(
            DeviceErred(
                node="n1",
                incarnation=9,
                origin="kernel",
                status=statuses.GPU_DRIVER_ERRORS,
                rule="xid-79",
                text="fallen off the bus",
                devices=(slot,),
                code=79,
            )
        )
    while await out(site) != [0, 1]:
        await asyncio.sleep(0.02)


async def out(site: Site) -> list[int]:
    _, node = await site.ask("GET", "/v1/nodes/n1")
    return [slot["index"] for slot in node["slots"] if slot["out"]]


async def lift(site: Site, names: str, key: str) -> tuple[int, Any]:
    return await site.ask("POST", f"/v1/nodes/{names}/lift", {"reason": "new"}, Idempotency_Key=key)


async def lifted(site: Site) -> list[QuarantineLifted]:
    return [
        one.body
        for one in await site.log.read(after=0, num_max=999)
        if isinstance(one.body, QuarantineLifted)
    ]


async def _a_slot_returns_if_its_device_is_healthy(site: Site) -> None:
    await two_slots_out(site)
    path, words = "/v1/nodes/n1:1/lift", {"reason": "new"}
    assert await site.refusal(503, "POST", path, words) == (
        "the device of n1/1 was not checked: the agent of n1 does not answer",
        "unicron status nodes; nothing was done",
    )
    site.log.devices["n1"] = {1: "cuInit: CUDA_ERROR_NO_DEVICE"}
    assert await site.refusal(409, "POST", path, words) == (
        "n1/1 is still sick: cuInit: CUDA_ERROR_NO_DEVICE",
        "repair it, then unicron lift n1/1",
    )
    assert not await lifted(site)
    assert await out(site) == [0, 1]
    site.log.devices["n1"] = {}
    status, first = await lift(site, "n1:1", "once")
    assert (status, await out(site)) == (200, [0])
    site.log.devices.clear()  # a repetition is answered without another check
    assert await lift(site, "n1:1", "once") == (200, first)
    (record,) = await lifted(site)
    assert (record.slots, record.quarantine, record.reason, record.role) == (
        (1,),
        False,
        "new",
        "admin",
    )
    await site.refused(409, "POST", path, words)
    await site.refused(404, "POST", "/v1/nodes/n1:9/lift", words)


test_a_slot_returns_if_its_device_is_healthy = real(_a_slot_returns_if_its_device_is_healthy, SOON)


async def _of_a_node_the_sick_slots_stay_out(site: Site) -> None:
    await two_slots_out(site)
    site.log.devices["n1"] = {0: "lost", 1: "lost"}
    assert "n1/0 is still sick: lost" in await site.refused(409, "POST", "/v1/nodes/n1/lift", {})
    site.log.devices["n1"] = {0: "lost"}
    assert (await lift(site, "n1", "k"))[0] == 200
    assert await out(site) == [0]
    assert [one.slots for one in await lifted(site)] == [(1,)]


test_of_a_node_the_sick_slots_stay_out = real(_of_a_node_the_sick_slots_stay_out, SOON)


async def _an_answer_that_cannot_be_read_is_none(site: Site) -> None:
    await two_slots_out(site)
    for answer in (b"", b"\x81\x01\xa1\xff", b"\x91" * 5_000, b"\x81\xcf" + b"\xff" * 8 + b"\xa0x"):
        site.log.devices["n1"] = answer
        detail = await site.refused(503, "POST", "/v1/nodes/n1:1/lift", {})
        assert "the agent of n1 answers about n1/1 what cannot be read: " in detail
    assert await out(site) == [0, 1]


test_an_answer_that_cannot_be_read_is_none = real(_an_answer_that_cannot_be_read_is_none, SOON)


async def _a_dry_run_is_carried_out_after_the_check(site: Site) -> None:
    await two_slots_out(site)
    change = {"lift": ["n1/0"]}
    reply = await site.client.post(
        f"{site.url}/v1/plan/dry-run", json=change, headers={"Authorization": "Bearer secret"}
    )
    assert reply.status == 200
    site.log.devices["n1"] = {0: "lost"}
    for _ in range(2):
        body = {"change": change, "reason": "new"}
        status, answer = await site.ask(
            "POST", "/v1/plan/apply", body, If_Match=reply.headers["ETag"]
        )
        if status == 200:
            break
        assert (status, answer["detail"]) == (409, "n1/0 is still sick: lost")
        site.log.devices["n1"] = {}
    assert (status, await out(site)) == (200, [1])


test_a_dry_run_is_carried_out_after_the_check = real(
    _a_dry_run_is_carried_out_after_the_check, SOON
)


async def _a_slot_without_a_device_returns_at_once(site: Site) -> None:
    await two_slots_out(site, "cpu")
    assert (await lift(site, "n1:0,n1:1", "k"))[0] == 200
    assert not await out(site)


test_a_slot_without_a_device_returns_at_once = real(_a_slot_without_a_device_returns_at_once, SOON)
