"""The acts of the demo, in order: each injects a fault and shows the recovery."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
from msgspec import Struct
from unicron.cli.cluster import processes
from unicron.cli.cluster.local_cluster import CONTROL_PLANE, agent_name
from unicron.cli.cluster.state_dir import shown
from unicron.cli.commands.request_outcome import hidden
from unicron.cli.terminal.format import Plain, lost_in_words, ms, ranks, rfc3339, scaled, span
from unicron.events.spec.job import JobSpec, Train

from . import proof
from .stage import BrokenError, Stage, is_running, kill_node

NODE = "n2"
VICTIM_NUM = 2
KILL_ITERATION_NUM = 6
AWAY_S = 2.0
START_S_MAX, HEAL_S_MAX, RETURN_S_MAX, KILL_S_MAX = 120.0, 60.0, 120.0, 120.0
FINISH_S_MAX = 900.0
POLL_S = 0.001
PHASE_S_MAX = 1.0


class Player(Struct):
    """One task of the demo: its spec, and its slots in the plan with all nodes."""

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


# --- Start. ---
def submit(stage: Stage, player: Player) -> Plain:
    """Submit the task; returns the plan that follows."""
    spec, train = player.spec, player.train
    answer = stage.client.post("/v1/tasks", msgspec.to_builtins(spec, str_keys=True))
    player.task = int(answer["task"])
    what = ", ".join(train.data) or "Python's documentation"
    stage.say(
        "submit",
        f"{spec.name} (task {player.task}), weight {spec.weight:g}, "
        f"{train.num_micro_batches} micro-batches, {train.iterations} iterations "
        f"on {what}",
    )
    return stage.wait(lambda: stage.find("PlanChosen", after=player.task), START_S_MAX, "a plan")


def say_plan(stage: Stage, plan: Plain) -> None:
    """Print the plan and its alternatives with their WAF."""
    body = plan["body"]
    slots = {one["task"]: one["slots"] for one in body["allocations"]}
    rows = [(slots, body["waf"], "chosen")]
    rows += [(dict(other["slots"]), other["waf"], other["what"]) for other in body["alternatives"]]
    stage.say("plan", f"for {body['num_slots']} slots, in weighted FLOP/s: {body['trigger']}")
    for given, waf, what in rows:
        words = "  ".join(f"{stage.name(task)} {num}" for task, num in given.items())
        stage.note(None, f"{words}  {scaled(waf, 'FLOP/s'):>12}  {what}{hidden(waf, body['waf'])}")


def start(stage: Stage, alpha: Player, beta: Player) -> None:
    """Submit both tasks; wait until both train."""
    submit(stage, alpha)
    say_plan(stage, submit(stage, beta))
    stage.note(None, "the specs declare T(x), the throughput on x slots: two cores cannot show it")
    stage.live = {alpha.task, beta.task}
    want = {player.task: player.num_slots for player in (alpha, beta)}
    stage.wait(lambda: full(stage, want), START_S_MAX, "both tasks train")
    ready = stage.all("RankReady")
    body = ready[0]["body"]
    for player in (alpha, beta):
        stage.say(
            "ranks",
            f"{player.name}: {len(stage.members(player.task))} on {nodes(stage, player.task)}",
        )
    stage.note(
        None,
        f"each a GPT of {scaled(body['num_params'], ' parameters')}, "
        f"{scaled(body['state_bytes'], 'B')} of state, "
        f"data {body['data_digest'].removeprefix('sha256:')[:12]}",
    )


def nodes(stage: Stage, task: int) -> str:
    """The nodes of the task's newest placement."""
    return " ".join(sorted(set(stage.seats(task).values())))


def full(stage: Stage, want: dict[int, int]) -> bool:
    """True if each of these tasks trains with that many ranks, all in their assigned slots."""
    return all(stage.is_full(task, num) for task, num in want.items())


# --- A rank is killed. ---
class Kill(Struct):
    """A killed rank: the time, and its last event in the trace."""

    at_s: float
    event: Plain

    @property
    def pid(self) -> int:
        return int(self.event["pid"])

    @property
    def iteration(self) -> int:
        return int(self.event["iteration"])


