"""The demo's first acts: two tasks start, a rank is killed, then the control plane."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
from msgspec import Struct

from ..events.spec import JobSpec, Train
from . import demo_proof, processes
from .demo_stage import BrokenError, Stage
from .demo_trace import is_running
from .figures import ranks, scaled, span
from .followed import hidden
from .local_cluster import CONTROL_PLANE

Plain = dict[str, Any]
VICTIM_NUM = 2
STRIKE_ITERATION_NUM = 6
AWAY_S = 2.0
START_S_MAX, HEAL_S_MAX, RETURN_S_MAX, STRIKE_S_MAX = 120.0, 60.0, 120.0, 120.0
GLANCE_S = 0.001


class Player(Struct):
    """One task of the demo: what is asked for, and what the plan gives it with all nodes there."""

    spec: JobSpec
    num_slots: int
    task: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def train(self) -> Train:
        assert self.spec.train is not None
        return self.spec.train


# --- start --------------------------------------------------------------------------------------
def submit(stage: Stage, player: Player) -> Plain:
    """Submit it; the plan that follows."""
    spec, train = player.spec, player.train
    answer = stage.client.post("/v1/tasks", msgspec.to_builtins(spec, str_keys=True))
    player.task = int(answer["task"])
    what = ", ".join(train.data) or "Python's documentation"
    stage.say("submit", f"{spec.name} (task {player.task}), weight {spec.weight:g}, "
                        f"{train.num_micro_batches} micro-batches, {train.iterations} iterations "
                        f"on {what}")
    return stage.wait(lambda: stage.find("PlanChosen", after=player.task), START_S_MAX, "a plan")


def say_plan(stage: Stage, plan: Plain) -> None:
    """What was chosen and what it beat, with their prices."""
    body = plan["body"]
    slots = {one["task"]: one["slots"] for one in body["allocations"]}
    rows = [(slots, body["waf"], "chosen")]
    rows += [(dict(other["slots"]), other["waf"], other["what"]) for other in body["alternatives"]]
    stage.say("plan", f"for {body['num_slots']} slots, in weighted FLOP/s: {body['trigger']}")
    for given, waf, what in rows:
        words = "  ".join(f"{stage.name(task)} {num}" for task, num in given.items())
        stage.note(None, f"{words}  {scaled(waf, 'FLOP/s'):>12}  {what}{hidden(waf, body['waf'])}")


def start(stage: Stage, alpha: Player, beta: Player) -> None:
    """Both tasks are submitted, planned, started, and step."""
    submit(stage, alpha)
    say_plan(stage, submit(stage, beta))
    stage.note(None, "T(x) declared in the specs: two cores cannot show scaling")
    stage.live = {alpha.task, beta.task}
    want = {player.task: player.num_slots for player in (alpha, beta)}
    stage.wait(lambda: full(stage, want), START_S_MAX, "both tasks train")
    ready = stage.all("RankReady")
    body = ready[0]["body"]
    for player in (alpha, beta):
        stage.say("ranks", f"{player.name}: {len(stage.members(player.task))} on "
                           f"{nodes(stage, player.task)}")
    stage.note(None, f"each a GPT of {scaled(body['num_params'], ' parameters')}, "
                     f"{scaled(body['state_bytes'], 'B')} of state, "
                     f"data {body['data_digest'].removeprefix('sha256:')[:12]}")


def nodes(stage: Stage, task: int) -> str:
    """The nodes of its seats, in words."""
    return " ".join(sorted(set(stage.seats(task).values())))


def full(stage: Stage, want: dict[int, int]) -> bool:
    """Whether each of these tasks steps with that many ranks, all on the seats it was given."""
    return all(stage.is_full(task, num) for task, num in want.items())


# --- a rank is killed ---------------------------------------------------------------------------
class Strike(Struct):
    """The kill of a rank, and where it struck."""

    at_s: float
    event: Plain

    @property
    def pid(self) -> int:
        return int(self.event["pid"])

    @property
    def iteration(self) -> int:
        return int(self.event["iteration"])


def kill_rank(stage: Stage, player: Player) -> None:
    """SIGKILL in the middle of an iteration; until it is stepped and the rank is back."""
    task = player.task
    stage.wait(lambda: stage.trace.iteration(task) >= STRIKE_ITERATION_NUM, STRIKE_S_MAX,
               f"iteration {STRIKE_ITERATION_NUM}")
    pids = stage.trace.pids(task)
    strike = _strike(stage, task)
    settled = stage.all("Reconfigured", task=task, rank=VICTIM_NUM)
    own = [one for one in stage.trace.of(task, strike.iteration, "forward")
           if one["rank"] == VICTIM_NUM]
    stage.say(f"FAULT {stage.num_kills}",
              f"kill -9 {strike.pid}: {player.name}'s rank {VICTIM_NUM}, in "
              f"{strike.event['event']}, micro-batch {len(own)} of "
              f"{len(settled[0]['body']['todo'])}, iteration {strike.iteration}")
    exited = stage.wait(
        lambda: stage.find("RankExited", task=task, rank=VICTIM_NUM, pid=strike.pid),
        HEAL_S_MAX, "the agent notices")
    stage.note(exited["at_s"] - strike.at_s,
               f"{exited['source'].split('/')[0]}: rank {VICTIM_NUM} exited, signal "
               f"{exited['body']['signal']}")
    opened = stage.wait(lambda: stage.find("IncidentOpened", task=task), HEAL_S_MAX, "an incident")
    stage.struck[opened["seq"]] = strike.at_s
    stage.note(opened["at_s"] - strike.at_s,
               f"{opened['body']['severity']}: {opened['body']['why']}; survivors finish, "
               f"rank {VICTIM_NUM} restarts on its slot")
    told = stage.told.incidents[opened["seq"]]
    stage.wait(lambda: told.stepped_s is not None, HEAL_S_MAX, "the next step")
    _healed(stage, player, strike, opened["seq"], pids)
    _return(stage, player, strike)


def _strike(stage: Stage, task: int) -> Strike:
    """SIGKILL as the victim begins the backward of an iteration's second micro-batch."""
    trace = stage.trace
    deadline_s = time.monotonic() + STRIKE_S_MAX
    trace.look()
    while time.monotonic() < deadline_s:
        new = [one for one in trace.look() if one["task"] == task and one["rank"] == VICTIM_NUM]
        if new and new[-1]["event"] == "backward":
            event = new[-1]
            forwards = trace.of(task, event["iteration"], "forward")
            if sum(one["rank"] == VICTIM_NUM for one in forwards) == 2:
                at_s = time.time()
                os.kill(event["pid"], signal.SIGKILL)
                stage.num_kills += 1
                return Strike(at_s=at_s, event=event)
        time.sleep(GLANCE_S)
    raise BrokenError(f"rank {VICTIM_NUM} was never in the middle of an iteration")


