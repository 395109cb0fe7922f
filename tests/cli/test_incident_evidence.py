"""What an incident's page says of its evidence: late pieces, equal ones, since when it lasted."""

from __future__ import annotations

from typing import Any

import hung_commands as command
import pytest
from decider import Driver, failed, spec
from device_errors import alone, erred, four, health
from hangs import deadline, hung
from slow_iterations import crawls, waited_for
from snapshots import check
from stragglers import VICTIM, known, paced
from two_tasks import carry_out, facts, gives
from unicron.cli.screens.incident import page
from unicron.control_plane.history.history import history
from unicron.control_plane.state.incident import NUM_EVIDENCE_MAX

Plain = dict[str, Any]


def evidence(told: Plain) -> list[str]:
    """The page's lines of evidence, each in one piece."""
    found: list[str] = []
    for line in page(told)[3:]:
        if line.startswith(("evidence", "began")) or (found and line.startswith(" " * 11)):
            text = line.strip()
            found = ([*found[:-1], f"{found[-1]} {text}"] if line.startswith(" ") else
                     [*found, " ".join(text.split())])
        elif found:
            break
    return found


def phases(told: Plain) -> dict[str, tuple[str, float]]:
    return {x["name"]: (x["bound"], x["length_s"]) for x in told["phases"]}


# --- what came late, or again ---------------------------------------------------------------------
def test_a_collective_that_fails_later_is_counted() -> None:
    told = facts(gives()[0].log)
    assert [x["later"] for x in told["evidence"]] == [False, False, True]
    assert evidence(told)[1].startswith("evidence n1: 2 x CollectiveFailed rank 0.1 iteration 1:")
    assert evidence(told)[1].endswith("; 1 later)")


def test_a_device_that_errs_on_is_counted_also_after_the_incident() -> None:
    d = Driver(nodes=3, slots=2)
    task = four(d)
    first = erred(d)
    nvml = erred(d, origin="nvml", rule="nvml-xid", text="XID 79")
    d.obey(alone(d, first))
    d.progress(task)
    more = [erred(d, text=f"again, {at}")[0].seq for at in range(5)]
    told = facts(d.log)
    assert told["outcome"] == "healed"
    assert [x["seq"] for x in told["evidence"]] == [first[0].seq, nvml[0].seq, *more]
    (kernel, driver) = evidence(told)
    assert kernel.startswith("evidence n2: 6 x DeviceErred n2/0 GPU driver errors (xid-79): ")
    assert kernel.endswith(f"(seq {first[0].seq} to {more[-1]}; 5 later)")
    assert driver.endswith(f"(seq {nvml[0].seq})")
    rows = [line for line in page(told) if " DeviceErred " in line and "evidence" not in line]
    assert len(rows) == 3, "those next to each other have one line of the timeline"
    assert " 5 x DeviceErred " in rows[-1]


def test_so_many_are_kept_and_the_page_says_so() -> None:
    d = Driver(nodes=3, slots=2)
    task = four(d)
    d.obey(alone(d, erred(d)))
    d.progress(task)
    for _ in range(NUM_EVIDENCE_MAX + 20):
        erred(d)
    told = facts(d.log)
    assert len(told["evidence"]) == NUM_EVIDENCE_MAX
    assert "there may be more: so many (256) are kept" in " ".join(evidence(told))


def test_an_incident_that_the_state_has_forgotten_has_all_its_evidence() -> None:
    d = gives()[0]
    told = history(d.log)
    (one,) = told.incidents.values()
    del told.state.incidents[one.id]
    assert len(one.incident.evidence) == len(one.evidence) + 1