def kill_rank(stage: Stage, player: Player) -> None:
    """SIGKILL a rank in the middle of an iteration; wait for the step and the rank's return."""
    task = player.task
    stage.wait(
        lambda: stage.trace.iteration(task) >= KILL_ITERATION_NUM,
        KILL_S_MAX,
        f"iteration {KILL_ITERATION_NUM}",
    )
    pids = stage.trace.pids(task)
    kill = _kill(stage, task)
    settled = stage.all("Reconfigured", task=task, rank=VICTIM_NUM)
    own = [
        one for one in stage.trace.of(task, kill.iteration, "forward") if one["rank"] == VICTIM_NUM
    ]
    stage.say(
        f"FAULT {stage.num_kills}",
        f"kill -9 {kill.pid}: {player.name}'s rank {VICTIM_NUM}, in "
        f"{kill.event['event']}, micro-batch {len(own)} of "
        f"{len(settled[0]['body']['todo'])}, iteration {kill.iteration}",
    )
    exited = stage.wait(
        lambda: stage.find("RankExited", task=task, rank=VICTIM_NUM, pid=kill.pid),
        HEAL_S_MAX,
        "the agent notices",
    )
    stage.note(
        exited["at_s"] - kill.at_s,
        f"{exited['source'].split('/')[0]}: rank {VICTIM_NUM} exited, signal "
        f"{exited['body']['signal']}",
    )
    opened = stage.wait(lambda: stage.find("IncidentOpened", task=task), HEAL_S_MAX, "an incident")
    stage.killed_s[opened["seq"]] = kill.at_s
    stage.note(
        opened["at_s"] - kill.at_s,
        f"{opened['body']['severity']}: {opened['body']['why']}; survivors finish, "
        f"rank {VICTIM_NUM} restarts on its slot",
    )
    incident = stage.history.incidents[opened["seq"]]
    stage.wait(lambda: incident.stepped_s is not None, HEAL_S_MAX, "the next step")
    _healed(stage, player, kill, opened["seq"], pids)
    _return(stage, player, kill)


def _kill(stage: Stage, task: int) -> Kill:
    """SIGKILL the victim when it begins the backward pass of an iteration's second micro-batch."""
    trace = stage.trace
    deadline_s = time.monotonic() + KILL_S_MAX
    trace.look()
    while time.monotonic() < deadline_s:
        new = [one for one in trace.look() if one["task"] == task and one["rank"] == VICTIM_NUM]
        if new and new[-1]["event"] == "backward":
            event = new[-1]
            forwards = trace.of(task, event["iteration"], "forward")
            if sum(one["rank"] == VICTIM_NUM for one in forwards) == 2:
                at_s = time.time()
                os.kill(event["pid"], signal.SIGKILL)
                stage.count_kill()
                return Kill(at_s=at_s, event=event)
        time.sleep(POLL_S)
    raise BrokenError(f"rank {VICTIM_NUM} was never in the middle of an iteration")


def _healed(
    stage: Stage, player: Player, kill: Kill, incident: int, before: dict[int, int]
) -> None:
    one = stage.history.incidents[incident]
    assert one.rebuilt_s is not None
    assert one.stepped_s is not None
    generation = max(
        record["body"]["generation"]
        for record in stage.all("Reconfigured", after=incident, task=player.task)
        if record["at_s"] <= (one.resumed_s or 0.0)
    )
    members = stage.all("Reconfigured", task=player.task, generation=generation)
    # On a loaded machine the restarted rank may be ready in time to join the rebuild.
    survivors = sorted(
        record["body"]["rank"] for record in members if record["body"]["rank"] != VICTIM_NUM
    )
    same = same_pids(stage, player.task, before, survivors)
    stage.note(
        one.rebuilt_s - kill.at_s,
        f"{ranks(survivors)} rebuilt communicators (generation {generation}), "
        f"same pids {' '.join(str(before[rank]) for rank in survivors)}",
    )
    _gradients(stage, player, kill, members)
    batch = player.train.num_micro_batches
    stage.note(
        one.stepped_s - kill.at_s,
        f"iteration {one.iteration} stepped on {batch} of {batch} micro-batches; "
        "no checkpoint read",
    )
    stage.promise(same, "the survivors kept their processes")
    stage.promise(one.iteration == kill.iteration, "the interrupted iteration was resumed")
    stage.promise(
        survivors == [rank for rank in sorted(before) if rank != VICTIM_NUM], "all others survived"
    )


