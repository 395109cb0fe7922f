"""Root causes: reports of devices, ranks and peers are joined to one cause."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, failed, kinds, only, spec, task_of, the
from device_errors import alone, erred, four, health
from unicron.control_plane.fold.node_health import RECOVERED_S
from unicron.events.records import decisions, reports, statuses
from unicron.events.records import orders as o
from unicron.events.records import types as t
from unicron.events.records.envelope import Record

pytestmark = pytest.mark.nodes(3)

CLOSED = "RuntimeError: Connection closed by peer [10.0.0.2]:41022"


@pytest.fixture
def task(d: Driver) -> int:
    return four(d)


def errored(
    d: Driver, task: int, rank: int, text: str, *, status: str = "", second_hand: bool = False
) -> list[Record]:
    process, it = task_of(d, task).ranks[rank], task_of(d, task)
    return d.tell(
        d.source(process.slot.node),
        reports.RankErrored(
            task=task,
            rank=rank,
            attempt=process.attempt,
            generation=it.generation,
            iteration=it.iteration,
            error="RuntimeError",
            text=text,
            status=status,
            rule="a rule",
            second_hand=second_hand,
        ),
    )


def rank_on(d: Driver, task: int, node: str, slot: int = 0) -> int:
    """The task's rank on this slot."""
    (found,) = (x.rank for x in task_of(d, task).ranks.values() if x.slot == t.Slot(node, slot))
    return found


def incident(d: Driver) -> Any:
    (found,) = d.state.incidents.values()
    return found


# --- severity by status ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "severity"),
    [
        (statuses.ECC_ERRORS, "SEV1"),
        (statuses.CUDA_ERRORS, "SEV2"),
        (statuses.NCCL_TIMEOUT, "SEV2"),
        ("", "SEV2"),
        ("no such row", "SEV2"),
    ],
)
def test_an_error_has_the_severity_of_its_status(
    d: Driver, task: int, status: str, severity: str
) -> None:
    records = errored(d, task, 0, "it broke", status=status)
    opened = the(decisions.IncidentOpened, records)
    assert (opened.severity, opened.ranks) == (severity, (0,))
    assert opened.status == (
        status if status and status != "no such row" else "other software errors"
    )
    assert not d.state.nodes["n1"].slots_disabled, "no device error says so"
    assert bool(d.state.nodes["n1"].slots_suspected) == (severity == "SEV1")
    d.obey([*d.exit(task, 0, code=1), *records])


def test_an_exit_has_the_status_of_its_cause(d: Driver, task: int) -> None:
    process = task_of(d, task).ranks[0]
    records = d.tell(
        d.source("n1"),
        reports.RankExited(
            task=task,
            rank=0,
            attempt=process.attempt,
            pid=process.pid,
            exit_code=None,
            signal=9,
            status=statuses.ECC_ERRORS,
            rule="ecc",
            cause="uncorrectable ECC error encountered",
        ),
    )
    opened = the(decisions.IncidentOpened, records)
    assert (opened.severity, opened.status) == ("SEV1", "ECC errors")
    assert opened.why == "rank 0 on n1: signal 9 (SIGKILL): uncorrectable ECC error encountered"
    d.obey(records)


# --- indirect evidence ------------------------------------------------------------------------
def test_indirect_evidence_is_not_the_cause(d: Driver, task: int) -> None:
    """Indirect evidence comes first. The later cause becomes the status of the incident."""
    first = errored(d, task, 1, CLOSED, status=statuses.CONNECTION_RESET, second_hand=True)
    assert the(decisions.IncidentOpened, first).ranks == (1,)
    assert incident(d).second_hand
    records = errored(
        d,
        task,
        2,
        "CUDA error: an illegal memory access was encountered",
        status=statuses.ILLEGAL_MEMORY_ACCESS,
    )
    assert the(decisions.IncidentEscalated, records).root
    late = errored(d, task, 3, CLOSED, status=statuses.CONNECTION_RESET, second_hand=True)
    one = incident(d)
    assert (one.status, one.ranks, one.node) == ("illegal memory access", [2], "n2")
    assert one.evidence == [first[0].seq, records[0].seq, late[0].seq]
    d.obey([*first, *records, *late])
    for rank in (1, 2, 3):
        d.obey(d.exit(task, rank, code=1))
    d.heal(task)
    assert one.outcome == "healed"


