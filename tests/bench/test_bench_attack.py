"""`make attack`: how a case is judged and told; the victim and the hostile node are real."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.attack import main
from bench.attack.nodes import with_ratio
from bench.attack.stage import Outcome, Victim, cannot, cluster_for, judged
from bench.recovery.rows import Row
from hostile_node import HostileNode
from unicron.events.records.reports import ReportsLost


def test_a_break_a_late_healing_and_an_exception_are_no_hold() -> None:
    assert judged([], "all").held
    assert judged(["it ended"], "all") == Outcome(False, "it ended")
    assert with_ratio([], "all", [(0.1, 0.2), (0.1, 0.29)]).held
    assert with_ratio([], "all", [(0.1, 0.31)]).how == "healing takes 3.1 times as long, goal 3"
    assert with_ratio([], "all", [(0.1, 60.0)]).how == "not healed within 60 s"

    def breaks(num_pairs: int) -> Outcome:
        raise KeyError("planted")

    assert not main.tried(main.Case("planted", breaks), 1).held


def test_what_cannot_be_tried_counts_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (held,) = main.rows_of("S2", cannot("no C compiler"))
    assert (held.value, held.n, held.note) == (None, 0, "no C compiler")
    rows = [held, *main.rows_of("S1", Outcome(False, "it ended", [(0.1, 0.4), (0.2, 0.2)]))]
    assert [(one.metric, one.value) for one in rows[1:]] == [
        ("held", 0),
        ("healing_ratio", 2.5),
        ("calm_s", pytest.approx(0.15)),
        ("attacked_s", pytest.approx(0.3)),
    ]
    text = main.table(rows, [Row("S1", "unicron", "held", 1, "", 1)])
    assert "| S1 a malformed report | held | broken, x 2.5 | it ended |" in text
    assert "| S2 a state folder of a sender | not tried | not tried | no C compiler |" in text


def test_every_finding_was_tried_before() -> None:
    assert list(main.CASES) == [f"S{number}" for number in range(1, 20)]
    lines = main.table([]).splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["not tried"] * 19
    before = [line.split(" | ")[1].partition(",")[0] for line in lines]
    assert (before.count("held"), before.count("broken")) == (4, 15)


def test_a_killed_victim_is_timed_and_a_hostile_node_is_heard(tmp_path: Path) -> None:
    with cluster_for(folder=tmp_path) as cluster:
        victim = Victim(cluster)
        for num in (1, 2):
            assert victim.num_starts == num
            assert 0.0 < victim.heal() < 30.0
        with HostileNode(cluster.client(), "evil") as evil:
            evil.join()
            evil.push([evil.signed(evil.next(ReportsLost(node="evil", num_lost=5)))])
            evil.wait_acked()
        assert cluster.told(0, "ReportsLost", node="evil", num_lost=5)