def same_pids(stage: Stage, task: int, before: dict[int, int], who: list[int]) -> bool:
    """True if these ranks still run in the same processes."""
    now = stage.trace.pids(task)
    return all(now[rank] == before[rank] and is_running(now[rank]) for rank in who)


def _gradients(stage: Stage, player: Player, kill: Kill, members: list[Plain]) -> None:
    """Check the kept and the reassigned micro-batches against the forward passes in the trace."""
    bodies = [record["body"] for record in members]
    kept = {item for body in bodies for item in body["kept"]}
    todo = [item for body in bodies for item in body["todo"]]
    dealt = [body["rank"] for body in bodies for _ in body["dealt"]]
    stage.note(
        None,
        f"gradients of {len(kept)} micro-batches kept; {len(dealt)} of rank "
        f"{VICTIM_NUM} reassigned to {ranks(dealt)}",
    )
    passes = [one["micro_batch"] for one in stage.trace.of(player.task, kill.iteration, "forward")]
    twice = sorted({item for item in passes if passes.count(item) > 1})
    batch = player.train.num_micro_batches
    stage.note(
        None,
        f"{len(passes)} forward passes for {batch} micro-batches: "
        f"{len(passes) - batch} recomputed ({', '.join(map(str, twice))})",
    )
    stage.promise(
        not kept & set(todo) and sorted([*kept, *todo]) == list(range(batch)),
        "every micro-batch counts exactly once",
    )
    stage.promise(not kept & set(twice), "nothing kept was recomputed")


def _return(stage: Stage, player: Player, kill: Kill) -> None:
    def back() -> Plain | None:
        settled = stage.all("Reconfigured", task=player.task, rank=VICTIM_NUM)
        joined = [record for record in settled if record["body"]["attempt"] > 1]
        if not joined or not full(stage, {player.task: player.num_slots}):
            return None
        return joined[0]

    record = stage.wait(back, RETURN_S_MAX, f"rank {VICTIM_NUM} comes back")
    body = record["body"]
    started = stage.find("RankStarted", task=player.task, rank=VICTIM_NUM, attempt=body["attempt"])
    assert started is not None
    stage.say(
        "RETURN",
        f"rank {VICTIM_NUM} back after {span(record['at_s'] - kill.at_s)} "
        f"(pid {started['body']['pid']}), {from_memory(body)}, "
        f"joins at iteration {body['step_version']}",
    )
    promise_from_memory(stage, body)


def from_memory(body: Plain) -> str:
    """The source of a new member's state. `body`: its Reconfigured."""
    if body["source"] < 0:
        return "its state did not come from another rank's memory"
    return f"{scaled(body['received_bytes'], 'B')} from rank {body['source']}'s memory"


def promise_from_memory(stage: Stage, body: Plain) -> None:
    """Check that the state came from the memory of another rank."""
    stage.promise(
        body["source"] >= 0 and body["source"] != body["rank"] and body["received_bytes"] > 0,
        "the newcomer's state came from a replica",
    )


# --- The control plane is killed. ---
def kill_control_plane(stage: Stage, players: list[Player]) -> None:
    """SIGKILL the control plane, wait, restart it, and check its state and the ranks."""
    before = {player.task: stage.trace.iteration(player.task) for player in players}
    stage.wait(
        lambda: all(stage.trace.iteration(task) > at for task, at in before.items()),
        HEAL_S_MAX,
        "a step",
    )
    pids = {player.task: _member_pids(stage, player.task) for player in players}
    control = stage.process(CONTROL_PLANE)
    cluster = stage.client.get("/v1/state")["cluster"]
    first = {player.task: stage.trace.iteration(player.task) for player in players}
    at_s = time.time()
    processes.signal_to(control, signal.SIGKILL)
    stage.count_kill()
    stage.say(
        f"FAULT {stage.num_kills}",
        f"kill -9 {control.pid}: the control plane, for at least {AWAY_S:g} s",
    )
    last = _train_on(stage, first)
    went = ", ".join(
        f"{player.name} {first[player.task]} -> {last[player.task]}" for player in players
    )
    died = sum(not is_running(pid) for one in pids.values() for pid in one.values())
    stage.note(
        None,
        f"{went}: training went on, {died} ranks died; the state before the "
        f"kill has hash {_short(cluster['hash'])} at seq {cluster['seq']}",
    )
    stage.promise(not control.is_alive, "the control plane was gone")
    stage.promise(
        all(last[task] > first[task] for task in first),
        "training went on without the control plane",
    )
    _adopted(stage, cluster, pids, at_s)