def test_direct_evidence_comes_first(d: Driver, task: int) -> None:
    seen = [failed(d, task, rank, CLOSED)[0].seq for rank in (0, 1)]
    records = d.exit(task, 3)
    opened = the(decisions.IncidentOpened, records)
    assert (opened.status, opened.ranks) == ("exited abnormally", (3,))
    assert opened.evidence == (records[0].seq, *seen)
    last = failed(d, task, 2, CLOSED)
    assert incident(d).evidence[-1] == last[0].seq
    d.obey([*records, *last])


def test_a_device_error_under_a_collective_restarts_that_rank(d: Driver, task: int) -> None:
    """A new communicator does not repair a broken CUDA context."""
    it, process = task_of(d, task), task_of(d, task).ranks[2]
    records = d.tell(
        d.source("n2"),
        reports.CollectiveFailed(
            task=task,
            rank=2,
            attempt=process.attempt,
            generation=it.generation,
            iteration=3,
            error="CUDA error: an illegal memory access",
            status=statuses.ILLEGAL_MEMORY_ACCESS,
        ),
    )
    opened = the(decisions.IncidentOpened, records)
    assert (opened.severity, opened.ranks) == ("SEV2", (2,))
    assert [x.body.rank for x in only(o.StopRank, records)] == [2]
    d.obey(records)
    d.progress(task)
    assert task_of(d, task).ranks[2].attempt == 2


# --- the peer that several reports name ---------------------------------------------------------
@pytest.mark.parametrize(
    ("peers", "node"),
    [
        # ranks 0 to 3 on n1, n2, n1, n2; 4 and 5 on n3
        ({0: "n3:41022", 1: "n3:41024"}, "n3"),
        ({0: "n3", 1: "n3:41024", 4: ""}, "n3"),
        ({0: "n3:41022"}, ""),  # one report
        ({0: "n3:41022", 2: "n3:41024"}, ""),  # both from n1
        ({0: "n3:41022", 1: "n3:41024", 4: "n1:40000"}, ""),  # n3 names another
        ({0: "n3:41022", 1: "n3:41024", 4: "10.0.0.9:40000"}, ""),  # also one that is unknown
        ({0: "n3:41022", 1: "n1:41024"}, ""),  # they do not agree
        ({0: "10.0.0.2:41022", 1: "10.0.0.2:41024"}, ""),  # nobody's address
        ({0: "127.0.0.1:41022", 1: "127.0.0.1:41024"}, ""),  # everybody's address
    ],
)
def test_the_peer_that_several_nodes_name_is_the_cause(
    d: Driver, peers: dict[int, str], node: str
) -> None:
    task = d.submit(spec(slots={"min": 6, "max": 6}))
    d.obey(d.log[-20:])
    d.progress(task)
    seats: dict[str, list[int]] = {"n1": [], "n2": [], "n3": []}
    for number, rank in sorted(task_of(d, task).ranks.items()):
        seats[rank.slot.node].append(number)
    reporters = [*(seats[name][at] for at in (0, 1) for name in ("n1", "n2")), *seats["n3"]]
    named = {reporters[at]: peer for at, peer in peers.items()}
    for number in sorted(reporters):
        failed(d, task, number, CLOSED, peer=named.get(number, ""))
    d.due(next(name for name in d.state.deadlines if name.startswith("evidence/")))
    one = incident(d)
    assert one.severity == "SEV3"
    assert one.node == (node or task_of(d, task).ranks[0].slot.node)
    assert one.ranks == (seats["n3"] if node else sorted(reporters))
    assert ("several nodes name n3" in one.why) == bool(node)
    assert len(one.evidence) == len(reporters) + 1, "all reports, and the deadline"


