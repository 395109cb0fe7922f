"""The HTTP API: each call over a real socket, each refusal in one line with a hint."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import msgspec
import pytest
from decider import Driver
from http_site import IDENTITIES, JOB, Site, Test, real, serving
from unicron import __version__
from unicron.control_plane.api import http as api_http
from unicron.control_plane.api import requests
from unicron.control_plane.planner.pending import NOT_CHOSEN
from unicron.control_plane.state.cluster import DECIDER_VERSION
from unicron.events.records import codec
from unicron.events.records.reports import NodeJoined, NodeLeft, RankStarted
from unicron.events.spec import job
from unicron.events.spec.policy import OUTPUT_BYTES_MAX, REDACT, Policy

TWO: dict[str, Any] = JOB | {"name": "two", "train": {"iterations": 3, "output": "/two"}}


def with_policy(**policy: Any) -> Callable[[Test], Callable[[], None]]:
    return lambda test: real(test, Policy(**policy))


N1 = NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=2)
COMMAND: dict[str, Any] = {
    "apiVersion": job.API_VERSION,
    "name": "sleeps",
    "command": ["sleep", "600"],
}


@real
async def test_health(site: Site) -> None:
    _, answer = await site.ask("GET", "/v1/health")
    assert answer["ok"] is answer["leader"] is True
    assert (answer["cluster"], answer["epoch"], answer["seq"]) == ("test", 1, 2)


@real
async def test_all_other_calls_need_the_token(site: Site) -> None:
    for token in ("", "Bearer wrong", "secret", "Bearer secret\x80"):
        assert "token" in await site.refused(401, "GET", "/v1/state", Authorization=token)
    await site.refused(401, "POST", "/v1/tasks", JOB, Authorization="Bearer wrong")
    assert site.coordinator.seq == 2


@real
async def test_submit_state_cancel(site: Site) -> None:
    status, answer = await site.ask("POST", "/v1/tasks", JOB, Idempotency_Key="k1")
    assert (status, answer) == (200, {"seq": 3, "task": 3})
    assert (await site.ask("POST", "/v1/tasks", JOB, Idempotency_Key="k1"))[1] == answer
    _, state = await site.ask("GET", "/v1/state")
    assert [task["id"] for task in state["tasks"]] == [3]
    cancel = "/v1/tasks/3/cancel"
    _, first = await site.ask("POST", cancel, {"reason": "why not"}, Idempotency_Key="k2")
    _, again = await site.ask("POST", cancel, {"reason": "why not"}, Idempotency_Key="k2")
    assert first == again, "a repeat after the task's end has the same answer"
    assert "has ended" in await site.refused(409, "POST", cancel, {})
    assert "no task 99" in await site.refused(404, "POST", "/v1/tasks/99/cancel", {})
    assert "no task x" in await site.refused(404, "POST", "/v1/tasks/x/cancel", {})


# --- requests of operators -----------------------------------------------------------------------
@real
async def test_a_weight_is_set(site: Site) -> None:
    await site.ask("POST", "/v1/tasks", JOB)
    body = await site.written_once(
        "TaskWeightSet", "/v1/tasks/3/weight", {"weight": 2.5, "reason": " dead\nline "}
    )
    assert (body.task, body.weight, body.reason) == (3, 2.5, "dead line")
    _, state = await site.ask("GET", "/v1/state")
    assert state["tasks"][0]["weight"] == 2.5
    path, seq = "/v1/tasks/3/weight", site.coordinator.seq
    for weight in (0, -1, 2e6, 1e-9):
        assert f"{weight:g}" in await site.refused(422, "POST", path, {"weight": weight})
    await site.refused(422, "POST", path, b'{"weight": 1e999}')
    await site.refused(400, "POST", path, {"weight": "2"})
    await site.refused(400, "POST", path, {})
    assert await site.refusal(404, "POST", "/v1/tasks/9/weight", {"weight": 2}) == (
        "there is no task 9",
        "there is 3 (job)",
    )
    assert site.coordinator.seq == seq, "nothing was written"
    await site.ask("POST", "/v1/tasks/3/cancel", {})
    assert "has ended" in await site.refused(409, "POST", path, {"weight": 2})


@real
async def test_healing_is_frozen_and_resumed(site: Site) -> None:
    assert "not frozen" in await site.refused(409, "POST", "/v1/unfreeze", {})
    body = await site.written_once("HealingFrozen", "/v1/freeze", {"reason": "switches change"})
    assert body.reason == "switches change"
    _, state = await site.ask("GET", "/v1/state")
    assert state["cluster"]["healing"] == "frozen: switches change"
    message, hint = await site.refusal(409, "POST", "/v1/freeze", {"reason": "me too"})
    assert message == "healing is frozen already: switches change"
    assert hint.startswith("unicron unfreeze")
    await site.written_once("HealingResumed", "/v1/unfreeze", {"reason": "done"})
    assert (await site.ask("GET", "/v1/state"))[1]["cluster"]["healing"] == "on"


@with_policy(allow_inject=True)
async def test_a_reason_that_is_too_long_is_refused(site: Site) -> None:
    await site.tell(N1)
    task = (await site.ask("POST", "/v1/tasks", COMMAND))[1]["task"]
    await site.tell(RankStarted(task=task, rank=0, attempt=1, node="n1", pid=7, log_path="/log"))
    seq, too_long = site.coordinator.seq, " ".join(["x" * 99] * 2) + "\nx"
    calls: list[tuple[str, dict[str, Any]]] = [
        (f"/v1/tasks/{task}/cancel", {}),
        (f"/v1/tasks/{task}/weight", {"weight": 2}),
        ("/v1/freeze", {}),
        ("/v1/nodes/n1/drain", {}),
        ("/v1/inject", {"what": "node", "node": "n1"}),
    ]
    for path, body in calls:
        message = await site.refused(422, "POST", path, body | {"reason": too_long})
        assert message == "reason: 201 characters, and at most 200 fit"
    assert site.coordinator.seq == seq, "nothing was written"
    body = await site.written_once("HealingFrozen", "/v1/freeze", {"reason": too_long[:-2]})
    assert body.reason == too_long[:-2]
    message = await site.refused(422, "POST", "/v1/unfreeze", {"reason": too_long})
    assert message.startswith("reason: ")


@real
async def test_of_two_freezes_at_once_the_first_wins(site: Site) -> None:
    both = await asyncio.gather(
        *(site.ask("POST", "/v1/freeze", {"reason": f"{n}"}) for n in range(2))
    )
    assert sorted(status for status, _ in both) == [200, 409]
    first = next(n for n, (status, _) in enumerate(both) if status == 200)
    _, state = await site.ask("GET", "/v1/state")
    assert state["cluster"]["healing"] == f"frozen: {first}"


@real
async def test_explanations_are_computed_on_request_for_any_seq(site: Site) -> None:
    await site.tell(N1)
    await site.ask("POST", "/v1/tasks", {**COMMAND, "slots": {"min": 2, "max": 2}})
    _, submitted = await site.ask("POST", "/v1/tasks", {**COMMAND, "name": "waits"})
    _, state = await site.ask("GET", "/v1/state")
    waiting = state["tasks"][1]
    assert (waiting["why"], waiting["needs"], state["cluster"]["computed_by"]) == (
        NOT_CHOSEN,
        "",
        0,
    ), "costly explanations are computed on request only"
    _, state = await site.ask("GET", "/v1/state?explain=1")
    waiting = state["tasks"][1]
    assert waiting["needs"].startswith("more slots"), waiting
    assert state["cluster"]["computed_by"] == DECIDER_VERSION
    seq, (_, plan) = state["cluster"]["seq"], await site.ask("GET", "/v1/plan")
    assert plan["tasks"][1]["waits"] == f"{waiting['why']}; needs {waiting['needs']}"
    await site.ask("POST", f"/v1/tasks/{submitted['task']}/cancel", {})
    assert (await site.ask("GET", "/v1/plan"))[1]["seq"] > seq
    assert (await site.ask("GET", f"/v1/plan?at={seq}")) == (200, plan)
    assert "not in the log" in await site.refused(404, "GET", "/v1/plan?at=99999")
    assert "neither a seq nor a time" in await site.refused(400, "GET", "/v1/plan?at=now")
    with mock.patch.object(api_http, "FOLD_S_MAX", -1.0):
        assert "is not reached" in await site.refused(503, "GET", f"/v1/plan?at={seq}")


@with_policy(observe=True)
async def test_an_observing_control_plane_cannot_be_unfrozen(site: Site) -> None:
    message, hint = await site.refusal(409, "POST", "/v1/unfreeze", {})
    assert "--observe" in message
    assert "--act" in hint


@real
async def test_a_node_is_drained_and_undrained(site: Site) -> None:
    assert await site.refusal(404, "POST", "/v1/nodes/n1/drain", {}) == (
        "there is no node 'n1'",
        "there is no node",
    )
    await site.tell(N1)
    assert "is not drained" in await site.refused(409, "POST", "/v1/nodes/n1/undrain", {})
    assert "n1 is heard, so its machine is not off" in await site.refused(
        409, "POST", "/v1/nodes/n1/drain", {"down": True}
    )
    body = await site.written_once("NodeDrained", "/v1/nodes/n1/drain", {"reason": "thermal"})
    assert (body.node, body.reason) == ("n1", "thermal")
    _, state = await site.ask("GET", "/v1/state")
    assert (state["nodes"][0]["drained"], state["nodes"][0]["drain_reason"]) == (True, "thermal")
    assert await site.refusal(409, "POST", "/v1/nodes/n1/drain", {}) == (
        "node n1 is drained already: thermal",
        "unicron undrain n1",
    )
    assert await site.refusal(404, "POST", "/v1/nodes/n7/undrain", {}) == (
        "there is no node 'n7'",
        "there is n1",
    )
    await site.written_once("NodeUndrained", "/v1/nodes/n1/undrain", {})


@real
async def test_several_nodes_are_drained_in_one_append_or_none_is(site: Site) -> None:
    await site.tell(N1)
    await site.tell(msgspec.structs.replace(N1, node="n2"))

    async def drained() -> list[bool]:
        _, state = await site.ask("GET", "/v1/state")
        return [node["drained"] for node in state["nodes"]]

    assert "no node 'n7'" in await site.refused(404, "POST", "/v1/nodes/n1,n7/drain", {})
    assert await drained() == [False, False]
    await site.ask("POST", "/v1/nodes/n1,n2,n1/drain", {"reason": "fans"})
    assert await drained() == [True, True]
    assert "already" in await site.refused(409, "POST", "/v1/nodes/n1,n2/drain", {})
    await site.ask("POST", "/v1/nodes/n2,n1/undrain", {})
    assert await drained() == [False, False]


@real
async def test_fault_injection_must_be_allowed(site: Site) -> None:
    await site.tell(N1)
    message, hint = await site.refusal(403, "POST", "/v1/inject", {"what": "node", "node": "n1"})
    assert "does not allow" in message
    assert "up --allow-inject" in hint
    assert site.coordinator.seq == 3


@with_policy(allow_inject=True)
async def test_fault_injection(site: Site) -> None:
    await site.tell(N1)
    await site.ask("POST", "/v1/tasks", COMMAND)
    task = (await site.ask("GET", "/v1/state"))[1]["tasks"][0]["id"]
    rank = {"what": "rank", "task": task, "rank": 0}
    assert await site.refusal(404, "POST", "/v1/inject", rank) == (
        f"task {task} (sleeps) runs no rank 0",
        "there is no running rank",
    )
    await site.tell(RankStarted(task=task, rank=0, attempt=1, node="n1", pid=7, log_path="/log"))
    message, hint = await site.refusal(404, "POST", "/v1/inject", rank | {"rank": 5})
    assert (message, hint) == (f"task {task} (sleeps) runs no rank 5", "there is 0")
    await site.refused(404, "POST", "/v1/inject", rank | {"task": 99})
    await site.refused(404, "POST", "/v1/inject", {"what": "node", "node": "n7"})
    await site.refused(400, "POST", "/v1/inject", rank | {"what": "disk"})
    stop = rank | {"what": "stop", "reason": "to see"}
    await site.refused(422, "POST", "/v1/inject", stop | {"stop_s": -1})
    await site.refused(
        422, "POST", "/v1/inject", json.dumps(stop)[:-1].encode() + b', "stop_s": 1e999}'
    )
    body = await site.written_once("FaultRequested", "/v1/inject", stop | {"stop_s": 2.5})
    assert (body.what, body.task, body.rank, body.stop_s) == ("stop", task, 0, 2.5)
    order = [r.body for r in await site.log.read(after=0, num_max=99) if r.kind == "InjectFault"]
    assert [(one.what, one.rank, one.stop_s) for one in order] == [("stop", 0, 2.5)]
    await site.tell(NodeLeft(node="n1", incarnation=9, reason="told to"))
    assert "has left" in await site.refused(
        409, "POST", "/v1/inject", {"what": "node", "node": "n1"}
    )


def test_a_refusal_lists_the_ranks_in_order(d: Driver) -> None:
    task = d.state.tasks[d.running()]
    task.ranks = {number: task.ranks[number] for number in (2, 0, 3, 1)}
    d.state.policy = Policy(allow_inject=True)
    with pytest.raises(requests.Refusal) as refused:
        requests.inject(d.state, requests.Fault(what="rank", task=task.id, rank=17), "")
    assert refused.value.hint == "there are 0, 1, 2, 3"


@real
async def test_a_name_or_output_in_use_is_refused(site: Site) -> None:
    submissions = [site.ask("POST", "/v1/tasks", JOB) for _ in range(3)]
    assert sorted([status for status, _ in await asyncio.gather(*submissions)]) == [200, 409, 409]
    seq = site.coordinator.seq
    message = await site.refused(409, "POST", "/v1/tasks", TWO | {"name": "job"})
    assert message == "name: job is live, by task 3 (job)"
    message = await site.refused(
        409, "POST", "/v1/tasks", TWO | {"train": {"iterations": 3, "output": "/two/../out/"}}
    )
    assert message == "train.output: /two/../out/ is being written, by task 3 (job)"
    assert site.coordinator.seq == seq, "nothing was written"
    await site.ask("POST", "/v1/tasks/3/cancel", {})
    assert (await site.ask("POST", "/v1/tasks", JOB))[0] == 200, "an ended task frees its name"


@real
async def test_a_task_that_the_cluster_cannot_hold_is_refused(site: Site) -> None:
    large = JOB | {"slots": {"min": 4, "max": 4}}
    assert (await site.ask("POST", "/v1/tasks", large))[0] == 200, "no node has joined yet"
    await site.tell(NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=3))
    message = await site.refused(422, "POST", "/v1/tasks", TWO | {"slots": large["slots"]})
    assert message == "slots.min: 4, but the cluster has had at most 3 slots"


@real
async def test_an_output_that_only_one_host_has_is_refused(site: Site) -> None:
    for name, host in (("n1", "127.0.0.1"), ("n2", "127.0.0.1"), ("n3", "10.0.0.3")):
        await site.tell(NodeJoined(node=name, incarnation=9, host=host, pid=1, num_slots=1))
        if name == "n2":
            assert (await site.ask("POST", "/v1/tasks", JOB))[0] == 200, "all are on one host"
    message = await site.refused(422, "POST", "/v1/tasks", TWO)
    assert message == ("train.output: /two is not known to be a folder that all 2 hosts share")
    url = TWO | {"train": {"iterations": 3, "output": "s3://bucket/two"}}
    assert (await site.ask("POST", "/v1/tasks", url))[0] == 200
    (await site.coordinator.settled()).policy = Policy(shared_folders=("/two", "/shared/"))
    for number, (output, status) in enumerate(
        {"/two": 200, "/two/../twos": 422, "/shared/a/b": 200, "/shared/../b": 422}.items()
    ):
        other = TWO | {"name": f"other{number}", "train": {"iterations": 3, "output": output}}
        assert (await site.ask("POST", "/v1/tasks", other))[0] == status, output


@pytest.mark.parametrize(
    ("change", "status", "where"),
    [
        ({"name": "Not A Name"}, 422, "name"),
        ({"nonsense": 1}, 422, "nonsense"),
        ({"slots": {"min": 3, "max": 2}}, 422, "slots.max"),
        ({"apiVersion": "v9"}, 422, "apiVersion"),
        ({"train": None}, 422, "exactly one"),
        ({"weight": "heavy"}, 422, "weight"),
    ],
)
def test_a_bad_spec_is_refused(change: dict[str, Any], status: int, where: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), serving() as site:
            assert where in await site.refused(status, "POST", "/v1/tasks", JOB | change)
            assert site.coordinator.seq == 2, "nothing was written"

    asyncio.run(main())


@real
async def test_bad_bodies_are_refused(site: Site) -> None:
    for body in (b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000):
        status, answer = await site.ask("POST", "/v1/tasks", body)
        assert status in (400, 422), body
        assert answer["detail"]
        assert "\n" not in answer["detail"]
    await site.refused(413, "POST", "/v1/tasks", b" " * (2 << 20))
    await site.refused(400, "POST", "/v1/tasks", JOB, Idempotency_Key="no spaces")
    await site.refused(
        400,
        "POST",
        "/v1/tasks/3/cancel",
        {"raeson": "a typo"},
    )
    await site.refused(404, "GET", "/v1/nothing")
    await site.refused(405, "GET", "/v1/freeze")
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert (
            "Content-Type: application/json"
            in (await site.refusal(415, "POST", "/v1/freeze", {}, Content_Type=kind))[1]
        )
    await site.refused(400, "GET", "/v1/log?after=-1")
    assert "beyond the log" in await site.refused(404, "GET", "/v1/log?after=999999")
    await site.refused(400, "GET", "/v1/log?after=x")
    await site.refused(400, "GET", "/v1/log?follow=2")
    assert site.coordinator.seq == 2


@real
async def test_the_log_is_streamed(site: Site) -> None:
    await site.ask("POST", "/v1/tasks", JOB)
    headers = {"Authorization": "Bearer secret"}
    async with site.client.get(site.url + "/v1/log?after=1", headers=headers) as reply:
        lines = [json.loads(line) async for line in reply.content]
    records = [codec.from_plain(line) for line in lines]
    assert records == await site.log.read(after=1, num_max=99)
    async with site.client.get(site.url + "/v1/log?after=0&follow=1", headers=headers) as reply:
        seqs = [json.loads(await reply.content.readline())["seq"] for _ in records]
        write = asyncio.create_task(site.ask("POST", "/v1/tasks", TWO))
        while seqs[-1] < (await site.log.last_seq()) or not write.done():
            seqs.append(json.loads(await reply.content.readline())["seq"])
            await asyncio.sleep(0.01)
        assert seqs == list(range(1, len(seqs) + 1))


@real
async def test_an_agent_joins(site: Site) -> None:
    body = {"node": "n1", "host": "127.0.0.1", "incarnation": 7}
    answer = (await site.ask("POST", "/v1/join", body))[1]
    password = IDENTITIES.password("n1", 7)
    assert answer == {
        "redis_url": f"unix://unicron%3Atest%3An1:{password}@/run/x",
        "cluster": "test",
        "cluster_id": "",
        "node": "n1",
        "epoch": 1,
        "key": IDENTITIES.key("n1").hex(),
        "redact": list(REDACT),
        "agent_gone_s_max": 60.0,
        "has_lists": True,
        "output_bytes_max": OUTPUT_BYTES_MAX,
        "rank_pids_max": 0,
        "rank_memory_bytes_max": 0,
        "version": __version__,
    }
    for name in ("No Name", "operator", "leader"):
        await site.refused(400, "POST", "/v1/join", body | {"node": name})
    assert "incarnation" in await site.refused(400, "POST", "/v1/join", {"node": "n1", "host": ""})
    assert (await site.ask("POST", "/v1/join", body | {"labels": {"rack": "r1"}}))[0] == 200
    for wrong in ({"rack": "r 1"}, {"rack": ""}, {"zone": "a"}, {"rack": 1}):
        assert "abels" in await site.refused(400, "POST", "/v1/join", body | {"labels": wrong})
    await site.tell(N1)
    assert "newer agent" in await site.refused(409, "POST", "/v1/join", body)


@real
async def test_an_unreachable_log_is_503(site: Site) -> None:
    site.log.fault = lambda call: "unavailable"
    assert await site.refused(503, "POST", "/v1/tasks", JOB, Idempotency_Key="k")
    assert "cannot be reached" in await site.refused(503, "GET", "/v1/state")
    async with site.client.get(site.url + "/v1/health") as reply:
        assert reply.status == 200
    site.log.fault = lambda call: "done"
    while (await site.ask("GET", "/v1/state"))[0] != 200:
        await asyncio.sleep(0.05)
    _, answer = await site.ask("POST", "/v1/tasks", JOB, Idempotency_Key="k")
    written = [r for r in await site.log.read(after=0, num_max=99) if r.kind == "TaskSubmitted"]
    assert [r.seq for r in written] == [answer["seq"]], "sent twice, written once"


@real
async def test_a_host_header_with_another_name_is_refused(site: Site) -> None:
    """A page in a browser must not reach the port by a name of its own (DNS rebinding)."""
    own = socket.gethostname()
    for host in (
        "localhost",
        "LocalHost:1",
        own,
        f"{own}:80",
        "127.0.0.1",
        "10.1.2.3:99",
        "[::1]",
        "[fd00::1]:8420",
    ):
        assert (await site.ask("GET", "/v1/health", Host=host))[0] == 200, host
    for host in (
        "evil.example",
        "evil.example:8420",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "x[::1]",
        "[evil]",
        "[::1",
        ":80",
        "a:b:c",
        "....",
        "1.2.3",
        "1.2.3.4.5",
        "0x7f000001",
        "[a:b]",
        "[::1%eth0]",
        "[127.0.0.1]:x",
        "localhost:@evil.com",
        "localhost:80@evil.com",
        "u@localhost",
        "localhost/",
        "localhost:123456",
        "",
        " ",
    ):
        for path in ("/v1/health", "/v1/state", "/none"):
            words, hint = await site.refusal(421, "GET", path, Host=host)
            assert (words, "--advertise NAME" in hint) == (
                "the Host header names another host",
                True,
            ), host


@real
async def test_the_history_is_of_whole_days(site: Site) -> None:
    await site.tell(N1)
    task = (await site.ask("POST", "/v1/tasks", COMMAND))[1]["task"]
    await site.tell(RankStarted(task=task, rank=0, attempt=1, node="n1", pid=7, log_path="/log"))
    await asyncio.sleep(0.05)
    await site.ask("POST", "/v1/freeze", {"reason": "look"})
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    status, answer = await site.ask("GET", "/v1/history")
    assert status == 200
    assert answer["days"][-1]["day"] == today
    total = answer["total"]
    assert total["records"] == site.coordinator.seq
    assert total["used_slot_s"] > 0.04
    assert total["idle_slot_s"] > 0.04
    assert total["slot_s"] == pytest.approx(
        total["used_slot_s"] + total["idle_slot_s"] + sum(total["lost_slot_s"].values())
    )
    assert (total["faults"], total["mtbf_slot_s"]) == (0, None)
    _, answer = await site.ask("GET", f"/v1/history?since={today}")
    assert [one["day"] for one in answer["days"]] == [today]


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("since=2999-01-01", "is in the future"),
        ("since=yesterday", "is not a time"),
        ("since=%00", "is not a time"),
    ],
)
def test_a_history_that_cannot_be_is_refused(query: str, why: str) -> None:
    @real
    async def test(site: Site) -> None:
        message, hint = await site.refusal(400, "GET", f"/v1/history?{query}")
        assert why in message
        assert hint

    test()
