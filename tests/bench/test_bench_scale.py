"""The scale bench: its phases run on a small cluster, and its numbers are what they are called."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest
from bench.scale import main
from bench.scale.cluster import Watch
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record


@pytest.mark.parametrize(("case", "num_ranks"), [("agents_64", 2), ("agents_4096", 1)])
@pytest.mark.thorough
def test_a_trial_goes_through_all_phases(
    case: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"QUIET_S": 3.0, "SETTLE_S": 0.1, "NUM_FAULTS": 2}.items():
        monkeypatch.setattr(main, name, value)
    found = asyncio.run(main.trial(tmp_path, case, 32, num_ranks))
    waits = {"join_all_s", "decision_p99_ms", "rack_lost_s", "rack_healed_s", "rack_cpu_s"}
    assert found.keys() == main.UNITS.keys() - (waits if case in main.CPU_ONLY else set())
    assert found.pop("core_share") >= 0, "CPU time is counted in 10 ms"
    assert all(value > 0 for value in found.values()), found


def test_a_limit_of_descriptors_that_is_too_low_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (512, 1024))
    with pytest.raises(SystemExit) as ended:
        main.check_descriptors(4096)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        "bench-scale: 4096 agents need 8448 file descriptors, the limit is 1024\nhint: "
    )


def test_a_decision_takes_from_the_report_to_the_publication_of_its_order() -> None:
    watch = Watch("unix:///nowhere")
    for seq, (source, cause, body) in enumerate(
        [
            ("n1/1", 0, r.NodeLeft(node="n1", incarnation=1, reason="")),
            ("heart", 1, o.Resume(nodes=("n1",), task=1, generation=1, progress_from=0)),
            ("leader/a", 0, r.DeadlineReached(deadline="x")),
            ("heart", 3, o.Resume(nodes=("n1",), task=1, generation=1, progress_from=0)),
        ],
        1,
    ):
        watch.records.append(
            Record(
                seq=seq,
                epoch=1,
                at_s=10.0 + seq,
                occurred_s=10.0,
                source=source,
                source_seq=0,
                cause=cause,
                incident=0,
                body=body,
            )
        )
        watch.seen_s.append(20.0 + seq)
    assert main.decision_times_s(watch, 0) == [12.0], "a deadline is no report of an agent"


def test_growth_and_goals() -> None:
    found = {
        "agents_256": [{"core_share": 0.1, "join_cpu_s": 1.0}],
        "agents_1024": [{"core_share": 0.6, "join_cpu_s": 4.0}],
    }
    rows = main.rows_of(found)
    assert main.held_to(rows) == [
        "misses  agents_1024, core_share: 0.6, goal at most 0.5",
        "holds   agents_1024, join_cpu_s_growth: 2, goal at most 2.2",
        "misses  agents_1024, core_share_growth: 2.45, goal at most 2.2",
    ]
    assert main.percentile([float(value) for value in range(1, 101)], 0.99) == 99.0