# --- device errors ----------------------------------------------------------------------------
def test_an_xid_is_the_root_cause_of_its_ranks_error(d: Driver, task: int) -> None:
    """An XID 79, then a CUDA error of the rank, then failed collectives of its peers."""
    rank = rank_on(d, task, "n2")
    xid = erred(d)
    assert kinds(xid) == [], "the rank may still report an error"
    records = errored(
        d, task, rank, "CUDA error: unspecified launch failure", status=statuses.CUDA_ERRORS
    )
    opened = the(decisions.IncidentOpened, records)
    assert (opened.severity, opened.status, opened.node, opened.ranks) == (
        "SEV1",
        "GPU driver errors",
        "n2",
        (rank,),
    )
    assert opened.why.startswith("n2/0 GPU driver errors (xid-79): NVRM: Xid")
    assert opened.evidence == (xid[0].seq, records[0].seq)
    assert d.state.nodes["n2"].slots_disabled == [0]
    others = [
        x
        for other in task_of(d, task).ranks
        if other != rank
        for x in failed(d, task, other, CLOSED)
    ]
    assert "device/n2/" not in " ".join(d.state.deadlines)
    d.obey([*records, *d.exit(task, rank, code=1), *others])
    d.heal(task)
    assert len(d.state.incidents) == 1
    assert incident(d).outcome == "healed"
    assert task_of(d, task).iterations_lost == 0


def test_an_xid_after_the_error_of_its_rank_escalates(d: Driver, task: int) -> None:
    rank = rank_on(d, task, "n2")
    records = errored(
        d, task, rank, "CUDA error: unspecified launch failure", status=statuses.CUDA_ERRORS
    )
    assert the(decisions.IncidentOpened, records).severity == "SEV2"
    xid = erred(d)
    more = the(decisions.IncidentEscalated, xid)
    assert (more.severity, more.status, more.ranks) == ("SEV1", "GPU driver errors", (rank,))
    assert d.state.nodes["n2"].slots_disabled == [0]
    assert incident(d).status == "GPU driver errors"
    d.obey([*records, *d.exit(task, rank, code=1), *xid])
    d.progress(task)
    assert t.Slot("n2", 0) not in [x.slot for x in task_of(d, task).ranks.values()]
    assert not task_of(d, task).blamed_slots, "the device error disabled the slot"


def test_a_fault_of_another_slot_is_separate(d: Driver, task: int) -> None:
    erred(d)
    records = d.exit(task, rank_on(d, task, "n2", 1))
    assert the(decisions.IncidentOpened, records).severity == "SEV2"
    d.obey(records)


def test_a_pid_names_the_slot(d: Driver, task: int) -> None:
    rank = rank_on(d, task, "n2", 1)
    erred(d, devices=(), pid=task_of(d, task).ranks[rank].pid)
    assert d.state.nodes["n2"].erred[0].devices == (1,)


def test_a_rank_that_continues_leaves_its_slot_without_loss(d: Driver, task: int) -> None:
    records = alone(d, erred(d))
    opened = the(decisions.IncidentOpened, records)
    assert (opened.task, opened.node, opened.severity, opened.ranks) == (0, "n2", "SEV1", ())
    assert "no rank failed of it, slot 0 shall be left" in opened.why
    assert "StopRank" not in kinds(records)
    new = d.obey(records)
    assert [x.body.mode for x in only(o.Quiesce, new)] == ["boundary"]
    d.progress(task)
    it = task_of(d, task)
    assert t.Slot("n2", 0) not in [x.slot for x in it.ranks.values()]
    assert len(it.ranks) == 4
    assert (it.iterations_lost, it.incident, incident(d).outcome) == (0, 0, "healed")
    again = d.join("n2", incarnation=2)
    assert d.state.nodes["n2"].slots_disabled == [], "a new agent means that the node is repaired"
    d.obey(again)


