"""At a stall the agent asks a task's ranks for their dumps: once, and whatever comes of it."""

from __future__ import annotations

from pathlib import Path

from unicron.events.records.reports import RankStalled, RankUnstalled
from unicron.workers.agent.monitoring.flight_recorder_dumps import (
    DUMP_INTERVAL_S,
    Dumps,
    DumpTrigger,
)


def stalled(task: int, rank: int = 0) -> RankStalled:
    return RankStalled(task=task, rank=rank, attempt=1, generation=1, iteration=3, where="own",
                       what="backward", collective=0, in_s=2.0, normal_s=0.5)


def test_once_for_all_ranks_of_a_task_and_again_after_a_minute(tmp_path: Path) -> None:
    asked: list[int] = []
    now_s = [100.0]

    def dump(task: int) -> Dumps:
        asked.append(task)
        if task == 8:
            raise PermissionError("read only")
        return {0: tmp_path / "flight-rank-0.json"}

    asker = DumpTrigger(dump, lambda: now_s[0])
    asker.on_report(
        RankUnstalled(task=7, rank=0, attempt=1, generation=1, iteration=3, stalled_s=1.0)
    )
    assert asked == []
    for rank in range(3):
        asker.on_report(stalled(7, rank))
    asker.on_report(stalled(8))
    assert asked == [7, 8]
    now_s[0] += DUMP_INTERVAL_S
    asker.on_report(stalled(7))
    assert asked == [7, 8, 7]