def _train_on(stage: Stage, first: dict[int, int]) -> dict[int, int]:
    """Wait AWAY_S, or longer until each task has stepped; returns the iteration of each task."""
    began_s = time.monotonic()
    while True:
        time.sleep(AWAY_S)
        last = {task: stage.trace.iteration(task) for task in first}
        if (
            all(last[task] > at for task, at in first.items())
            or time.monotonic() - began_s > HEAL_S_MAX
        ):
            return last


def _member_pids(stage: Stage, task: int) -> dict[int, int]:
    pids = stage.trace.pids(task)
    return {rank: pids[rank] for rank in stage.members(task)}


def _adopted(stage: Stage, cluster: Plain, pids: dict[int, dict[int, int]], at_s: float) -> None:
    started = stage.restart_control_plane()
    epoch = stage.wait(
        lambda: stage.find("EpochStarted", after=cluster["seq"]), HEAL_S_MAX, "a new epoch"
    )
    again = proof.hash_at(proof.export(stage, "after-takeover.jsonl"), cluster["seq"])
    stage.note(
        epoch["at_s"] - at_s,
        f"epoch {epoch['epoch']} (pid {started.pid}): {epoch['seq'] - 1} records "
        f"folded; the state at seq {cluster['seq']} has hash {_short(again)}, "
        + ("as before" if again == cluster["hash"] else "NOT as before"),
    )
    same = all(same_pids(stage, task, before, list(before)) for task, before in pids.items())
    stage.note(
        None,
        f"{sum(map(len, pids.values()))} ranks adopted, same pids; no rank was started or stopped",
    )
    stage.promise(again == cluster["hash"], "the log folds to the state before the kill")
    stage.promise(same, "no rank was killed or restarted for the control plane")
    stage.look()
    stage.promise(
        not [
            kind
            for kind in ("StartRank", "StopRank", "IncidentOpened")
            if stage.find(kind, after=cluster["seq"])
        ],
        "nothing was ordered because of it",
    )
    stage.away_s = epoch["at_s"] - at_s


def _short(state_hash: str) -> str:
    return state_hash.rpartition(":")[2][:8]


# --- A node is lost. ---
def lose_node(stage: Stage, faulted: Player, other: Player) -> None:
    """SIGKILL all processes of a node; one plan for both tasks heals the loss."""
    pids = {player.task: stage.trace.pids(player.task) for player in (faulted, other)}
    members = stage.members(faulted.task)
    gone = sorted(rank for rank, node in members.items() if node == NODE)
    left = sorted(rank for rank in members if rank not in gone)
    stage.promise(
        bool(gone) and bool(left) and NODE not in stage.members(other.task).values(),
        f"{faulted.name} has ranks on {NODE} and elsewhere, {other.name} none there",
    )
    agent = stage.process(agent_name(NODE))
    seq = stage.history.seq
    at_s = time.time()
    kill_node(stage.cluster.state, NODE)
    stage.count_kill()
    stage.say(
        f"FAULT {stage.num_kills}",
        f"kill -9 of {NODE}: its agent {agent.pid}, {faulted.name}'s {ranks(gone)} "
        "and the rest: a lost node",
    )
    _suspect_then_lost(stage, faulted, seq, at_s)
    placed = stage.wait(
        lambda: stage.find("TaskPlaced", after=seq, task=other.task),
        HEAL_S_MAX,
        "a plan for both tasks",
    )
    plan = [one for one in stage.all("PlanChosen", after=seq) if one["seq"] < placed["seq"]][-1]
    say_plan(stage, plan)
    _say_earned(stage, faulted, faulted.num_slots - 1)
    _say_earned(stage, other, other.num_slots)
    given = {one["task"]: one["slots"] for one in plan["body"]["allocations"]}
    want = {faulted.task: faulted.num_slots - 1, other.task: other.num_slots - 1}
    stage.promise(given == want, f"{other.name}, without a fault, gives a slot to {faulted.name}")
    stage.promise(
        bool(plan["body"]["alternatives"])
        and all(one["waf"] < plan["body"]["waf"] for one in plan["body"]["alternatives"]),
        "the plan names its alternatives",
    )
    stage.wait(lambda: full(stage, want), RETURN_S_MAX, "both tasks step on four slots")
    say_moves(stage, seq)
    kept = sorted(stage.members(other.task))
    stage.promise(
        same_pids(stage, faulted.task, pids[faulted.task], left)
        and same_pids(stage, other.task, pids[other.task], kept),
        "all survivors kept their processes",
    )
    stage.note(None, f"same pids: {faulted.name}'s {ranks(left)}, {other.name}'s {ranks(kept)}")


