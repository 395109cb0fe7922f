"""Locating a hang: real and synthetic dumps of one job, from one or several folders."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import past_screens
import pytest
from decider import Driver
from hangs import deadline
from hangs import hung as hung_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from two_tasks import facts
from unicron.cli.app import run_command
from unicron.cli.screens import incident
from unicron.cli.screens.incident import in_words
from unicron.cli.terminal.format import UNBROKEN
from unicron.control_plane.api.needs import folders
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history
from unicron.control_plane.incidents.hang_locator import HangLocation, locate
from unicron.workers.diagnosis.flight_recorder import NotADump, read

START_NS = 1_758_600_000_000_000_000
STEP_NS = 1_000_000
Dumped = dict[int, dict[str, Any]]
DATA = Path(__file__).parents[2] / "data" / "flight_recorder"


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
    """A collective, or a send or receive if `source` and `target` are set."""

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
    """A simulated job: the calls of all ranks, and how far each rank has come."""

    layout: Layout
    stopped: dict[int, int]
    """Rank -> the number of calls that it enters before it stops."""
    window: int = 1
    unseen: dict[int, int] = field(default_factory=dict[int, int])
    """Rank -> the number of its last completed calls whose end it has not seen."""
    has_mesh_names: bool = False
    """Groups are named after their dimension, so that disjoint ones have one name, as by a
    DeviceMesh up to torch 2.9."""
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
            source, target = (
                self.layout.rank(t, stage, d) for stage in (source_stage, target_stage)
            )
            pair = f"{of['PIPELINE']} {source}>{target}"
            counts[pair] = counts.get(pair, 0) + 1
            calls.append(
                Call(
                    of["PIPELINE"],
                    "send" if rank == source else "recv",
                    counts[pair],
                    source,
                    target,
                )
            )

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
        """Run until no rank can proceed."""
        now_ns = START_NS
        progressed = True
        while progressed:
            progressed = False
            for rank, program in enumerate(self.programs):
                limit = min(
                    self.stopped.get(rank, len(program)),
                    len(program),
                    self.completed[rank] + self.window,
                )
                if self.entered[rank] < limit:
                    now_ns += STEP_NS
                    self.entered_ns[rank, self.entered[rank]] = now_ns
                    self.entered[rank] += 1
                    progressed = True
            progressed |= self._complete()

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

    def shown(self, group: str) -> list[str]:
        """The name and the description of the group, as a dump has them."""
        number, desc = group.split()
        if self.has_mesh_names:
            of_dimensions = dict.fromkeys(one.split()[1] for one in self.groups)
            number = str([*of_dimensions].index(desc))
        return [number, desc]

    def seen(self, rank: int) -> int:
        return max(self.completed[rank] - self.unseen.get(rank, 0), 0)

    def dump(self, rank: int, *, only_active: bool, with_status: bool = True) -> dict[str, Any]:
        """The rank's dump in torch's format."""
        of = [group for group, ranks in self.groups.items() if rank in ranks]
        entries = [
            self._entry(rank, index, of)
            for index in range(self.entered[rank])
            if not only_active or index >= self.seen(rank)
        ]
        status: dict[str, Any] = {}
        for number, group in enumerate(of):
            mine = [call.seq for call in self.programs[rank] if call.group == group]
            ended = [
                call.seq for call in self.programs[rank][: self.seen(rank)] if call.group == group
            ]
            begun = [
                call.seq
                for call in self.programs[rank][: self.entered[rank]]
                if call.group == group
            ]
            if mine:
                status[str(3 * number)] = {
                    "last_enqueued_collective": begun[-1] if begun else -1,
                    "last_started_collective": -1,
                    "last_completed_collective": ended[-1] if ended else -1,
                }
        config = {
            name: {"name": name, "desc": desc, "ranks": str(list(self.groups[group]))}
            for group in of
            for name, desc in [self.shown(group)]
        }
        return {
            "version": "2.9",
            "pg_config": config,
            "entries": entries,
            "pg_status": status if with_status else {},
        }

    def _entry(self, rank: int, index: int, of: list[str]) -> dict[str, Any]:
        call = self.programs[rank][index]
        is_p2p = call.source >= 0
        name = call.name
        if is_p2p:
            one, other = (self.groups[call.group].index(end) for end in (call.source, call.target))
            name = f"send {one}->{other}" if call.name == "send" else f"recv {other}<-{one}"
        done = index < self.seen(rank)
        return {
            "record_id": index,
            "pg_id": 3 * of.index(call.group),
            "process_group": self.shown(call.group),
            "profiling_name": f"nccl:{name}",
            "collective_seq_id": 0 if is_p2p else call.seq,
            "p2p_seq_id": call.seq if is_p2p else 0,
            "op_id": call.seq,
            "is_p2p": is_p2p,
            "state": "completed" if done else "scheduled",
            "retired": done,
            "time_created_ns": self.entered_ns[rank, index],
        }


def hung(
    layout: Layout,
    stopped: dict[int, int],
    window: int = 1,
    *,
    only_active: bool = False,
    with_status: bool = True,
) -> Dumped:
    job = Job(layout, stopped, window)
    job.run()
    return {
        rank: job.dump(rank, only_active=only_active, with_status=with_status)
        for rank in range(layout.num_ranks)
    }


LAYOUTS = st.sampled_from(
    [
        Layout(2, 1, 1),
        Layout(1, 1, 4),
        Layout(1, 4, 1),
        Layout(2, 2, 2),
        Layout(4, 2, 2),
        Layout(2, 4, 2),
        Layout(2, 2, 3),
    ]
)


def found(dumps: Dumped) -> HangLocation:
    return locate(read(rank, dump) for rank, dump in dumps.items())


def named(dumps: Dumped) -> list[int]:
    return [one.rank for one in found(dumps).suspects]


Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, *paths: Path) -> list[str]:
    """Check that `unicron locate` refuses these paths; return its error line and hint line."""
    assert run_command(["locate", *map(str, paths)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["error:", "hint:"]
    return lines


def answered(capsys: Captured, *paths: Path | str) -> dict[str, Any]:
    """The JSON answer of `unicron locate` for these paths."""
    assert run_command(["locate", *map(str, paths), "-o", "json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


# --- real dumps -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "state"), [("lock_gil_1st", "not entered"), ("gpu_error_1st", "not completed")]
)
def test_real_dumps_name_the_faulty_ranks(name: str, state: str) -> None:
    document = json.loads((DATA / f"{name}.json").read_text())
    guilty = json.loads(document["ground_truth"].splitlines()[0].partition(":")[2])
    dumps = {int(rank): dump for rank, dump in document["ranks"].items()}
    where = found(dumps)
    assert [one.rank for one in where.suspects] == guilty
    assert {one.state for one in where.suspects} == {state}
    assert {one.rank for one in where.waiting} == dumps.keys() - set(guilty)
    assert where.verdict == "hang"


@pytest.mark.parametrize("name", ["lock_gil_1st", "gpu_error_1st"])
def test_real_dumps_without_those_of_the_faulty_ranks(name: str) -> None:
    document = json.loads((DATA / f"{name}.json").read_text())
    guilty = json.loads(document["ground_truth"].splitlines()[0].partition(":")[2])
    where = found(
        {int(rank): dump for rank, dump in document["ranks"].items() if int(rank) not in guilty}
    )
    assert [one.rank for one in where.suspects] == guilty == list(where.missing)
    assert {one.state for one in where.suspects} == {"no dump"}


@pytest.mark.parametrize("name", ["fr_same_names_tp2dp2", "fr_same_names_tp4dp2"])
@pytest.mark.parametrize("without", ["", "ranks", "dump"])
def test_disjoint_groups_of_one_name_are_apart(name: str, without: str) -> None:
    """Up to torch 2.9 the disjoint groups of a DeviceMesh have one name. A rank whose dump does not
    list the ranks is in that group of the name which the others list with it."""
    document = json.loads((DATA / f"{name}.json").read_text())
    dumps = {int(rank): dump for rank, dump in document["ranks"].items()}
    (guilty,) = document["ground_truth"]
    if without == "dump":
        del dumps[guilty]
    elif without == "ranks":
        for config in dumps[guilty]["pg_config"].values():
            config["ranks"] = "[]"
    where = found(dumps)
    (suspect,) = where.suspects
    assert (suspect.rank, suspect.state) == (
        guilty,
        "no dump" if without == "dump" else "not entered",
    )
    assert suspect.group.endswith("mesh_tp")
    assert {one.rank for one in where.waiting} == {*map(int, document["ranks"])} - {guilty}


# --- simulated jobs -------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    layout=LAYOUTS,
    num=st.integers(1, 3),
    only_active=st.booleans(),
    has_mesh_names=st.booleans(),
)
def test_stopped_ranks_are_named_if_each_call_is_waited_for(
    data: st.DataObject, layout: Layout, num: int, only_active: bool, has_mesh_names: bool
) -> None:
    calls = Job(layout, {}).num_calls_min - 1
    ranks = data.draw(
        st.sets(
            st.integers(0, layout.num_ranks - 1),
            min_size=1,
            max_size=min(num, layout.num_ranks - 1),
        )
    )
    stopped = {rank: data.draw(st.integers(1, calls)) for rank in sorted(ranks)}
    job = Job(layout, stopped, has_mesh_names=has_mesh_names)
    job.run()
    reached = sorted(rank for rank, at in stopped.items() if job.completed[rank] == at)
    dumps = {rank: job.dump(rank, only_active=only_active) for rank in range(layout.num_ranks)}
    assert named(dumps) == reached


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    layout=LAYOUTS,
    window=st.integers(2, 9),
    only_active=st.booleans(),
    with_status=st.booleans(),
)
def test_a_stopped_rank_is_named_if_ranks_run_ahead(
    data: st.DataObject, layout: Layout, window: int, only_active: bool, with_status: bool
) -> None:
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    at = data.draw(st.integers(1, Job(layout, {}).num_calls_min - 1))
    dumps = hung(layout, {rank: at}, window, only_active=only_active, with_status=with_status)
    assert named(dumps) == [rank]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), layout=LAYOUTS, window=st.integers(2, 9))
def test_only_stopped_ranks_are_named_if_several_stop(
    data: st.DataObject, layout: Layout, window: int
) -> None:
    """Not all are named: a rank that stopped while it waited for another looks like a waiter."""
    ranks = data.draw(
        st.sets(
            st.integers(0, layout.num_ranks - 1), min_size=1, max_size=max(layout.num_ranks // 4, 1)
        )
    )
    calls = Job(layout, {}).num_calls_min - 1
    stopped = {rank: data.draw(st.integers(1, calls)) for rank in sorted(ranks)}
    names = named(hung(layout, stopped, window))
    assert names
    assert set(names) <= ranks


@settings(max_examples=60, deadline=None)
@given(data=st.data(), layout=LAYOUTS, window=st.integers(1, 6))
def test_a_rank_without_a_dump_is_named(data: st.DataObject, layout: Layout, window: int) -> None:
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    at = data.draw(st.integers(1, Job(layout, {}).num_calls_min - 1))
    dumps = hung(layout, {rank: at}, window)
    del dumps[rank]
    if layout.num_ranks > 2:
        assert named(dumps) == [rank]
    assert found(dumps).verdict == "hang"


@given(layout=LAYOUTS, only_active=st.booleans())
def test_a_job_that_does_not_hang_has_no_suspects(layout: Layout, only_active: bool) -> None:
    where = found(hung(layout, {}, only_active=only_active))
    assert (where.verdict, where.suspects, where.waiting) == ("none", (), ())


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    layout=st.sampled_from([Layout(2, 2, 2), Layout(4, 2, 1), Layout(2, 4, 2)]),
    window=st.integers(1, 6),
    unseen=st.integers(3, 9),
    only_active=st.booleans(),
)
def test_a_device_that_no_longer_answers(
    data: st.DataObject, layout: Layout, window: int, unseen: int, only_active: bool
) -> None:
    """The rank does not see that its last calls completed on its peers, and stops soon after."""
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    at = data.draw(st.integers(unseen + 1, Job(layout, {}).num_calls_min - 1))
    job = Job(layout, {rank: at}, window, {rank: unseen})
    job.run()
    assert named(
        {one: job.dump(one, only_active=only_active) for one in range(layout.num_ranks)}
    ) == [rank]


# --- one wait at a time ---------------------------------------------------------------------------
def entry(
    seq: int,
    name: str = "all_reduce",
    *,
    state: str = "scheduled",
    group: str = "0",
    order: int | None = None,
    at_s: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    return {
        "record_id": seq if order is None else order,
        "pg_id": int(group),
        "process_group": [group, "undefined"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": int(at_s * 1e9),
        "state": state,
        "retired": False,
        "is_p2p": False,
        **more,
    }


def dump(
    *entries: dict[str, Any], groups: dict[str, list[int]] | None = None, **more: Any
) -> dict[str, Any]:
    config = {
        name: {"name": name, "desc": "undefined", "ranks": str(ranks)}
        for name, ranks in (groups or {"0": [0, 1, 2, 3]}).items()
    }
    return {
        "version": "2.9",
        "entries": list(entries),
        "pg_config": config,
        "pg_status": {},
        **more,
    }


def test_all_ranks_in_one_collective_is_a_network_fault() -> None:
    where = found({rank: dump(entry(7)) for rank in range(4)})
    assert (where.verdict, where.suspects) == ("network", ())
    assert [(one.seq, one.ranks) for one in where.stuck] == [(7, (0, 1, 2, 3))]
    assert len(where.waiting) == 4


def test_a_rank_whose_kernel_has_not_started_is_named() -> None:
    """All ranks have entered. The recorder shows that one rank's kernel has not started."""
    dumps = {
        rank: dump(entry(6, state="completed"), entry(7, state="started")) for rank in range(4)
    }
    dumps[2] = dump(entry(6, state="completed", time_discovered_started_ns=5), entry(7))
    (suspect,) = found(dumps).suspects
    assert (suspect.rank, suspect.state, suspect.seq) == (2, "not started", 7)


