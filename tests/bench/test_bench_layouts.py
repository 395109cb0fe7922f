"""The bench's cases of layouts: what moved is read off the log, and the least is added up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from bench.recovery import environment, job, layouts, main, moved
from bench.recovery.moved import Change, change, in_words, lacking_bytes, least_bytes
from bench.recovery.rows import Row
from bench.recovery.unicron import Unicron
from unicron.events.spec.job import parse

TP2DP2 = {"tp": 2, "pp": 1, "dp": 2, "chunks": 1}
TP2 = TP2DP2 | {"dp": 1}
DP4, DP3 = ({"tp": 1, "pp": 1, "dp": dp, "chunks": 1} for dp in (4, 3))


def record(kind: str, generation: int, **body: Any) -> moved.Record:
    return {"seq": 0, "kind": kind, "body": {"task": 1, "generation": generation, **body}}


def order(generation: int, ranks: list[int], axes: moved.Axes | None,
          again: int = -1) -> moved.Record:
    """`again` is in a new process."""
    return record("Reconfigure", generation, axes=axes, members=[
        {"rank": rank, "node": "n1", "attempt": 1 + (rank == again)} for rank in ranks])


def told(generation: int, rank: int, taken: dict[int, int], settle_s: float = 0.1, *,
         origin: str = "peer", received_bytes: int = 0, todo: tuple[int, ...] = ()
         ) -> moved.Record:
    return record("Reconfigured", generation, rank=rank, origin=origin, settle_s=settle_s,
                  received_bytes=received_bytes, kept=[], todo=list(todo),
                  taken=[{"rank": giver, "node": "n1", "taken_bytes": taken_bytes}
                         for giver, taken_bytes in taken.items()])


def test_what_moved_is_what_members_took_from_others() -> None:
    records = [
        order(1, [0, 1, 2, 3], TP2DP2), record("Resume", 1),
        # 2 is gone; the generation after that never trains. 3 is beside the third, and gives.
        order(2, [0, 1, 3], TP2), order(3, [1, 0, 3], TP2), record("Resume", 3),
        told(3, 1, {1: 500, 3: 40}), told(3, 0, {}, 0.3, origin="own"), told(3, 3, {}),
        order(4, [1, 0, 3, 2], TP2DP2, 2), told(4, 1, {}), told(4, 3, {1: 100}),
        told(4, 2, {0: 70}), told(4, 0, {}),
    ]
    assert change(records, 3) == Change(TP2DP2, TP2, (1, 0), 40, 0.3)
    # What 3 still had of the second generation is older than what the others have.
    assert change(records, 4) == Change(TP2, TP2DP2, (0, 1, None, None), 170, 0.1)
    assert in_words(TP2) == "TP2xDP1"


def test_who_is_back_before_the_others_have_settled_has_nothing() -> None:
    records = [order(1, [0, 1, 2, 3], TP2DP2), record("Resume", 1),
               order(2, [0, 1, 2, 3], TP2DP2, 2), told(2, 0, {}), told(2, 1, {}),
               told(2, 2, {0: 70}), told(2, 3, {})]
    assert change(records, 2) == Change(TP2DP2, TP2DP2, (0, 1, None, 3), 70, 0.1)


def test_who_is_set_back_has_nothing_that_counts() -> None:
    records = [
        order(1, [0, 1, 2, 3], None), record("Resume", 1), order(2, [0, 1, 3], DP3),
        told(2, 0, {0: 10}, origin="copy", received_bytes=600), told(2, 1, {0: 300}, origin="seed"),
        told(2, 3, {0: 300}, origin="seed"),
    ]
    assert change(records, 2) == Change(DP4, DP3, (None, None, None), 1200, 0.1)


def test_the_least_is_what_a_member_has_not_itself() -> None:
    own = [["model.a", "float32 4x6", [0, 0], [2, 6]], ["model.a", "float32 4x6", [2, 0], [1, 3]]]
    wanted = [["model.a", "float32 4x6", [1, 2], [3, 2]], ["model.b", "bfloat16 5", [0], [5]],
              ["model.c", "float32 ", [], []]]
    # Of the six of a, row 1 is there and of row 2 its first column.
    assert lacking_bytes(wanted, own) == 4 * 3 + 2 * 5 + 4
    assert lacking_bytes(wanted, wanted) == 0
    assert lacking_bytes(own, []) == 4 * 15


def test_a_built_layout_says_what_each_member_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    spec = job.spec("bench", Path("/tmp/out"), parallel={"tensor": [2]})
    shrink = Change(TP2DP2, TP2, (0, 1), 0, 0.0)
    grow = Change(TP2, TP2DP2, (0, 1, None, None), 0, 0.0)
    crossed = Change(TP2DP2, TP2, (3, None), 0, 0.0)
    none, both, other = least_bytes(spec, [shrink, grow, crossed])
    (first, second, *_), = moved.parts_of(spec, [TP2DP2])
    each = [lacking_bytes(part["pieces"], ()) for part in (first, second)]
    assert none == 0
    assert both == sum(each)
    # Parameters and two moments, all fp32; its gradients are no state.
    assert each[0] == 3 * first["param_bytes"] == 3 * first["gradient_bytes"]
    assert first["optimizer_bytes"] == 2 * first["param_bytes"]
    # One crosses over from the second part to the first: layer norms and biases are in both.
    assert each[1] < other < sum(each)


def line(t: float, rank: int, event: str, generation: int) -> dict[str, Any]:
    return {"t": t, "rank": rank, "pid": 100 + rank, "event": event, "iteration": 0,
            "generation": generation}


def test_a_pause_is_from_step_to_step_less_the_micro_batches() -> None:
    lines = [line(9.0, 0, "done", 2), line(9.1, 1, "done", 2),
             line(9.9, 0, "micro_batch", 3), line(10.4, 0, "reduce", 3),
             line(9.8, 1, "micro_batch", 3), line(10.0, 1, "micro_batch", 3),
             line(10.5, 1, "reduce", 3), line(10.6, 1, "done", 3), line(10.7, 0, "done", 3),
             line(10.8, 0, "micro_batch", 3), line(10.9, 0, "reduce", 3), line(11, 0, "done", 3)]
    assert layouts.pause(lines, 3) == pytest.approx(1.5 - 0.7)
    assert layouts.pause(lines, 4) is None
    assert layouts.pause(lines, 2) is None


def test_a_change_of_shape_is_weighed_against_one_of_replicas_there_and_back() -> None:
    stood_s = {"pp2dp2_sigkill": (0.5, 0.4), "tp2dp2_sigkill": (0.2, 0.4)}
    rows = [Row(case, "unicron", metric, value, "s", 3) for case, both in stood_s.items()
            for metric, value in zip(("fault_to_resume_s", "grow_pause_s"), both, strict=True)]
    (found,) = layouts.reshaped(rows)
    assert found.value == pytest.approx(1.5)
    assert layouts.reshaped(rows[:-1]) == []


def test_each_kind_of_task_has_so_many_replicas_on_four_ranks() -> None:
    assert tuple(layouts.CASES) == main.LAYOUTS
    for kinds in layouts.CASES.values():
        for kind in kinds.values():
            spec = job.spec("bench", Path("/tmp/out"), size=kind.size,
                                     parallel=kind.parallel, copy_every=kind.copy_every)
            train = parse(spec).train
            assert train is not None
            for num_ranks in (3, 4):
                slots = num_ranks - (num_ranks % 2 if kind.parallel.get("tensor") else 0)
                assert list(train.parallel.layouts(slots, train.num_micro_batches))
            assert [axes.dp for axes in train.parallel.layouts(4, train.num_micro_batches)] == [
                kind.num_replicas]


def test_a_batch_is_whole_when_each_replica_has_its_part_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Unicron(tmp_path / "unicron", parallel={"tensor": [2]})
    made.task = 1
    half = job.NUM_MICRO_BATCHES // 2
    parts = [tuple(range(half)), tuple(range(half, 2 * half))]
    made.records = [order(1, [0, 1, 2, 3], TP2DP2),
                    *(told(1, rank, {}, todo=parts[rank // 2]) for rank in range(4))]
    monkeypatch.setattr(made, "look", lambda: made.records)
    step: dict[str, Any] = {"generation": 1}
    assert made.whole_batch(step) is True
    made.records[-1]["body"]["todo"].pop()
    assert made.whole_batch(step) is False