def test_a_rank_that_fails_while_it_leaves_is_the_same_fault(d: Driver, task: int) -> None:
    rank = rank_on(d, task, "n2")
    alone(d, erred(d))
    d.now_s += 5
    records = d.exit(task, rank)
    opened = the(decisions.IncidentOpened, records)
    assert (opened.severity, opened.status, opened.task) == ("SEV1", "GPU driver errors", task)
    assert len(d.state.nodes["n2"].node_faults) == 1
    d.obey(records)


def test_an_idle_slot_is_disabled_too(d: Driver) -> None:
    four(d)
    records = alone(d, erred(d, "n3", devices=(1,)))
    assert kinds(records)[:2] == ["IncidentOpened", "IncidentClosed"]
    assert d.state.nodes["n3"].slots_disabled == [1]


@pytest.mark.parametrize("status", [statuses.ILLEGAL_MEMORY_ACCESS, statuses.LINK_FLAPPING])
def test_a_device_error_below_sev1_is_only_evidence(d: Driver, task: int, status: str) -> None:
    for _ in range(50):
        assert kinds(erred(d, status=status, code=13, rule="xid-13")) == []
    assert not d.state.deadlines
    assert not d.state.undecided
    assert len(d.state.nodes["n2"].erred) == 32
    assert kinds(d.progress(task, 5)) == []
    records = d.exit(task, rank_on(d, task, "n2"))
    assert the(decisions.IncidentOpened, records).severity == "SEV2"
    d.obey(records)


def test_an_error_without_a_device_needs_a_second_source(d: Driver, task: int) -> None:
    first = erred(d, devices=())
    assert kinds(alone(d, first)) == []
    assert kinds(d.progress(task, 3)) == []
    d.now_s += 60
    again = erred(d, devices=())
    assert kinds(alone(d, again)) == [], "the same source twice is one source"
    d.now_s += 60
    nvml = erred(d, devices=(), origin="nvml", rule="nvml-lost")
    kernel = erred(d, devices=())
    records = alone(d, nvml)
    assert set(the(decisions.IncidentOpened, records).evidence) >= {nvml[0].seq, kernel[0].seq}
    assert d.state.nodes["n2"].slots_disabled == [0, 1]
    d.obey(records)
    d.progress(task)
    assert {x.slot.node for x in task_of(d, task).ranks.values()} == {"n1", "n3"}
    assert task_of(d, task).iterations_lost == 0


def test_a_rank_is_the_second_source_only_for_its_slot(d: Driver, task: int) -> None:
    erred(d, devices=())
    records = d.exit(task, rank_on(d, task, "n2", 1))
    assert the(decisions.IncidentOpened, records).severity == "SEV1"
    assert d.state.nodes["n2"].slots_disabled == [1]
    d.obey(records)


def test_repeated_device_errors_are_one_incident(d: Driver, task: int) -> None:
    first = erred(d)
    nvml = erred(d, origin="nvml", rule="nvml-xid", text="XID 79")
    records = alone(d, first)
    assert the(decisions.IncidentOpened, records).evidence == (first[0].seq, nvml[0].seq)
    d.obey(records)
    d.progress(task)
    for _ in range(3):
        more = erred(d)
        assert kinds(more) == []
        assert more[0].seq in incident(d).evidence
    assert len(d.state.incidents) == 1
    assert not d.state.undecided


# --- checks -----------------------------------------------------------------------------------
def test_degraded_and_unknown_checks_change_no_plan(d: Driver, task: int) -> None:
    for health_ in ("degraded", "unknown", "degraded"):
        assert set(kinds(health(d, "n2", health_, devices=(0,)))) <= {"StragglerCostEstimated"}
    assert [(x.health, x.devices) for x in d.state.nodes["n2"].checks] == [("degraded", (0,))]
    health(d, "n2", "healthy", devices=(0,))
    assert not d.state.nodes["n2"].checks
    assert kinds(d.progress(task, 3)) == []