def test_a_rank_in_another_collective_is_named() -> None:
    dumps = {rank: dump(entry(7)) for rank in range(4)}
    dumps[3] = dump(entry(7, "broadcast"))
    (suspect,) = found(dumps).suspects
    assert (suspect.rank, suspect.state) == (3, "mismatched")
    assert "called broadcast as number 7" in suspect.why


# --- size and data type ---------------------------------------------------------------------------
def shaped(
    seq: int, size: list[int], dtype: str = "Float", name: str = "all_reduce", **more: Any
) -> dict[str, Any]:
    return entry(
        seq,
        name,
        input_sizes=[size],
        input_dtypes=[dtype],
        output_sizes=[size],
        output_dtypes=[dtype],
        **more,
    )


@pytest.mark.parametrize(
    ("size", "dtype", "called"),
    [
        ([1024, 2], "Float", "2048 Float"),
        ([1024, 4], "BFloat16", "4096 BFloat16"),
        ([], "Float", "1 Float"),
        ([1024, 0], "Float", "0 Float"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "_all_gather_base",
        "_reduce_scatter_base",
        "broadcast",
        "reduce",
        "allreduce_coalesced",
    ],
)
@pytest.mark.parametrize("is_out", [False, True])
def test_a_rank_with_another_size_or_data_type_is_named(
    size: list[int], dtype: str, called: str, name: str, is_out: bool
) -> None:
    dumps = {rank: dump(shaped(7, [1024, 4], name=name)) for rank in range(4)}
    odd = shaped(7, size, dtype, name, state="completed" if is_out else "scheduled")
    dumps[2] = dump(odd, *[shaped(8, [3], name=name)] * is_out)
    where = found(dumps)
    (suspect,) = where.suspects
    assert where.verdict == "hang"
    assert (suspect.rank, suspect.state, suspect.confidence) == (2, "mismatched", "high")
    assert suspect.why == (
        f"called {name} of {called} as number 7 of 0, where ranks 0 1 3 called {name} of 4096 Float"
    )


def test_of_two_ranks_that_differ_both_are_named_with_low_confidence() -> None:
    groups = {"0": [0, 1]}
    where = found({0: dump(shaped(7, [8]), groups=groups), 1: dump(shaped(7, [9]), groups=groups)})
    assert [(one.rank, one.state, one.confidence) for one in where.suspects] == [
        (0, "mismatched", "low"),
        (1, "mismatched", "low"),
    ]


@pytest.mark.parametrize(
    "odd", [shaped(7, [2, 2048]), shaped(7, [4096, 1]), entry(7), entry(7, input_sizes=[])]
)
def test_a_reshaped_tensor_or_an_unknown_size_is_no_mismatch(odd: dict[str, Any]) -> None:
    dumps = {rank: dump(shaped(7, [1024, 4])) for rank in range(4)}
    where = found({**dumps, 2: dump(odd)})
    assert (where.verdict, where.suspects) == ("network", ())


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter", "all_reduce_sparse"])
def test_collectives_that_allow_different_sizes(name: str) -> None:
    where = found({rank: dump(shaped(7, [rank + 1], name=name)) for rank in range(4)})
    assert (where.verdict, where.suspects) == ("network", ())


@settings(max_examples=50, deadline=None)
@given(data=st.data(), layout=LAYOUTS, window=st.integers(1, 6))
def test_sizes_that_agree_change_no_verdict(
    data: st.DataObject, layout: Layout, window: int
) -> None:
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    dumps = hung(
        layout, {rank: data.draw(st.integers(1, Job(layout, {}).num_calls_min - 1))}, window
    )
    before = found(dumps)
    for one in dumps.values():
        for each in one["entries"]:
            each.update(input_sizes=[[each["collective_seq_id"], 5]], input_dtypes=["Float"])
    assert found(dumps) == before


# --- numbers that torch never writes --------------------------------------------------------------
@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", "1" * 400])
@pytest.mark.parametrize(
    "key", ["record_id", "pg_id", "collective_seq_id", "op_id", "time_created_ns"]
)
def test_an_invalid_number_is_a_one_line_error(
    key: str, number: str, tmp_path: Path, capsys: Captured
) -> None:
    text = json.dumps(dump({**entry(1), key: "@"})).replace('"@"', number)
    (tmp_path / "dump_0").write_text(text)
    error, _ = refused(capsys, tmp_path / "dump_0")
    assert "Expected `int`" in error or "JSON is malformed" in error or "out of range" in error


@pytest.mark.parametrize(
    "text",
    [
        '{"dumped_ns": 1e999, "entries": []}',
        '{"ranks": {"' + "1" * 5000 + '": {}}}',
        '{"entries": [{"process_group": ["0", ""], "collective_seq_id": 1, '
        '"input_sizes": [[1e999]],'
        ' "input_dtypes": ["Float"], "profiling_name": "nccl:all_reduce"}]}',
    ],
)
def test_an_invalid_number_elsewhere_fails(text: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "dump_0").write_text(text)
    assert run_command(["locate", str(tmp_path / "dump_0")]) == 2
    assert capsys.readouterr().err.startswith("error:")


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\xff", b"p3000000000\n"])
def test_a_pickle_cannot_ask_for_all_memory(put: bytes, tmp_path: Path, capsys: Captured) -> None:
    """It names an entry of its memo that makes Python lay out tens of gigabytes."""
    (tmp_path / "dump_0").write_bytes(b"\x80\x02}" + put + b".")
    limit, begun_s = resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
    error, _ = refused(capsys, tmp_path / "dump_0")
    assert "MemoryError" in error
    assert time.monotonic() - begun_s < 10
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def test_a_fifo_is_refused_at_once_and_skipped_in_a_folder(
    tmp_path: Path, capsys: Captured
) -> None:
    """The FIFO has no writer, so a blocking open would never return."""
    fifo = tmp_path / "dump_1"
    os.mkfifo(fifo)
    (tmp_path / "dump_0").write_text(json.dumps(dump(entry(1))))
    assert f"{fifo}: a fifo, not a regular file" in refused(capsys, fifo)[0]
    assert 1 in answered(capsys, tmp_path)["missing"]


def test_a_collective_behind_a_stuck_one_is_not_stuck_itself() -> None:
    """All members have entered both collectives. The first blocks the second and is named alone."""
    groups = {"1": [0, 1], "2": [1, 2]}
    first, second = entry(7, group="1", order=0), entry(9, group="2", order=0)
    where = found(
        {
            0: dump(first, groups=groups),
            2: dump(second, groups=groups),
            1: dump(first, {**second, "record_id": 1}, groups=groups),
        }
    )
    assert (where.verdict, where.suspects) == ("network", ())
    assert [(one.group, one.ranks) for one in where.stuck] == [("1", (0, 1))]
    assert {one.rank: one.ranks for one in where.waiting} == {0: (), 1: (), 2: (1,)}


def test_ranks_that_wait_for_each_other() -> None:
    """Two ranks enter two groups in opposite order. The peer of the longest waiter is named."""
    groups = {"1": [0, 1], "2": [0, 1]}
    where = found(
        {
            0: dump(entry(1, group="1", at_s=1), groups=groups),
            1: dump(entry(1, group="2", at_s=2), groups=groups),
        }
    )
    assert [(one.rank, one.confidence) for one in where.suspects] == [(1, "low")]
    assert "circle" in where.suspects[0].why


def test_an_aborted_collective_blames_no_rank() -> None:
    """Aborted work looks completed, so it is no evidence against the other ranks."""
    dumps = {rank: dump(entry(7)) for rank in range(3)}
    dumps[3] = dump(entry(7, state="completed"), entry(8, state="completed"))
    assert 0 not in {one.rank for one in found(dumps).suspects}


def test_of_groups_with_one_name_the_newest_counts() -> None:
    """After a rank has rebuilt its groups, entries of the old groups never end."""
    old = entry(90, order=1)
    dumps = {rank: dump(old, entry(3, order=2, pg_id=5)) for rank in range(3)}
    dumps[3] = dump(old, entry(2, order=2, pg_id=5, state="completed"))
    assert named(dumps) == [3]


def test_a_short_wait_is_no_hang() -> None:
    def at(dumped_s: float) -> Dumped:
        dumps = {
            rank: dump(entry(7, at_s=10.0), dumped_ns=int(dumped_s * 1e9)) for rank in range(3)
        }
        return {**dumps, 3: dump(entry(6, state="completed"), dumped_ns=int(dumped_s * 1e9))}

    assert found(at(10.2)).verdict == "none"
    assert named(at(14.0)) == [3]


def test_a_single_dump_blames_no_rank() -> None:
    where = found({0: dump(entry(7))})
    assert (where.verdict, where.suspects, where.missing) == ("hang", (), (1, 2, 3))


def test_gloo_retires_and_never_completes() -> None:
    done = entry(6, retired=True, profiling_name="gloo:all_reduce")
    dumps = {rank: dump(done, entry(7, profiling_name="gloo:all_reduce")) for rank in range(3)}
    assert named({**dumps, 3: dump(done)}) == [3]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_document_breaks_the_reader(document: Any) -> None:
    for one in (
        document,
        {"entries": document},
        {"entries": [document]},
        dump(entry(1), pg_status=document),
        dump({**entry(1), "process_group": document}),
    ):
        try:
            read(0, one)
        except NotADump:
            pass


# --- the command ----------------------------------------------------------------------------------
def test_one_file_per_rank_as_json_or_as_torch_pickles_them(
    tmp_path: Path, capsys: Captured
) -> None:
    dumps = hung(Layout(2, 2, 1), {3: 4})
    for rank, one in dumps.items():
        if rank % 2:
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(one, protocol=2))
        else:
            (tmp_path / f"flight-rank-{rank}.json").write_text(json.dumps(one))
    (tmp_path / "fault_injection.log").write_text("not a dump")
    answer = answered(capsys, tmp_path)
    assert [one["rank"] for one in answer["suspects"]] == [3]
    assert (answer["verdict"], answer["ranks"], answer["missing"]) == ("hang", 4, [])
    assert {"why", "group", "collective", "seq", "state"} <= answer["suspects"][0].keys()
    assert {one["rank"] for one in answer["waiting"]} == {0, 1, 2}