def _healed(stage: Stage, player: Player, strike: Strike, incident: int,
            before: dict[int, int]) -> None:
    one = stage.told.incidents[incident]
    assert one.rebuilt_s is not None
    assert one.stepped_s is not None
    generation = max(record["body"]["generation"]
                     for record in stage.all("Reconfigured", after=incident, task=player.task)
                     if record["at_s"] <= (one.resumed_s or 0.0))
    members = stage.all("Reconfigured", task=player.task, generation=generation)
    survivors = sorted(record["body"]["rank"] for record in members)
    same = same_pids(stage, player.task, before, survivors)
    stage.note(one.rebuilt_s - strike.at_s,
               f"{ranks(survivors)} rebuilt communicators (generation {generation}), "
               f"same pids {' '.join(str(before[rank]) for rank in survivors)}")
    _gradients(stage, player, strike, members)
    batch = player.train.num_micro_batches
    stage.note(one.stepped_s - strike.at_s,
               f"iteration {one.iteration} stepped on {batch} of {batch} micro-batches; "
               "no checkpoint read")
    stage.promise(same, "the survivors kept their processes")
    stage.promise(one.iteration == strike.iteration, "the interrupted iteration was resumed")
    stage.promise(survivors == [rank for rank in sorted(before) if rank != VICTIM_NUM],
                  "all others survived")


def same_pids(stage: Stage, task: int, before: dict[int, int], who: list[int]) -> bool:
    """Whether these ranks run in the processes that they had before."""
    now = stage.trace.pids(task)
    return all(now[rank] == before[rank] and is_running(now[rank]) for rank in who)


def _gradients(stage: Stage, player: Player, strike: Strike, members: list[Plain]) -> None:
    """What was kept, what was dealt; held against the forward passes in the trace."""
    bodies = [record["body"] for record in members]
    kept = {item for body in bodies for item in body["kept"]}
    todo = [item for body in bodies for item in body["todo"]]
    dealt = [body["rank"] for body in bodies for _ in body["dealt"]]
    stage.note(None, f"gradients of {len(kept)} micro-batches kept; rank {VICTIM_NUM}'s "
                     f"{len(dealt)} dealt, to {ranks(dealt)}")
    passes = [one["micro_batch"] for one in
              stage.trace.of(player.task, strike.iteration, "forward")]
    twice = sorted({item for item in passes if passes.count(item) > 1})
    batch = player.train.num_micro_batches
    stage.note(None, f"{len(passes)} forward passes for {batch} micro-batches: "
                     f"{len(passes) - batch} recomputed ({', '.join(map(str, twice))})")
    stage.promise(not kept & set(todo) and sorted([*kept, *todo]) == list(range(batch)),
                  "every micro-batch counts exactly once")
    stage.promise(not kept & set(twice), "nothing kept was recomputed")