# --- since when -----------------------------------------------------------------------------------
def test_a_hang_began_after_the_last_mark() -> None:
    d = Driver()
    task = d.running()
    d.now_s += 10
    hung(d, task, VICTIM)
    carry_out(d, d.due(deadline(d, task)))
    told = facts(d.log)
    found = phases(told)
    names = [x["name"] for x in told["phases"]]
    assert names[:3] == ["detect", "stood", "decide"]
    assert found["detect"][0] == "at most"
    assert 1.5 < found["detect"][1] < 1.7
    assert found["decide"] == ("", pytest.approx(0.0, abs=1e-6))
    began, waits, own, late = evidence(told)
    assert began == ("began after the last sign of rank 2, 1.6 s before the report; the exact "
                     "time is not known")
    assert waits.startswith("evidence n1 n2: 3 x RankStalled rank 0.1 ")
    assert " RankStalled rank 2.1 " in own
    assert " x " not in own
    assert "DeadlineReached hang/" in late
    check("incident-hang", page(told), columns_max=100)


def test_one_that_works_on_and_on_began_within_its_iteration() -> None:
    d = Driver()
    task = d.running()
    waited_for(d, task)
    d.now_s += 5
    crawls(d, task, VICTIM, 6.4)
    carry_out(d, d.due(deadline(d, task)))
    told = facts(d.log)
    bound, length_s = phases(told)["detect"]
    assert (bound, length_s) == ("at most", pytest.approx(6.5 - 5.0, abs=0.05))
    assert evidence(told)[0].startswith("began after that iteration began, 1.5 s")
    assert "stood" in phases(told)


def test_a_command_began_to_hang_after_its_last_line() -> None:
    d = Driver(nodes=3)
    task = command.running(d)
    command.stalled(d, task)
    (due,) = command.deadlines(d)
    d.due(due)
    told = facts(d.log)
    assert phases(told)["detect"] == ("at most", pytest.approx(61.0, abs=0.1))
    assert phases(told)["stood"][1] == pytest.approx(command.AFTER_S - 61.0, abs=0.1)
    assert evidence(told)[0].startswith("began after the last sign of rank 3, 61 s before")


def test_a_slow_rank_was_slow_before_it_was_told() -> None:
    d = Driver()
    task = d.running()
    known(d, task)
    for rank in (VICTIM, 0):
        paced(d, task, rank, 4.0 if rank == VICTIM else 1.0, iteration_s=4.1)
    told = facts(d.log)
    bound, length_s = phases(told)["detect"]
    assert bound == "at least"
    assert length_s >= 4.1
    assert evidence(told)[0].startswith("began not known: of the last ")


@pytest.mark.parametrize("error", ["Connection closed by peer", "Timed out waiting 600000ms"])
def test_a_timeout_of_a_collective_says_nothing_of_when_it_began(error: str) -> None:
    d = Driver()
    task = d.running()
    failed(d, task, 0, error)
    d.now_s += 2
    d.obey(d.due(f"evidence/{task}/1"))
    told = facts(d.log)
    late = "Timed" in error
    assert ("detect" in phases(told)) == (not late)
    assert [x for x in evidence(told) if x.startswith("began")] == [
        "began not known: a collective waited until its timeout, for what had happened before"
    ] * late


def test_what_is_only_overdue_has_no_begin() -> None:
    d = Driver()
    task = d.submit(spec())
    carry_out(d, d.due(f"start/{task}/0/1"))
    told = facts(d.log)
    assert "detect" not in phases(told)
    assert evidence(told)[0] == ("began not known: only a missed deadline shows it")


def test_a_check_runs_from_time_to_time() -> None:
    d = Driver(nodes=3, slots=2)
    four(d)
    d.obey(health(d, "n2", "unhealthy", devices=(0,), status="ECC errors"))
    d.due(next(x for x in d.state.deadlines if x.startswith("device/")))
    told = facts(d.log)
    assert "detect" not in phases(told)
    assert evidence(told)[0].startswith("began not known: before its check ran")


def test_an_exit_is_told_to_the_moment() -> None:
    d = Driver()
    task = d.running()
    carry_out(d, d.exit(task, 2))
    told = facts(d.log)
    assert phases(told)["detect"][0] == ""
    assert told["began"]["why"] == ""