def test_the_text_output(capsys: Captured) -> None:
    assert run_command(["locate", str(DATA / "lock_gil_1st.json")]) == 0
    page = capsys.readouterr().out
    assert page.startswith("hang: ranks 9 14 of 16 ranks\n")
    assert "did not enter all_to_all 45265" in page
    assert "unicron classify FILE" in page
    assert max(map(len, page.splitlines())) <= 100


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("dump_0", b"", "cut off"),
        ("dump_0", b"  \n", "cut off"),
        ("dump_0", b'{"entries": [', "cut off"),
        ("dump_0", b"\x80\x02}q\x00", "cut off"),
        ("dump_0", b"\x99{}", "JSON is malformed"),
        ("dump_0", b'{"entries": []}', "nothing was recorded"),
        ("dump_0", b'{"entries":\n [}', "invalid character (byte 14)"),
        ("dump_0", b"[" * 100_000, "maximum recursion depth"),
        ("dump_0", b"{}", "missing required field `entries`"),
        ("dump_0", b"[1]", "Expected `object`"),
        ("dump_0", b'{"entries": [{"process_group": 3}]}', "at `$.entries[0].process_group`"),
        ("dump_0", b'{"ranks": {}}', "missing required field `entries`"),
        ("dump_0", b'{"ranks": {"a": {}}}', "Expected `int`"),
        ("dump", b'{"entries": []}', "does not end in a rank"),
        ("dump_0", pickle.dumps(Evil(), protocol=2), "refused"),
    ],
)
def test_wrong_files(name: str, data: bytes, words: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / name).write_bytes(data)
    error, _ = refused(capsys, tmp_path / name)
    assert words in error


