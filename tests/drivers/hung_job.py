"""A job that hangs, on paper: TP x PP x DP ranks, some of which stop; and the dumps it leaves.

A rank enters its collectives in program order, at most `window` ahead of what is complete. What a
rank has entered completes in order, once all who take part have entered it and nothing before it
is open at any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

START_NS = 1_758_600_000_000_000_000
STEP_NS = 1_000_000


class Layout(NamedTuple):
    tp: int
    pp: int
    dp: int

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def rank(self, t: int, p: int, d: int) -> int:
        return t + self.tp * (d + self.dp * p)

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp


class Call(NamedTuple):
    """A collective, or a send or receive as `source`, `target` say."""

    group: str
    name: str
    seq: int
    source: int = -1
    target: int = -1

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.group, self.seq, self.source, self.target


@dataclass
class Job:
    """The programs of all ranks, and how far each has come."""

    layout: Layout
    stopped: dict[int, int]
    """Rank -> how many calls it enters before it stops."""
    window: int = 1
    unseen: dict[int, int] = field(default_factory=dict[int, int])
    """Rank -> of how many of its last complete calls it has not seen the end."""
    num_iterations: int = 2
    num_micro_batches: int = 2
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    programs: list[list[Call]] = field(default_factory=list[list[Call]])
    entered: list[int] = field(default_factory=list[int])
    completed: list[int] = field(default_factory=list[int])
    entered_ns: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def __post_init__(self) -> None:
        at = self.layout
        tp, pp, dp = (range(num) for num in at)
        self.groups["0 default_pg"] = tuple(range(at.num_ranks))
        for p in pp:
            for d in dp:
                self._add("TENSOR", [at.rank(t, p, d) for t in tp])
            for t in tp:
                self._add("DATA", [at.rank(t, p, d) for d in dp])
            self._add("EXPERT", [at.rank(t, p, d) for t in tp for d in dp])
        for t in tp:
            for d in dp:
                self._add("PIPELINE", [at.rank(t, p, d) for p in pp])
        self.programs = [self._program(rank) for rank in range(at.num_ranks)]
        self.entered = [0] * at.num_ranks
        self.completed = [0] * at.num_ranks

    def _add(self, desc: str, ranks: list[int]) -> None:
        if len(ranks) > 1:
            self.groups[f"{len(self.groups)} {desc}"] = tuple(ranks)

    def _program(self, rank: int) -> list[Call]:
        of = {group.split()[1]: group for group, ranks in self.groups.items() if rank in ranks}
        t, p, d = self.layout.place(rank)
        last = self.layout.pp - 1
        counts: dict[str, int] = {}
        calls: list[Call] = []

        def call(desc: str, name: str) -> None:
            if desc in of:
                group = of[desc]
                counts[group] = counts.get(group, 0) + 1
                calls.append(Call(group, name, counts[group]))

        def pass_on(source_stage: int, target_stage: int) -> None:
            source, target = (self.layout.rank(t, stage, d) for stage in
                              (source_stage, target_stage))
            pair = f"{of['PIPELINE']} {source}>{target}"
            counts[pair] = counts.get(pair, 0) + 1
            calls.append(Call(of["PIPELINE"], "send" if rank == source else "recv",
                              counts[pair], source, target))

        for _ in range(self.num_iterations):
            for _ in range(self.num_micro_batches):
                for step in (1, -1):
                    if 0 <= p - step <= last:
                        pass_on(p - step, p)
                    call("TENSOR", "all_reduce")
                    call("EXPERT", "all_to_all")
                    call("TENSOR", "_reduce_scatter_base")
                    if 0 <= p + step <= last:
                        pass_on(p, p + step)
            call("DATA", "all_reduce")
            call("default_pg", "all_reduce")
        return calls

    @property
    def num_calls_min(self) -> int:
        return min(map(len, self.programs))

    def run(self) -> None:
        """Until nothing goes on."""
        now_ns = START_NS
        goes_on = True
        while goes_on:
            goes_on = False
            for rank, program in enumerate(self.programs):
                limit = min(self.stopped.get(rank, len(program)), len(program),
                            self.completed[rank] + self.window)
                if self.entered[rank] < limit:
                    now_ns += STEP_NS
                    self.entered_ns[rank, self.entered[rank]] = now_ns
                    self.entered[rank] += 1
                    goes_on = True
            goes_on |= self._complete()

    def _complete(self) -> bool:
        heads: dict[tuple[str, int, int, int], list[int]] = {}
        for rank, program in enumerate(self.programs):
            if self.completed[rank] < self.entered[rank]:
                heads.setdefault(program[self.completed[rank]].key, []).append(rank)
        done = False
        for (group, _, source, _), ranks in heads.items():
            if len(ranks) == (2 if source >= 0 else len(self.groups[group])):
                done = True
                for rank in ranks:
                    self.completed[rank] += 1
        return done

    def seen(self, rank: int) -> int:
        return max(self.completed[rank] - self.unseen.get(rank, 0), 0)

    def dump(self, rank: int, *, only_active: bool, with_status: bool = True) -> dict[str, Any]:
        """As torch writes it."""
        of = [group for group, ranks in self.groups.items() if rank in ranks]
        entries = [self._entry(rank, index, of) for index in range(self.entered[rank])
                   if not only_active or index >= self.seen(rank)]
        status: dict[str, Any] = {}
        for number, group in enumerate(of):
            mine = [call.seq for call in self.programs[rank] if call.group == group]
            ended = [call.seq for call in self.programs[rank][:self.seen(rank)]
                     if call.group == group]
            begun = [call.seq for call in self.programs[rank][:self.entered[rank]]
                     if call.group == group]
            if mine:
                status[str(3 * number)] = {
                    "last_enqueued_collective": begun[-1] if begun else -1,
                    "last_started_collective": -1,
                    "last_completed_collective": ended[-1] if ended else -1}
        config = {group.split()[0]: {
            "name": group.split()[0], "desc": group.split()[1],
            "ranks": str(list(self.groups[group]))} for group in of}
        return {"version": "2.9", "pg_config": config, "entries": entries,
                "pg_status": status if with_status else {}}

    def _entry(self, rank: int, index: int, of: list[str]) -> dict[str, Any]:
        call = self.programs[rank][index]
        is_p2p = call.source >= 0
        name = call.name
        if is_p2p:
            one, other = (self.groups[call.group].index(end) for end in (call.source, call.target))
            name = f"send {one}->{other}" if call.name == "send" else f"recv {other}<-{one}"
        done = index < self.seen(rank)
        return {"record_id": index, "pg_id": 3 * of.index(call.group),
                "process_group": call.group.split(), "profiling_name": f"nccl:{name}",
                "collective_seq_id": 0 if is_p2p else call.seq,
                "p2p_seq_id": call.seq if is_p2p else 0, "op_id": call.seq, "is_p2p": is_p2p,
                "state": "completed" if done else "scheduled", "retired": done,
                "time_created_ns": self.entered_ns[rank, index]}