def _say_earned(stage: Stage, player: Player, num: int) -> None:
    """Print the weighted throughput that the last of `num` slots adds, by the table in the log."""
    body = stage.all("ThroughputSet", task=player.task)[-1]["body"]
    rates = dict(zip(body["sizes"], body["rates_flops"], strict=True))
    earned = player.spec.weight * (rates[num] - rates.get(num - 1, 0.0))
    stage.note(
        None,
        f"{num} slots instead of {num - 1}: {player.name} earns "
        f"{scaled(earned, 'FLOP/s')} more, weighted (T(x) {body['origin']})",
    )


def _suspect_then_lost(stage: Stage, faulted: Player, seq: int, at_s: float) -> None:
    failed = stage.wait(
        lambda: stage.find("CollectiveFailed", after=seq, task=faulted.task),
        HEAL_S_MAX,
        "a peer notices",
    )
    silent = stage.wait(
        lambda: stage.find("NodeUnreachable", after=seq, node=NODE),
        HEAL_S_MAX,
        "the node's lease ends",
    )
    opened = stage.wait(
        lambda: stage.find("IncidentOpened", after=seq, task=faulted.task),
        HEAL_S_MAX,
        "an incident",
    )
    incident = stage.history.incidents[opened["seq"]]
    stage.killed_s[incident.id] = at_s
    stage.note(
        failed["at_s"] - at_s,
        f"{faulted.name}'s rank {failed['body']['rank']}: its "
        "collective failed, so a peer is suspected",
    )
    stage.note(
        silent["at_s"] - at_s,
        f"{NODE} is silent for {span(silent['body']['silence_s'])}: "
        "the second source, so the node counts as lost",
    )
    stage.note(opened["at_s"] - at_s, f"{incident.incident.severity}: {incident.incident.why}")
    stage.wait(lambda: incident.stepped_s is not None, HEAL_S_MAX, "the next step")
    assert incident.stepped_s is not None
    batch = faulted.train.num_micro_batches
    stage.note(
        incident.stepped_s - at_s,
        f"the survivors stepped iteration {incident.iteration} on {batch} of {batch}, "
        f"{lost_in_words(incident.incident.iterations_lost)}",
    )


def say_moves(stage: Stage, seq: int) -> None:
    """Print each transition since `seq` with its cost; check that it lost no iteration."""
    for move in stage.transitions():
        if move.seq <= seq or not move.num_before:
            continue
        stage.note(
            None,
            f"{stage.name(move.task)} {move.num_before} -> {move.num_after}: stopped "
            f"for {ms(move.still_s)} at iteration {move.iteration}; next iteration "
            f"finished {ms(move.step_s)} after the stop",
        )
        stage.promise(move.lost == 0, f"{stage.name(move.task)} lost no iteration")
        for body in map(msgspec.to_builtins, move.newcomers):
            promise_from_memory(stage, body)
            slot = _order(stage, body)["body"]["slot"]
            stage.note(
                None,
                f"  rank {body['rank']} on {slot['node']}/{slot['index']}: "
                f"{from_memory(body)}{_prepared(stage, body)}",
            )


def _order(stage: Stage, body: Plain) -> Plain:
    order = stage.find("StartRank", task=body["task"], rank=body["rank"], attempt=body["attempt"])
    assert order is not None, "no rank without its order"
    return order


def _prepared(stage: Stage, body: Plain) -> str:
    """How long a new rank took to be ready, and what the other ranks did in that time."""
    ready = stage.find("RankReady", task=body["task"], rank=body["rank"], attempt=body["attempt"])
    assert ready is not None, "no member before it was ready"
    stage.trace.look()
    begin_s, end_s = _order(stage, body)["at_s"], ready["at_s"]
    others = [
        one
        for one in stage.trace.events
        if one["task"] == body["task"]
        and begin_s <= one["t"] <= end_s
        and (one["rank"], one["attempt"]) != (body["rank"], body["attempt"])
    ]
    # Any event counts: on a slow machine one iteration may take longer than the preparation, and a
    # phase of it longer than a preparation of less than a second.
    stage.promise(
        bool(others) or end_s - begin_s < PHASE_S_MAX, "a newcomer prepares while the others train"
    )
    num = len({one["iteration"] for one in others if one["event"] == "step"})
    return f"; prepared {span(end_s - begin_s)}, " + (
        f"{num} iterations trained meanwhile" if num else "in the midst of one iteration"
    )