def test_wrong_paths(tmp_path: Path, capsys: Captured) -> None:
    one, other = tmp_path / "a_0", tmp_path / "b_0"
    for path in (one, other):
        path.write_text(json.dumps(dump(entry(1))))
    (tmp_path / "inner").mkdir()
    for paths, words in (
        ([one, other], "rank 0 is there twice"),
        ([tmp_path / "none"], "no such file"),
        ([tmp_path / "inner"], "no dump in this folder"),
        ([Path("/dev/null")], "not a regular file"),
        ([Path("/dev/zero")], "not a regular file"),
    ):
        assert run_command(["locate", *map(str, paths)]) == 2
        assert words in capsys.readouterr().err
    assert run_command(["locate"]) == 2


def test_a_file_that_is_too_long(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unicron.workers.diagnosis import dump_files

    monkeypatch.setattr(dump_files, "FILE_BYTES_MAX", 1 << 20)
    with (tmp_path / "dump_0").open("wb") as file:
        file.truncate(3 << 20)
    assert "longer than 1 MiB" in refused(capsys, tmp_path / "dump_0")[0]


NO_DUMPS = {
    "core.8121": b"\x7fELF\x02\x01\x01" + bytes(4000),
    "config.json": b'{"model": "gpt", "layers": 24}',
    "nccl_trace_rank_7": b"",
}
"""Other files of a folder of dumps, whose names end in a number or in `.json`."""


@pytest.mark.parametrize("cut", [b"", b"\x80\x02}q", b'{"entries": ['])
def test_what_is_no_dump_in_a_folder_is_a_line(
    tmp_path: Path, capsys: Captured, cut: bytes
) -> None:
    """The rank whose dump is cut off counts as one without a dump."""
    for rank, one in hung(Layout(2, 2, 1), {3: 4}).items():
        (tmp_path / f"dump_{rank}").write_bytes(cut if rank == 3 else json.dumps(one).encode())
    for name, data in NO_DUMPS.items():
        (tmp_path / name).write_bytes(data)
    for paths in ([tmp_path], sorted(tmp_path.iterdir())):
        answer = answered(capsys, *paths)
        assert [(one["rank"], one["state"]) for one in answer["suspects"]] == [(3, "no dump")]
        assert (answer["ranks"], answer["missing"]) == (4, [3])
        assert len(answer["left_out"]) == 1 + len(NO_DUMPS)
        assert all(line.startswith(f"{tmp_path}/") for line in answer["left_out"])
    assert run_command(["locate", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("left out ") for line in lines) == 1 + len(NO_DUMPS)
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100


def test_many_files_that_are_no_dumps_are_counted(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "dump_0").write_text(json.dumps(dump(entry(1))))
    for number in range(9):
        (tmp_path / f"core.{8000 + number}").write_bytes(b"\x7fELF")
    assert run_command(["locate", str(tmp_path)]) == 0
    assert "left out   and 4 more files" in capsys.readouterr().out


def test_a_broken_dump_in_a_file_of_all_ranks_is_left_out(tmp_path: Path, capsys: Captured) -> None:
    dumps: dict[int, Any] = {**hung(Layout(2, 2, 1), {3: 4}), 3: {"entries": 7}}
    (tmp_path / "all.json").write_text(json.dumps({"ranks": dumps}))
    answer = answered(capsys, tmp_path / "all.json")
    assert answer["missing"] == [3]
    (line,) = answer["left_out"]
    assert "not a flight-recorder dump of rank 3: " in line


def test_a_folder_without_any_dump_is_refused(tmp_path: Path, capsys: Captured) -> None:
    for name, data in NO_DUMPS.items():
        (tmp_path / name).write_bytes(data)
    error, hint = refused(capsys, tmp_path)
    assert "config.json: not a flight-recorder dump" in error
    assert hint.startswith("hint: give the files that torch's flight recorder wrote")


# --- dumps of several folders --------------------------------------------------------------------
def write(folder: Path, dumps: dict[int, dict[str, Any]], **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    for rank, one in dumps.items():
        (folder / f"flight-rank-{rank}.json").write_text(json.dumps({**one, **more}))


def world(num: int) -> dict[str, Any]:
    return {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(num)))}}


