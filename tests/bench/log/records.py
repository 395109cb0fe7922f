"""The records of a cluster's life, made quickly: the real decider, and nodes that obey at once.

16 nodes of 8 slots run 8 tasks of up to 16 ranks. Every second each task reports its progress,
every minute each rank its in-memory checkpoint. Every 2 minutes a rank is killed and heals; every
hour a task is cancelled and another one submitted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from decider import Driver
from unicron.control_plane.decide.decide import decide
from unicron.control_plane.fold.edits import running_deadlines
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.spec.job import API_VERSION, JobSpec, parse

NUM_NODES, NUM_SLOTS, NUM_TASKS, NUM_RANKS = 16, 8, 8, 16
STORE_S, FAULT_S, TASK_S = 60, 120, 3600
PAST_S = 7 * 86400.0
"""How long ago the log begins: its moments are in the past."""
YEAR_S, YEAR_TURN_S = 365 * 86400.0, 900.0


class Life(Driver):
    """A cluster whose log grows by `turns`."""

    decide = staticmethod(decide)
    past_s, turn_s = PAST_S, 1.0
    fault_every, task_every = FAULT_S, TASK_S
    """In turns."""

    def __init__(self) -> None:
        super().__init__(nodes=NUM_NODES, slots=NUM_SLOTS, now_s=time.time() - self.past_s)
        self._num_tasks = 0
        for _ in range(NUM_TASKS):
            self._begin_task()

    def turns(self) -> Iterator[list[Record]]:
        """The records of each turn, without end; the first ones are those of the start."""
        second = 0
        while True:
            made, self.log = self.log, []
            yield made
            second += 1
            self.now_s += self.turn_s
            for name, one in list(running_deadlines(self.state).items()):
                if one.due_s <= self.now_s:
                    self.obey(self.due(name))
            self._train(second)
            if second % self.fault_every == 0:
                tasks = self._training()
                number = tasks[second // self.fault_every % len(tasks)]
                ranks = sorted(self.state.tasks[number].ranks)
                self.obey(self.exit(number, ranks[second // self.fault_every % len(ranks)]))
            if second % self.task_every == 0:
                self.obey(
                    self.tell(
                        f"operator/{second}",
                        r.TaskCancelRequested(task=self._training()[0], reason=""),
                    )
                )
                self._begin_task()

    def _begin_task(self) -> None:
        self._num_tasks += 1
        self.obey(
            self.tell(
                f"operator/task-{self._num_tasks}", r.TaskSubmitted(spec=_spec(self._num_tasks))
            )
        )

    def _training(self) -> list[int]:
        return [number for number, task in self.state.tasks.items() if task.phase == "training"]

    def _train(self, second: int) -> None:
        for number in self._training():
            self.obey(self.progress(number))
            task = self.state.tasks[number]
            for place, one in enumerate(task.members):
                if (second + place) % STORE_S == 0:
                    self.tell(
                        self.source(one.node),
                        r.MemoryCheckpointStored(
                            task=number,
                            rank=one.rank,
                            attempt=one.attempt,
                            generation=task.generation,
                            step_version=task.iteration,
                            node=one.node,
                            copy_bytes=10**9,
                            checksum="crc32:00000000",
                            share=place,
                            num_shares=len(task.members),
                        ),
                    )


class Year(Life):
    """A year until today, in turns of 15 minutes: a fault and a new task every 3 hours."""

    past_s, turn_s = YEAR_S, YEAR_TURN_S
    fault_every = task_every = 12


def _spec(number: int) -> JobSpec:
    return parse(
        {
            "apiVersion": API_VERSION,
            "name": f"task-{number}",
            "slots": {"min": 4, "max": NUM_RANKS},
            "train": {
                "iterations": 10**9,
                "output": f"/srv/task-{number}",
                "batch": {"global": NUM_RANKS, "micro": 1},
            },
        }
    )