def test_an_unhealthy_device_needs_no_confirmation(d: Driver, task: int) -> None:
    records = health(d, "n2", "unhealthy", devices=(0,), status=statuses.ECC_ERRORS)
    assert kinds(records)[0] == "PlanChosen"
    d.obey(records)
    d.progress(task)
    assert t.Slot("n2", 0) not in [x.slot for x in task_of(d, task).ranks.values()]
    assert task_of(d, task).iterations_lost == 0
    late = d.due(next(x for x in d.state.deadlines if x.startswith("device/")))
    assert the(decisions.IncidentOpened, late).status == "ECC errors"
    assert incident(d).outcome == "healed"
    health(d, "n2", "healthy", devices=(0,))
    assert d.state.nodes["n2"].slots_unhealthy == [0], "a slot is not enabled at once"
    assert d.state.deadlines["recovered/n2"].length_s == RECOVERED_S
    d.obey(d.due("recovered/n2"))
    assert not d.state.nodes["n2"].slots_unhealthy


def test_a_site_check_that_fails_everywhere_disables_one_node(d: Driver, task: int) -> None:
    """At most one node is disabled without confirmation. The others show why they are not."""
    records = health(d, "n2", "unhealthy", check="check/disk", why="/data is read-only")
    d.obey(records)
    d.progress(task)
    assert {x.slot.node for x in task_of(d, task).ranks.values()} == {"n1", "n3"}
    assert not d.state.incidents, "an unconfirmed check is no incident"
    for node in ("n1", "n3"):
        assert kinds(health(d, node, "unhealthy", check="check/disk", why="exit 2")) == []
    assert d.state.nodes["n1"].unhealthy_why == (
        "not acted upon, 3 of 3 nodes say so and at most 1 is believed unconfirmed: "
        "check/disk: exit 2"
    )
    assert kinds(d.progress(task, 3)) == []
    assert task_of(d, task).iterations_lost == 0


def test_a_check_that_flaps_moves_a_task_once(d: Driver, task: int) -> None:
    for _ in range(10):
        d.obey(health(d, "n2", "unhealthy", check="check/net"))
        d.progress(task)
        d.now_s += 20
        d.obey(health(d, "n2", "healthy", check="check/net"))
        d.progress(task)
        d.now_s += 20
    assert len(only(decisions.TaskPlaced, d.log)) == 2, "the start, and one move off n2"
    assert len(only(decisions.IncidentOpened, d.log)) == 0
    d.due("recovered/n2")


def test_a_running_command_is_not_moved(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["sleep", "9"], slots={"min": 2, "max": 2}))
    d.obey(d.log[-6:])
    slot = task_of(d, task).ranks[0].slot
    node = slot.node
    records = alone(d, erred(d, node, devices=(slot.index,)))
    assert not {"StopRank", "TaskPlaced"} & set(kinds(records))
    assert incident(d).outcome == "", "open while a process runs there"
    d.now_s += 100
    d.obey(d.exit(task, 0, code=1))
    assert slot not in {x.slot for x in task_of(d, task).ranks.values()}
    assert len(task_of(d, task).ranks) == 2


def test_reports_of_an_older_agent_are_stale(d: Driver) -> None:
    four(d)
    d.obey(d.join("n3", incarnation=2))
    stale = d.tell(
        "n3/1",
        reports.DeviceErred(
            node="n3",
            incarnation=1,
            origin="kernel",
            status=statuses.ECC_ERRORS,
            rule="r",
            text="t",
        ),
    )
    assert kinds(stale) == []
    assert not d.state.nodes["n3"].erred


# --- budgets ------------------------------------------------------------------------------------
def test_a_fault_that_comes_again_at_the_same_iteration_ends(d: Driver, task: int) -> None:
    """A different rank fails each time, so that no rank uses up its own restarts."""
    for number in range(44):
        d.obey(d.exit(task, number % 4, signal=None, code=1))
        if task_of(d, task).outcome:
            break
    assert task_of(d, task).outcome == "failed"
    assert number < 2 * (d.state.policy.restarts_max + 1) + 1