def job(num: int, rank: int, **more: Any) -> dict[str, Any]:
    return {
        "entries": [
            {
                "process_group": ["0", "default_pg"],
                "collective_seq_id": 1,
                "op_id": 1,
                "record_id": 0,
                "pg_id": 0,
                "profiling_name": "nccl:all_reduce",
                "state": "scheduled",
                "is_p2p": False,
                "time_created_ns": 1,
            }
        ],
        "pg_config": world(num),
        **more,
    }


def test_folders_of_several_nodes_are_read_together(tmp_path: Path, capsys: Captured) -> None:
    """Ranks are numbered across nodes. A file that is given twice counts once."""
    dumps = hung(Layout(2, 2, 1), {3: 4})
    write(tmp_path / "a", {rank: dumps[rank] for rank in (0, 1)})
    write(tmp_path / "b", {rank: dumps[rank] for rank in (2, 3)})
    again = tmp_path / "a" / "flight-rank-0.json"
    folders = [str(tmp_path / "a"), str(again), f"{tmp_path}/b/../b"]
    answer = answered(capsys, *folders)
    assert [one["rank"] for one in answer["suspects"]] == [3]
    assert (answer["ranks"], answer["missing"]) == (4, [])


def test_dumps_of_two_jobs_are_refused(tmp_path: Path, capsys: Captured) -> None:
    """An earlier, larger job has left the files of ranks that this job does not have."""
    write(tmp_path, {rank: job(2, rank) for rank in (0, 1)})
    write(tmp_path, {rank: job(4, rank) for rank in (2, 3)})
    error, hint = refused(capsys, tmp_path)
    assert error == (
        "error: these dumps are of 2 jobs, or of several attempts: 2 ranks "
        f"(as {tmp_path}/flight-rank-0.json), 4 ranks (as {tmp_path}/flight-rank-2.json)"
    )
    assert hint.startswith("hint: give only the files of one of them")


