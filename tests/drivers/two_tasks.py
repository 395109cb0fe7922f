"""Two tasks on three nodes, and the loss of a node of one task, for tests of screens."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from decider import Driver, failed, spec
from unicron.cli.commands.replay import pick
from unicron.control_plane.api import dry_run, incident_facts
from unicron.control_plane.api.view import view
from unicron.control_plane.decide.replay import replay
from unicron.control_plane.history.history import history
from unicron.control_plane.history.incident_records import incident_records
from unicron.control_plane.state.cluster import encode_state
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.codec import to_plain
from unicron.events.records.envelope import Record

Plain = dict[str, Any]
VERSION = 15
"""The decider's version in the stored screens."""


def carry_out(d: Driver, records: list[Record]) -> None:
    """Carry out orders and what follows, as far as their processes still exist."""
    todo = list(records)
    while todo:
        record = todo.pop(0)
        try:
            new = d.do(record.body)
        except KeyError:
            new = []
        if isinstance(record.body, o.Resume):
            new = d.progress(record.body.task)
        todo += new


def train(name: str, weight: float, throughput: dict[int, float], **changes: Any) -> Any:
    return spec(
        name=name,
        weight=weight,
        throughput=throughput,
        train={"iterations": 50, "output": f"/srv/{name}", "batch": {"global": 24, "micro": 2}},
        **changes,
    )


def two_tasks(beta: dict[int, float]) -> tuple[Driver, int, int]:
    """alpha on n1 and n2, beta on n3, both training."""
    d = Driver(nodes=3)
    first = d.submit(train("alpha", 2.0, {1: 1e12, 2: 1.9e12, 3: 2.6e12, 4: 2.7e12}))
    carry_out(d, d.log[-20:])
    second = d.submit(train("beta", 1.0, beta))
    carry_out(d, d.log[-20:])
    for task in (first, second):
        d.progress(task, 4)
    assert [len(task.target) for task in d.state.tasks.values()] == [4, 2]
    return d, first, second


def lose(d: Driver, node: str, task: int, *, silent_last: bool = False) -> None:
    """The node becomes unreachable, and collectives fail (first if `silent_last`)."""
    survivors = [m.rank for m in d.state.tasks[task].members if m.node != node]
    told: list[Record] = []
    for silent in (False, True) if silent_last else (True, False):
        if silent:
            d.now_s += 6
            told += d.tell(
                "leader/abc",
                r.NodeUnreachable(
                    node=node, incarnation=d.state.nodes[node].incarnation, silence_s=6.0
                ),
            )
        else:
            told += [record for rank in survivors for record in failed(d, task, rank)]
    carry_out(d, told)


@functools.cache
def gives() -> tuple[Driver, int, int]:
    """n2 is lost under alpha; beta gives up one of its two slots and continues. Read-only."""
    d, alpha, beta = two_tasks({1: 1.5e12, 2: 2.4e12})
    lose(d, "n2", alpha)
    assert [len(task.target) for task in d.state.tasks.values()] == [3, 1]
    return d, alpha, beta


@functools.cache
def waits() -> tuple[Driver, int, int]:
    """n2 is lost under alpha; beta gives up all its slots and waits. Read-only."""
    d, alpha, beta = two_tasks({2: 0.6e12})
    lose(d, "n2", alpha)
    return d, alpha, beta


def plain(d: Driver) -> list[Plain]:
    return [to_plain(record) for record in d.log]


def facts(log: list[Record], which: str = "", *, option: str = "") -> Plain:
    past = history(log)
    one = pick(past, which)
    assert one is not None
    found = incident_records(one, log)

    def plan_at(seq: int) -> Plain:
        at = replay(record for record in log if record.seq <= seq)
        return {
            **msgspec.to_builtins(dry_run.explain_present_plan(encode_state(at))),
            "computed_by": VERSION,
        }

    return {
        **incident_facts.facts_of(past, found, view(past.state), now_s=past.at_s, option=option),
        **incident_facts.waits_of(past, found, plan_at),
        "verify": f"unicron replay log.jsonl --until {one.closed_seq or past.seq} --verify",
    }


def seen(d: Driver, after_s: float = 0.0) -> Plain:
    state_view = view(d.state, explain=True, now_s=d.now_s + after_s)
    state_view["cluster"]["hash"] = "unicron-state-2:0123456789abcdef"
    state_view["cluster"]["computed_by"] = min(state_view["cluster"]["computed_by"], VERSION)
    return state_view