# --- The node returns. ---
def return_node(stage: Stage, players: list[Player]) -> None:
    """Restart the node's agent; every task grows back."""
    seq = stage.history.seq
    agent = stage.cluster.start(agent_name(NODE))
    stage.wait(lambda: stage.find("NodeJoined", after=seq, node=NODE), START_S_MAX, "the node")
    stage.say("RETURN", f"{NODE} is back: agent (pid {agent.pid})")
    _grow(stage, players, seq)


def _grow(stage: Stage, players: list[Player], seq: int) -> None:
    plan = stage.wait(lambda: stage.find("PlanChosen", after=seq), HEAL_S_MAX, "a plan")
    say_plan(stage, plan)
    want = {player.task: player.num_slots for player in players}
    stage.wait(lambda: full(stage, want), RETURN_S_MAX, "all tasks are back to full strength")
    say_moves(stage, seq)


# --- An urgent task. ---
def urgent(stage: Stage, player: Player, others: list[Player]) -> None:
    """Submit a third task with a higher weight: the others shrink, it finishes, they grow back."""
    stage.look()
    seq = stage.history.seq
    say_plan(stage, submit(stage, player))
    began = stage.wait(
        lambda: stage.find("TaskProgressed", task=player.task),
        START_S_MAX,
        f"{player.name}'s first step",
    )
    say_moves(stage, seq)
    stage.note(
        began["at_s"] - stage.history.tasks[player.task].task.submitted_s,
        f"{player.name} steps, {len(stage.members(player.task))} ranks on "
        f"{nodes(stage, player.task)}",
    )
    finish(stage, player)
    ended = stage.find("TaskEnded", task=player.task)
    assert ended is not None
    _grow(stage, others, ended["seq"])


# --- Ends. ---
def cancel(stage: Stage, player: Player) -> None:
    """Cancel a task as an operator."""
    stage.live.discard(player.task)
    asked = stage.client.post(
        f"/v1/tasks/{player.task}/cancel", {"reason": "the demo has seen enough"}
    )
    ended = stage.wait(lambda: stage.find("TaskEnded", task=player.task), HEAL_S_MAX, "its end")
    asked_s = next(one["at_s"] for one in stage.records if one["seq"] == asked["seq"])
    num_done = len(stage.losses(player.task))
    stage.say(
        "CANCEL",
        f"{player.name} after {num_done} iterations, ended {ms(ended['at_s'] - asked_s)} later",
    )
    stage.promise(ended["body"]["outcome"] == "cancelled", f"{player.name} was cancelled")
    stage.promise(
        sorted(stage.losses(player.task)) == list(range(num_done)),
        f"every iteration of {player.name} has its loss in the log",
    )


def finish(stage: Stage, player: Player) -> None:
    """Wait for a task's end, and check the result."""
    train = player.train
    stage.live.discard(player.task)
    ended = stage.wait(lambda: stage.find("TaskEnded", task=player.task), FINISH_S_MAX, "the end")
    past = stage.history.tasks[player.task]
    output = Path(train.output) / "latest"
    stage.say(
        "FINISH",
        f"{player.name} {len(past.losses)}/{train.iterations} at "
        f"{rfc3339(ended['at_s'])}, model in {shown(output)}",
    )
    stage.promise(ended["body"]["outcome"] == "finished", f"{player.name} finished")
    stage.promise(
        sorted(past.losses) == list(range(train.iterations)),
        f"every iteration of {player.name} has its loss in the log",
    )
    stage.promise(
        {
            record["body"]["micro_batches"]
            for record in stage.records
            if record["kind"] == "TaskProgressed" and record["body"]["task"] == player.task
        }
        == {train.num_micro_batches},
        f"the global batch of {player.name} never changed",
    )
    stage.promise(output.exists(), f"the model of {player.name} was written")