def test_dumps_of_two_tasks_or_generations_are_refused(tmp_path: Path, capsys: Captured) -> None:
    write(tmp_path / "a", {0: job(2, 0, task=5, generation=1)})
    for at, other in enumerate(({"task": 9, "generation": 1}, {"task": 5, "generation": 2})):
        folder = tmp_path / f"b{at}"
        write(folder, {1: job(2, 1, **other)})
        error, _ = refused(capsys, tmp_path / "a", folder)
        assert "task 5 generation 1, 2 ranks" in error
        assert f"task {other['task']} generation {other['generation']}, 2 ranks" in error
    assert run_command(["locate", str(tmp_path / "a"), "-o", "json"]) == 0


def test_a_dump_that_names_no_job_is_accepted(tmp_path: Path, capsys: Captured) -> None:
    """Such a dump is from a rank that has not joined a generation yet, or from an older torch."""
    write(tmp_path, {0: job(2, 0, task=5, generation=3)})
    write(
        tmp_path,
        {
            1: {
                "entries": [],
                "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[]"}},
                "task": 5,
                "generation": 0,
            }
        },
    )
    assert answered(capsys, tmp_path)["ranks"] == 2


def test_the_same_rank_twice_of_one_job_is_refused(tmp_path: Path, capsys: Captured) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, {0: job(2, 0)})
    error, hint = refused(capsys, tmp_path / "a", tmp_path / "b")
    assert "rank 0 is there twice" in error
    assert "numbered across all its nodes" in hint


