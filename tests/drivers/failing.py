"""Failing tasks of the synchronous cluster: which process fails, where, and in which words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decider import Driver, finish
from unicron.control_plane.state.task import Rank
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.records import statuses as s
from unicron.events.records.envelope import Record
from unicron.events.records.orders import ORDERS, StartRank

Fails = Callable[[Rank], bool]
"""Whether a process fails at the point of failure."""
TRY_S = 5.0
"""How long a task trains until it fails again."""
SOFTWARE = {
    s.OTHER_SOFTWARE: "RuntimeError: shape mismatch in layer 3",
    s.EXITED_ABNORMALLY: "",
    s.CUDA_ERRORS: "RuntimeError: CUDA error: unspecified launch failure",
    s.ILLEGAL_MEMORY_ACCESS: "CUDA error: an illegal memory access was encountered",
    s.CONNECTION_REFUSED: "ConnectionRefusedError: [Errno 111] Connection refused",
    s.CONNECTION_RESET: "ConnectionResetError: [Errno 104] Connection reset by peer",
    s.OTHER_NETWORK: "ValueError: host not found: Name or service not known",
    s.NCCL_TIMEOUT: "RuntimeError: timed out after 600 s",
    s.GPU_DRIVER_ERRORS: "CUDA driver version is insufficient for CUDA runtime version",
    s.ECC_ERRORS: "CUDA error: uncorrectable ECC error encountered",
}
"""By status: what a process says that fails by its own software, or says that its device does."""


def out(d: Driver) -> list[str]:
    """The slots that are out."""
    return [
        f"{node.name}/{index}"
        for node in d.state.nodes.values()
        for index in range(node.num_slots)
        if node.is_disabled(index)
    ]


def suspected(d: Driver) -> list[str]:
    """The slots that are suspected."""
    return [
        f"{node.name}/{index}" for node in d.state.nodes.values() for index in node.slots_suspected
    ]


def processes(d: Driver, task: int) -> list[Rank]:
    """The task's running processes that are not ending, by rank."""
    ranks = d.state.tasks[task].ranks
    return [ranks[key] for key in sorted(ranks) if not ranks[key].stopping]


def fail(
    d: Driver,
    task: int,
    ranks: Sequence[Rank],
    status: str = s.OTHER_SOFTWARE,
    text: str = "",
    *,
    can_pass: bool = False,
) -> list[Record]:
    """These processes fail by themselves: they report an exception, if they can, then they exit."""
    text, told = text or SOFTWARE.get(status, status), list[Record]()
    it = d.state.tasks[task]
    running = [rank for rank in ranks if it.ranks.get(rank.rank) is rank]
    if it.heals_in_memory and it.members and status != s.EXITED_ABNORMALLY:
        for rank in running:
            told += d.tell(
                d.source(rank.slot.node),
                r.RankErrored(
                    task=task,
                    rank=rank.rank,
                    attempt=rank.attempt,
                    generation=it.generation,
                    iteration=it.iteration,
                    error=status,
                    text=text,
                    status=status,
                    can_pass=can_pass,
                ),
            )
    for rank in running:
        told += d.tell(
            d.source(rank.slot.node),
            r.RankExited(
                task=task,
                rank=rank.rank,
                attempt=rank.attempt,
                pid=rank.pid,
                exit_code=1,
                signal=None,
                status="" if status == s.EXITED_ABNORMALLY else status,
                cause=text,
                can_pass=can_pass,
            ),
        )
    return told


def obey(d: Driver, records: list[Record], *, start: bool = True) -> list[Record]:
    """As Driver.obey, passing over orders to processes that have ended meanwhile. Without `start`
    no process starts; returned are the orders to start some."""
    todo, starts = list(records), list[Record]()
    while todo or (start and (pauses := d.pauses())):
        if not todo:
            todo += d.due(pauses[0])
            continue
        record = todo.pop(0)
        if not start and isinstance(record.body, StartRank):
            starts.append(record)
            continue
        if isinstance(record.body, ORDERS) and record.seq not in d.state.orders:
            continue  # a later order has replaced it
        try:
            todo += d.do(record.body)
        except KeyError:
            continue
    return starts


def play(
    d: Driver,
    task: int,
    fails: Fails,
    status: str = s.OTHER_SOFTWARE,
    *,
    at: int = 12,
    back: int = 0,
    until: int = 40,
    rounds: int = 60,
    can_pass: bool = False,
    finishes: bool = True,
) -> int:
    """The task trains to iteration `until`; then it finishes, if it may. At iteration `at`, and
    whenever it comes there again, those processes fail of which `fails` says so; the task then
    continues `back` iterations earlier. Returns how often any failed, at most `rounds`."""
    it, num = d.state.tasks[task], 0
    for _ in range(rounds):
        if it.outcome or not it.target:
            break
        bad = [rank for rank in processes(d, task) if fails(rank)]
        if not it.members or it.phase != "training":
            obey(d, fail(d, task, bad, status, can_pass=can_pass) if bad else [])
            num += bool(bad)
            continue
        done = d.steps.get(task, 0)
        if not bad or done < at:
            goal = at if done < at else until
            if done >= until:
                obey(d, finish(d, task) if finishes else [])
                break
            obey(d, d.progress(task, max(goal - done, 1)))
            continue
        num += 1
        told = fail(d, task, bad, status, can_pass=can_pass)
        left = [rank for rank in it.living_members() if not fails(rank)]
        if not it.living_members():
            d.steps[task] = done - back
        starts = obey(d, told, start=False)
        if left and it.phase == "training":  # the others go on while the process starts
            starts += obey(d, d.progress(task), start=False)
        d.now_s += TRY_S
        obey(d, starts)
    return num


def experiments(d: Driver) -> list[str]:
    """What was tried and what it showed, in order."""
    found = list[str]()
    for record in d.log:
        if isinstance(record.body, decisions.ExperimentBegun):
            found.append("tried" if record.body.seats else "without")
        if isinstance(record.body, decisions.SlotsJudged):
            found.append(record.body.verdict)
    return found
