"""The control plane's part of a generation: fold and decide of all its reports, timed.

The real decider, with agents and ranks that answer at once.
"""

from __future__ import annotations

import gc
import time
from typing import Any, NamedTuple

import decider
from decider import kinds, spec
from unicron.control_plane.decide.advance import advance
from unicron.events.records import codec
from unicron.events.records import orders as o
from unicron.events.records import types as t
from unicron.events.records.envelope import Record, Report

TP, PP, SLOTS = 8, 4, 8


class Cluster(decider.Driver):
    """A cluster whose decider is timed, without the checks of its tests."""

    busy_s = 0.0

    def tell(self, source: str, body: t.Body, *, epoch: int = 0) -> list[Record]:
        """Fold and decide the report; adds its CPU time to `busy_s`."""
        self.now_s += 1e-4
        self.seqs[source] = seq = self.seqs.get(source, 0) + 1
        report = Report(source=source, source_seq=seq, occurred_s=self.now_s, body=body)
        began_s = time.process_time()
        records = advance(self.state, report, epoch=epoch or self.epoch, at_s=self.now_s)
        self.busy_s += time.process_time() - began_s
        return records

    def do(self, order: t.Body) -> list[Record]:
        """Carry out an order. Members that are to stop report a failed collective before."""
        if isinstance(order, o.Quiesce) and order.mode == "now":
            return [
                record for rank in order.ranks for record in decider.failed(self, order.task, rank)
            ]
        return super().do(order)


def job(num_ranks: int, pipeline: tuple[int, ...] = (PP,)) -> dict[str, Any]:
    """The changes of the spec for this many ranks."""
    batch = num_ranks // (TP * min(pipeline)) * 8
    return {
        "slots": {"min": TP * PP, "max": num_ranks},
        "train": {
            "iterations": 50,
            "output": "/tmp/out",
            "batch": {"global": batch, "micro": 1},
            "model": {"num_layers": 48, "hidden": 4096, "num_heads": 32, "sequence": 2048},
            "parallel": {"tensor": [TP], "pipeline": list(pipeline)},
        },
    }


class Transition(NamedTuple):
    """`cpu_s`: of the decider. `order_bytes`: what a rank is told of all members, by the order
    Reconfigure."""

    cpu_s: float
    order_bytes: int


def transition(num_ranks: int) -> Transition:
    """From the end of a rank until all train again: the others without it, then with its next
    process. That is two generations."""
    cluster = Cluster(nodes=num_ranks // SLOTS, slots=SLOTS)
    name = "operator/submits"
    submitted = cluster.tell(name, decider.r.TaskSubmitted(spec=spec(**job(num_ranks))))
    cluster.obey(submitted)
    task = cluster.state.tasks[submitted[0].seq]
    assert (task.phase, len(task.members)) == ("training", num_ranks), task.phase
    cluster.progress(task.id)
    gc.collect()
    cluster.busy_s = 0.0
    told = cluster.exit(task.id, num_ranks // 2)
    told += cluster.obey(told)
    assert task.phase == "training", task.phase
    assert len(task.members) == num_ranks, "the rank has joined again"
    assert any(isinstance(record.body, o.Resume) for record in told), kinds(told)
    order = next(record.body for record in told if isinstance(record.body, o.Reconfigure))
    return Transition(cluster.busy_s, len(codec.encode_body(order)[2]))