def _return(stage: Stage, player: Player, strike: Strike) -> None:
    def back() -> Plain | None:
        settled = stage.all("Reconfigured", task=player.task, rank=VICTIM_NUM)
        joined = [record for record in settled if record["body"]["attempt"] > 1]
        if not joined or not full(stage, {player.task: player.num_slots}):
            return None
        return joined[0]

    record = stage.wait(back, RETURN_S_MAX, f"rank {VICTIM_NUM} comes back")
    body = record["body"]
    started = stage.find("RankStarted", task=player.task, rank=VICTIM_NUM,
                         attempt=body["attempt"])
    assert started is not None
    stage.say("RETURN", f"rank {VICTIM_NUM} back after {span(record['at_s'] - strike.at_s)} "
                        f"(pid {started['body']['pid']}), {from_memory(body)}, "
                        f"joins at {body['step_version']}")
    promise_from_memory(stage, body)


def from_memory(body: Plain) -> str:
    """Where a newcomer's state came from, in words; `body` is its Reconfigured."""
    if body["source"] < 0:
        return "its state from no replica's memory"
    return f"{scaled(body['received_bytes'], 'B')} from rank {body['source']}'s memory"


def promise_from_memory(stage: Stage, body: Plain) -> None:
    """Hold a newcomer to it."""
    stage.promise(body["source"] >= 0 and body["source"] != body["rank"]
                  and body["received_bytes"] > 0, "the newcomer's state came from a replica")


# --- the control plane is killed ----------------------------------------------------------------
def kill_control_plane(stage: Stage, players: list[Player]) -> None:
    """SIGKILL, a while without it, and what the next one finds."""
    before = {player.task: stage.trace.iteration(player.task) for player in players}
    stage.wait(lambda: all(stage.trace.iteration(task) > at for task, at in before.items()),
               HEAL_S_MAX, "a step")
    pids = {player.task: _member_pids(stage, player.task) for player in players}
    control = stage.process(CONTROL_PLANE)
    cluster = stage.client.get("/v1/state")["cluster"]
    first = {player.task: stage.trace.iteration(player.task) for player in players}
    at_s = time.time()
    processes.signal_to(control, signal.SIGKILL)
    stage.num_kills += 1
    stage.say(f"FAULT {stage.num_kills}",
              f"kill -9 {control.pid}: the control plane, for {AWAY_S:g} s")
    time.sleep(AWAY_S)
    last = {player.task: stage.trace.iteration(player.task) for player in players}
    went = ", ".join(f"{player.name} {first[player.task]} -> {last[player.task]}"
                     for player in players)
    died = sum(not is_running(pid) for one in pids.values() for pid in one.values())
    stage.note(None, f"{went}: training went on, {died} ranks died; its last state "
                     f"{_short(cluster['hash'])} at {cluster['seq']}")
    stage.promise(not processes.alive(control), "the control plane was gone")
    stage.promise(all(last[task] > first[task] for task in first),
                  "training went on without the control plane")
    _adopted(stage, cluster, pids, at_s)


def _member_pids(stage: Stage, task: int) -> dict[int, int]:
    pids = stage.trace.pids(task)
    return {rank: pids[rank] for rank in stage.members(task)}


def _adopted(stage: Stage, cluster: Plain, pids: dict[int, dict[int, int]], at_s: float) -> None:
    started = stage.restart_control_plane()
    epoch = stage.wait(lambda: stage.find("EpochStarted", after=cluster["seq"]), HEAL_S_MAX,
                       "a new epoch")
    again = demo_proof.hash_at(demo_proof.export(stage, "after-takeover.jsonl"), cluster["seq"])
    stage.note(epoch["at_s"] - at_s,
               f"epoch {epoch['epoch']} (pid {started.pid}): {epoch['seq'] - 1} records "
               f"folded, at seq {cluster['seq']} state {_short(again)} "
               + ("as before" if again == cluster["hash"] else "NOT as before"))
    same = all(same_pids(stage, task, before, list(before)) for task, before in pids.items())
    stage.note(None, f"{sum(map(len, pids.values()))} ranks adopted, same pids; no rank was "
                     "started or stopped")
    stage.promise(again == cluster["hash"], "the log folds to the state before the kill")
    stage.promise(same, "no rank was killed or restarted for the control plane")
    stage.look()
    stage.promise(not [kind for kind in ("StartRank", "StopRank", "IncidentOpened")
                       if stage.find(kind, after=cluster["seq"])],
                  "nothing was ordered because of it")
    stage.away_s = epoch["at_s"] - at_s


def _short(state_hash: str) -> str:
    return state_hash.rpartition(":")[2][:8]