def test_error_files_beside_the_dumps_are_left_out(tmp_path: Path, capsys: Captured) -> None:
    """An agent's folder of a task also contains its logs and torch's error files."""
    write(tmp_path, {rank: job(2, rank) for rank in (0, 1)})
    (tmp_path / "rank-0.1.log").write_text("a line\n")
    (tmp_path / "rank-0.1.error.json").write_text('{"message": {"message": "it broke"}}')
    assert answered(capsys, tmp_path)["ranks"] == 2


# --- where the dumps are --------------------------------------------------------------------------
def hosts(*found: str) -> list[dict[str, Any]]:
    return [{"id": f"n{at}", "host": host} for at, host in enumerate(found, start=1)]


def text_of(found: list[dict[str, Any]]) -> str:
    return in_words(found).replace(UNBROKEN, " ")


def test_on_one_machine_one_folder_is_named() -> None:
    found = folders(
        [
            ("n1", "/srv/u/logs/5-a/rank-0.log"),
            ("n2", "/srv/u/logs/5-a/rank-1.log"),
            ("n2", "/srv/u/logs/5-a/rank-2.log"),
        ],
        hosts("127.0.0.1", "127.0.0.1"),
    )
    assert [(one["node"], one["folder"]) for one in found] == [
        ("n1", "/srv/u/logs/5-a"),
        ("n2", "/srv/u/logs/5-a"),
    ]
    assert text_of(found).startswith("unicron locate /srv/u/logs/5-a: the flight recorders")


