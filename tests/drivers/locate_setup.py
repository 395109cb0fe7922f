"""Where a hang is (workers/diagnosis/hang_locator.py): real dumps, jobs on paper, every shape,
wrong input."""

from __future__ import annotations

from typing import Any

from hung_job import Job, Layout

Dumped = dict[int, dict[str, Any]]


def hung(layout: Layout, stopped: dict[int, int], window: int = 1, *, only_active: bool = False,
         with_status: bool = True) -> Dumped:
    job = Job(layout, stopped, window)
    job.run()
    return {rank: job.dump(rank, only_active=only_active, with_status=with_status)
            for rank in range(layout.num_ranks)}
