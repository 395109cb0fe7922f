"""The demo's later acts: a node is lost and returns, an urgent task comes, one is cancelled."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from . import processes
from .demo_acts import (
    HEAL_S_MAX,
    RETURN_S_MAX,
    START_S_MAX,
    Player,
    from_memory,
    full,
    nodes,
    promise_from_memory,
    same_pids,
    say_plan,
    submit,
)
from .demo_stage import Stage
from .figures import lost_in_words, ms, ranks, rfc3339, scaled, span
from .local_cluster import agent_name
from .moves import moves
from .state_dir import shown

Plain = dict[str, Any]
NODE = "n2"
FINISH_S_MAX = 300.0


# --- a node is lost -----------------------------------------------------------------------------
def lose_node(stage: Stage, hurt: Player, other: Player) -> None:
    """SIGKILL to an agent, and so to its ranks; one plan for both tasks heals it."""
    pids = {player.task: stage.trace.pids(player.task) for player in (hurt, other)}
    members = stage.members(hurt.task)
    gone = sorted(rank for rank, node in members.items() if node == NODE)
    left = sorted(rank for rank in members if rank not in gone)
    stage.promise(bool(gone) and bool(left) and NODE not in
                  stage.members(other.task).values(),
                  f"{hurt.name} has ranks on {NODE} and elsewhere, {other.name} none there")
    agent = stage.process(agent_name(NODE))
    seq = stage.told.seq
    at_s = time.time()
    processes.signal_to(agent, signal.SIGKILL)
    stage.num_kills += 1
    stage.say(f"FAULT {stage.num_kills}",
              f"kill -9 {agent.pid}: the agent of {NODE}; {hurt.name}'s {ranks(gone)} "
              "die with it: a lost node")
    _suspect_then_lost(stage, hurt, seq, at_s)
    placed = stage.wait(lambda: stage.find("TaskPlaced", after=seq, task=other.task),
                        HEAL_S_MAX, "a plan for both tasks")
    plan = [one for one in stage.all("PlanChosen", after=seq) if one["seq"] < placed["seq"]][-1]
    say_plan(stage, plan)
    _say_earned(stage, hurt, hurt.num_slots - 1)
    _say_earned(stage, other, other.num_slots)
    given = {one["task"]: one["slots"] for one in plan["body"]["allocations"]}
    want = {hurt.task: hurt.num_slots - 1, other.task: other.num_slots - 1}
    stage.promise(given == want, f"{other.name}, unhurt, gives a slot to {hurt.name}")
    stage.promise(bool(plan["body"]["alternatives"])
                  and all(one["waf"] < plan["body"]["waf"]
                          for one in plan["body"]["alternatives"]),
                  "the plan names what it beat")
    stage.wait(lambda: full(stage, want), RETURN_S_MAX, "both tasks step on four slots")
    say_moves(stage, seq)
    kept = sorted(stage.members(other.task))
    stage.promise(same_pids(stage, hurt.task, pids[hurt.task], left)
                  and same_pids(stage, other.task, pids[other.task], kept),
                  "all survivors kept their processes")
    stage.note(None, f"same pids: {hurt.name}'s {ranks(left)}, {other.name}'s {ranks(kept)}")


def _say_earned(stage: Stage, player: Player, num: int) -> None:
    """What the last of that many slots earns the task, weighted, by its table in the log."""
    body = stage.all("ThroughputSet", task=player.task)[-1]["body"]
    rates = dict(zip(body["sizes"], body["rates_flops"], strict=True))
    earned = player.spec.weight * (rates[num] - rates.get(num - 1, 0.0))
    stage.note(None, f"slot {num} earns {player.name} {scaled(earned, 'FLOP/s')}, as "
                     f"{body['origin']}")


def _suspect_then_lost(stage: Stage, hurt: Player, seq: int, at_s: float) -> None:
    failed = stage.wait(lambda: stage.find("CollectiveFailed", after=seq, task=hurt.task),
                        HEAL_S_MAX, "a peer notices")
    silent = stage.wait(lambda: stage.find("NodeSilenced", after=seq, node=NODE), HEAL_S_MAX,
                        "the node's lease ends")
    opened = stage.wait(lambda: stage.find("IncidentOpened", after=seq, task=hurt.task),
                        HEAL_S_MAX, "an incident")
    told = stage.told.incidents[opened["seq"]]
    stage.struck[told.id] = at_s
    stage.note(failed["at_s"] - at_s, f"{hurt.name}'s rank {failed['body']['rank']}: its "
                                      "collective failed: suspect")
    stage.note(silent["at_s"] - at_s, f"{NODE} silent for {span(silent['body']['silence_s'])}: "
                                      "the second source, lost")
    stage.note(opened["at_s"] - at_s, f"{told.severity}: {told.why}")
    stage.wait(lambda: told.stepped_s is not None, HEAL_S_MAX, "the next step")
    assert told.stepped_s is not None
    batch = hurt.train.num_micro_batches
    stage.note(told.stepped_s - at_s,
               f"the survivors stepped iteration {told.iteration} on {batch} of {batch}, "
               f"{lost_in_words(told.iterations_lost)}")


def say_moves(stage: Stage, seq: int) -> None:
    """Each transition since, and what it cost; a promise that it lost nothing."""
    for move in moves(stage.records, seq):
        if not move.num_before:
            continue
        stage.note(None, f"{stage.name(move.task)} {move.num_before} -> {move.num_after}: stood "
                         f"for {ms(move.still_s)} at iteration {move.iteration}; its next step was "
                         f"done {ms(move.step_s)} after it stopped")
        stage.promise(move.lost == 0, f"{stage.name(move.task)} lost no iteration")
        for body in move.newcomers:
            promise_from_memory(stage, body)
            stage.note(None, f"  rank {body['rank']} on {_place(stage, body)}: "
                             f"{from_memory(body)}{_prepared(stage, body)}")


def _place(stage: Stage, body: Plain) -> str:
    order = _order(stage, body)
    return f"{order['body']['slot']['node']}/{order['body']['slot']['index']}"


def _order(stage: Stage, body: Plain) -> Plain:
    order = stage.find("StartRank", task=body["task"], rank=body["rank"], attempt=body["attempt"])
    assert order is not None, "no rank without its order"
    return order


def _prepared(stage: Stage, body: Plain) -> str:
    """How long the newcomer took to be ready, and what its task did meanwhile."""
    ready = stage.find("RankReady", task=body["task"], rank=body["rank"], attempt=body["attempt"])
    assert ready is not None, "no member before it was ready"
    stage.trace.look()
    begin_s, end_s = _order(stage, body)["at_s"], ready["at_s"]
    others = [one for one in stage.trace.events
              if one["task"] == body["task"] and begin_s <= one["t"] <= end_s
              and (one["rank"], one["attempt"]) != (body["rank"], body["attempt"])]
    # Not by whole iterations: on a slow machine one may take longer than the newcomer.
    stage.promise(bool(others), "a newcomer prepares while the others train")
    num = len({one["iteration"] for one in others if one["event"] == "step"})
    return (f"; prepared {span(end_s - begin_s)}, "
            + (f"{num} iterations trained meanwhile" if num else "in the midst of one iteration"))


# --- it returns ---------------------------------------------------------------------------------
def return_node(stage: Stage, players: list[Player]) -> None:
    """Start its agent again; every task grows back."""
    seq = stage.told.seq
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


# --- an urgent task -----------------------------------------------------------------------------
def urgent(stage: Stage, player: Player, others: list[Player]) -> None:
    """A third task outweighs the others: they shrink, it runs and finishes, they grow again."""
    stage.look()
    seq = stage.told.seq
    say_plan(stage, submit(stage, player))
    began = stage.wait(lambda: stage.find("TaskProgressed", task=player.task), START_S_MAX,
                       f"{player.name}'s first step")
    say_moves(stage, seq)
    stage.note(began["at_s"] - stage.told.tasks[player.task].submitted_s,
               f"{player.name} steps, {len(stage.members(player.task))} ranks on "
               f"{nodes(stage, player.task)}")
    finish(stage, player)
    ended = stage.find("TaskEnded", task=player.task)
    assert ended is not None
    _grow(stage, others, ended["seq"])


# --- ends ---------------------------------------------------------------------------------------
def cancel(stage: Stage, player: Player) -> None:
    """An operator ends a task for good."""
    stage.live.discard(player.task)
    asked = stage.client.post(f"/v1/tasks/{player.task}/cancel",
                              {"reason": "the demo has seen enough"})
    ended = stage.wait(lambda: stage.find("TaskEnded", task=player.task), HEAL_S_MAX, "its end")
    asked_s = next(one["at_s"] for one in stage.records if one["seq"] == asked["seq"])
    num_done = len(stage.losses(player.task))
    stage.say("CANCEL", f"{player.name} after {num_done} iterations, ended "
                        f"{ms(ended['at_s'] - asked_s)} later")
    stage.promise(ended["body"]["outcome"] == "cancelled", f"{player.name} was cancelled")
    stage.promise(sorted(stage.losses(player.task)) == list(range(num_done)),
                  f"every iteration of {player.name} has its loss in the log")


def finish(stage: Stage, player: Player) -> None:
    """Wait for a task's end, and hold it to what was asked for."""
    train = player.train
    stage.live.discard(player.task)
    ended = stage.wait(lambda: stage.find("TaskEnded", task=player.task), FINISH_S_MAX, "the end")
    past = stage.told.tasks[player.task]
    output = Path(train.output) / "latest"
    stage.say("FINISH", f"{player.name} {len(past.losses)}/{train.iterations} at "
                        f"{rfc3339(ended['at_s'])}, model in {shown(output)}")
    stage.promise(ended["body"]["outcome"] == "finished", f"{player.name} finished")
    stage.promise(sorted(past.losses) == list(range(train.iterations)),
                  f"every iteration of {player.name} has its loss in the log")
    stage.promise(set(past.micro_batches) == {train.num_micro_batches},
                  f"the global batch of {player.name} never changed")
    stage.promise(output.exists(), f"the model of {player.name} was written")