def test_for_several_machines_the_text_says_how_to_collect_dumps() -> None:
    found = folders(
        [(f"n{at}", "/srv/u/logs/5-a/r.log") for at in range(1, 7)],
        hosts(*(f"10.0.0.{at}" for at in range(1, 7))),
    )
    words = text_of(found)
    assert "n1 10.0.0.1:/srv/u/logs/5-a, n2 10.0.0.2:/srv/u/logs/5-a, " in words
    assert "n4 10.0.0.4:/srv/u/logs/5-a and 2 more; " in words
    assert words.endswith("(scp -r HOST:FOLDER NODE), then unicron locate n1 n2 n3 n4 ...")


def test_the_pages_of_a_hang_name_the_dumps() -> None:
    d = Driver()
    task = d.running()
    hung_ranks(d, task, 2)
    seen_ = view(d.state)
    (one,) = seen_["tasks"]
    page = " ".join(past_screens.task_status(seen_, one, history(d.log), now_s=d.now_s))
    assert "dumps unicron locate /tmp" in " ".join(page.split())
    d.due(deadline(d, task))
    facts_ = facts(d.log)
    assert {x["folder"] for x in facts_["dumps"]} == {"/tmp"}
    assert {x["node"] for x in facts_["dumps"]} == {"n1", "n2"}
    assert any(line.startswith("dumps      unicron locate /tmp") for line in incident.page(facts_))
    d.exit(task, 2)
    assert facts(d.log)["dumps"] == facts_["dumps"]


def test_a_fault_that_is_no_hang_has_no_dumps() -> None:
    d = Driver()
    task = d.running()
    d.exit(task, 2)
    assert facts(d.log)["dumps"] == []


def test_a_list_of_ranks_that_is_nested_too_deep_is_no_dump() -> None:
    deep = "[" * 100_000
    with pytest.raises(NotADump, match="got `array`"):
        read(0, {"entries": [], "pg_config": {"0": {"ranks": deep}}})
