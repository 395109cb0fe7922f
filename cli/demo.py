"""`demo`: train a real model, kill a rank, then the control plane; prove that nothing was lost.

It does what a user does with `up`, `submit`, `kill -9`, `tail`, `export`, `replay`; and measures.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .. import __version__
from ..events.errors import UsageError
from ..events.spec import JobSpec
from . import demo_proof, job_file, processes, say, up
from .demo_stage import BrokenError, Stage, is_running
from .figures import ms, ranks, rfc3339, scaled, span
from .local_cluster import CONTROL_PLANE, shown
from .processes import Process

Plain = dict[str, Any]
FOLDER = Path("build") / "demo"
EXAMPLE = Path(__file__).resolve().parent.parent / "deploy" / "examples" / "demo.yaml"
NUM_RANKS = 4
VICTIM_NUM = 2
STRIKE_SHARE = 0.15
"""Where in the training the first fault strikes."""
AWAY_S = 3.0
START_S_MAX, HEAL_S_MAX, RETURN_S_MAX, FINISH_S_MAX = 120.0, 60.0, 120.0, 300.0
STRIKE_S_MAX = 120.0
GLANCE_S = 0.001


def demo(*, keep: bool, num_iterations: int) -> int:
    """Run it; 0 when everything was as promised. Raises UsageError before anything is started."""
    _check()
    spec = _spec(num_iterations)
    stage = Stage(FOLDER)
    kept = False
    stage.open()
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        _Demo(stage, spec).run()
        kept = keep
    except BrokenError as error:
        stage.promise(False, str(error))
    finally:
        stage.close(keep=kept)
    return _end(stage, keep=kept)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _check() -> None:
    for package in ("torch", "megatron-core"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            raise UsageError(f"{package} is not installed",
                             "make setup, or pip install 'unicron[train]'") from None
    if not EXAMPLE.exists():
        raise UsageError("deploy/examples/demo.yaml is not there",
                         "run unicron demo from a checkout")


def _spec(num_iterations: int) -> JobSpec:
    spec = job_file.load(EXAMPLE)
    assert spec.train is not None
    train = msgspec.structs.replace(
        spec.train, iterations=num_iterations, output=str((FOLDER / spec.name).absolute()))
    return msgspec.structs.replace(spec, train=train)


def _end(stage: Stage, *, keep: bool) -> int:
    num_kills = "2 kills" if not stage.broken else "NOT as promised"
    lost = sum(task.outcome != "finished" for task in stage.told.tasks.values())
    read = sum(one.ckpt_read for one in stage.told.incidents.values())
    gone = sum(one.iterations_lost for one in stage.told.incidents.values())
    stage.say("total", f"{num_kills}, {gone} iterations lost, {read} checkpoints read, "
                       f"{lost} tasks unfinished")
    for what in stage.broken:
        stage.note(None, f"broken: {what}")
    place = shown(stage.state.path)
    if keep:
        up.up(stage.state, up.Asked(), detach=True)
        say.talk("hint: break it yourself: submit again, then kill -9 any pid that you see")
    else:
        stage.say("next", "unicron demo --keep (break it yourself)")
        stage.note(None, f"unicron replay {place}/log.jsonl --step")
    return int(bool(stage.broken))


class _Strike(Struct):
    """The kill of a rank, and where it struck."""

    at_s: float
    pid: int
    iteration: int
    event: Plain


class _Demo:
    """The acts, in order."""

    def __init__(self, stage: Stage, spec: JobSpec) -> None:
        self.stage, self.spec = stage, spec
        assert spec.train is not None
        self.train = spec.train
        self.task = 0
        self.pids: dict[int, int] = {}

    def run(self) -> None:
        """All of it. Raises BrokenError."""
        stage = self.stage
        stage.say("setup", f"unicron {__version__}, Python {platform.python_version()}, torch "
                           f"{metadata.version('torch')}, megatron-core "
                           f"{metadata.version('megatron-core')}, {os.cpu_count()} cores")
        stage.start()
        place = shown(stage.state.path)
        stage.say("look", f"second terminal: .venv/bin/unicron status -w --state {place}")
        stage.note(None, f"                 .venv/bin/unicron tail -f --state {place}")
        self._submit()
        strike = self._kill_rank()
        self._return(strike)
        away = self._kill_control_plane()
        self._finish()
        demo_proof.timeline(stage, strike.at_s, away)
        demo_proof.loss(stage, stage.told, self.task)
        path = demo_proof.export(stage, "log.jsonl")
        demo_proof.verify(stage, path)
        twins = demo_proof.Twins(stage, self.spec)
        try:
            twins.run(Path(self.train.output) / "latest")
        finally:
            twins.stop()

    # --- acts -----------------------------------------------------------------------------------
    def _submit(self) -> None:
        stage, train = self.stage, self.train
        answer = stage.client.post("/v1/tasks", msgspec.to_builtins(self.spec, str_keys=True))
        self.task = int(answer["task"])
        what = ", ".join(train.data) or "Python's own documentation"
        stage.say("submit", f"{self.spec.name} (task {self.task}), {train.num_micro_batches} "
                            f"micro-batches, {train.iterations} iterations on {what}")
        plan = stage.wait(lambda: stage.find("PlanChosen"), START_S_MAX, "a plan")["body"]
        beaten = plan["alternatives"][0] if plan["alternatives"] else None
        stage.say("plan", f"{plan['allocations'][0]['slots']} of {plan['num_slots']} slots: "
                          f"{scaled(plan['waf'], 'FLOP/s')} weighted, by the model"
                  + (f"; next, {beaten['what']}: {scaled(beaten['waf'], 'FLOP/s')}"
                     if beaten else ""))
        ready = stage.wait(lambda: self._ready(NUM_RANKS), START_S_MAX, "four ranks are ready")
        body = ready[0]["body"]
        stage.say("ranks", f"{len(ready)} ready: GPT of {scaled(body['num_params'], ' parameters')}"
                           f", {scaled(body['state_bytes'], 'B')} of state each, "
                           f"data {body['data_digest'].removeprefix('sha256:')[:12]}")
        stage.wait(lambda: stage.find("TaskProgressed") or None, START_S_MAX, "the first step")

    def _ready(self, num: int) -> list[Plain] | None:
        found = self.stage.all("RankReady", task=self.task)
        return found if len(found) >= num else None

    def _kill_rank(self) -> _Strike:
        stage = self.stage
        target = max(int(self.train.iterations * STRIKE_SHARE), 3)
        stage.wait(lambda: stage.trace.iteration(self.task) >= target or None, STRIKE_S_MAX,
                   f"iteration {target}")
        self.pids = stage.trace.pids(self.task)
        strike = self._strike()
        done = stage.trace.of(self.task, strike.iteration, "forward")
        own = [one for one in done if one["rank"] == VICTIM_NUM]
        todo = self._todo()
        stage.say("FAULT 1", f"kill -9 {strike.pid}: {self.spec.name}'s rank {VICTIM_NUM}, in "
                             f"{strike.event['event']}, micro-batch {len(own)} of {todo}, "
                             f"iteration {strike.iteration}")
        exited = stage.wait(
            lambda: stage.find("RankExited", task=self.task, rank=VICTIM_NUM, pid=strike.pid),
            HEAL_S_MAX, "the agent notices")
        stage.note(exited["occurred_s"] - strike.at_s,
                   f"{exited['source'].split('/')[0]}: rank {VICTIM_NUM} exited, signal "
                   f"{exited['body']['signal']}")
        opened = stage.wait(lambda: stage.find("IncidentOpened", task=self.task),
                            HEAL_S_MAX, "an incident")
        stage.note(opened["at_s"] - strike.at_s,
                   f"{opened['body']['severity']}: {opened['body']['why']}; survivors finish, "
                   f"rank {VICTIM_NUM} restarts on its slot")
        stage.wait(lambda: self._stepped(opened["seq"]), HEAL_S_MAX, "the next step")
        self._healed(strike, opened["seq"])
        return strike

    def _stepped(self, incident: int) -> bool | None:
        return self.stage.told.incidents[incident].stepped_s is not None or None

    def _todo(self) -> int:
        settled = self.stage.all("Reconfigured", task=self.task, rank=VICTIM_NUM)
        return len(settled[0]["body"]["todo"])

    def _strike(self) -> _Strike:
        """SIGKILL as the victim begins the backward of an iteration's second micro-batch."""
        trace = self.stage.trace
        deadline_s = time.monotonic() + STRIKE_S_MAX
        trace.look()
        while time.monotonic() < deadline_s:
            new = [one for one in trace.look() if one["rank"] == VICTIM_NUM]
            if new and new[-1]["event"] == "backward":
                event = new[-1]
                forwards = trace.of(self.task, event["iteration"], "forward")
                if sum(one["rank"] == VICTIM_NUM for one in forwards) == 2:
                    at_s = time.time()
                    os.kill(event["pid"], signal.SIGKILL)
                    return _Strike(at_s=at_s, pid=event["pid"], iteration=event["iteration"],
                                   event=event)
            time.sleep(GLANCE_S)
        raise BrokenError(f"rank {VICTIM_NUM} was never in the middle of an iteration")

    def _healed(self, strike: _Strike, incident: int) -> None:
        stage, one = self.stage, self.stage.told.incidents[incident]
        generation = max(record["body"]["generation"]
                         for record in stage.all("Reconfigured", after=incident, task=self.task)
                         if record["at_s"] <= (one.resumed_s or 0.0))
        members = stage.all("Reconfigured", task=self.task, generation=generation)
        survivors = sorted(record["body"]["rank"] for record in members)
        pids = stage.trace.pids(self.task)
        same = all(pids[rank] == self.pids[rank] and is_running(pids[rank])
                   for rank in survivors)
        assert one.rebuilt_s is not None
        assert one.stepped_s is not None
        stage.note(one.rebuilt_s - strike.at_s,
                   f"{ranks(survivors)} rebuilt communicators (generation {generation}), "
                   f"same pids {' '.join(str(pids[rank]) for rank in survivors)}")
        self._gradients(strike, members)
        batch = self.train.num_micro_batches
        stage.note(one.stepped_s - strike.at_s,
                   f"iteration {one.iteration} stepped on {batch} of {batch} micro-batches; "
                   "no checkpoint read")
        stage.promise(same, "the survivors kept their processes")
        stage.promise(one.iteration == strike.iteration, "the interrupted iteration was resumed")
        stage.promise(survivors == [rank for rank in range(NUM_RANKS) if rank != VICTIM_NUM],
                      "all others survived")

    def _gradients(self, strike: _Strike, members: list[Plain]) -> None:
        """What was kept, what was dealt; held against the forward passes in the trace."""
        stage, bodies = self.stage, [record["body"] for record in members]
        kept = {item for body in bodies for item in body["kept"]}
        todo = [item for body in bodies for item in body["todo"]]
        dealt = [body["rank"] for body in bodies for _ in body["dealt"]]
        stage.note(None, f"gradients of {len(kept)} micro-batches kept; rank {VICTIM_NUM}'s "
                         f"{len(dealt)} dealt, to {ranks(dealt)}")
        passes = [one["micro_batch"] for one in
                  stage.trace.of(self.task, strike.iteration, "forward")]
        twice = sorted({item for item in passes if passes.count(item) > 1})
        batch = self.train.num_micro_batches
        stage.note(None, f"{len(passes)} forward passes for {batch} micro-batches: "
                         f"{len(passes) - batch} recomputed ({', '.join(map(str, twice))})")
        stage.promise(not kept & set(todo) and sorted([*kept, *todo]) == list(range(batch)),
                      "every micro-batch counts exactly once")
        stage.promise(not kept & set(twice), "nothing kept was recomputed")

    def _return(self, strike: _Strike) -> None:
        stage = self.stage

        def back() -> Plain | None:
            settled = stage.all("Reconfigured", task=self.task, rank=VICTIM_NUM)
            joined = [record for record in settled if record["body"]["attempt"] > 1]
            if not joined or stage.find("Resume", after=joined[0]["seq"]) is None:
                return None
            return joined[0]

        record = stage.wait(back, RETURN_S_MAX, f"rank {VICTIM_NUM} comes back")
        body = record["body"]
        started = stage.find("RankStarted", task=self.task, rank=VICTIM_NUM,
                             attempt=body["attempt"])
        assert started is not None
        stage.say("RETURN", f"rank {VICTIM_NUM} back after {span(record['at_s'] - strike.at_s)} "
                            f"(pid {started['body']['pid']}), "
                            f"{scaled(body['received_bytes'], 'B')} from rank {body['source']}'s "
                            f"memory, joins at {body['step_version']}")
        stage.promise(body["source"] in range(NUM_RANKS) and body["source"] != VICTIM_NUM
                      and body["received_bytes"] > 0, "the newcomer's state came from a replica")

    def _kill_control_plane(self) -> tuple[str, ...]:
        stage = self.stage
        before = stage.trace.iteration(self.task)
        stage.wait(lambda: stage.trace.iteration(self.task) > before or None, HEAL_S_MAX, "a step")
        pids = stage.trace.pids(self.task)
        control = stage.process(CONTROL_PLANE)
        cluster = stage.client.get("/v1/state")["cluster"]
        first = stage.trace.iteration(self.task)
        at_s = time.time()
        processes.signal_to(control, signal.SIGKILL)
        stage.say("FAULT 2", f"kill -9 {control.pid}: the control plane, for {AWAY_S:g} s")
        time.sleep(AWAY_S)
        last = stage.trace.iteration(self.task)
        stage.note(None, f"iteration {first} -> {last}: training went on, "
                         f"{sum(not is_running(pid) for pid in pids.values())} ranks died; "
                         f"its last state {_short(cluster['hash'])} at {cluster['seq']}")
        stage.promise(not processes.alive(control), "the control plane was gone")
        stage.promise(last > first, "training went on without the control plane")
        started = stage.restart_control_plane()
        return self._adopted(started, cluster, pids, at_s)

    def _adopted(self, started: Process, cluster: Plain, pids: dict[int, int],
                 at_s: float) -> tuple[str, ...]:
        stage = self.stage
        epoch = stage.wait(lambda: stage.find("EpochStarted", after=cluster["seq"]), HEAL_S_MAX,
                           "a new epoch")
        path = demo_proof.export(stage, "after-takeover.jsonl")
        again = demo_proof.hash_at(path, cluster["seq"])
        now = stage.client.get("/v1/state")["cluster"]
        path_now = demo_proof.export(stage, "after-takeover-2.jsonl")
        agrees = demo_proof.hash_at(path_now, now["seq"]) == now["hash"]
        stage.note(epoch["at_s"] - at_s,
                   f"epoch {epoch['epoch']} (pid {started.pid}): {epoch['seq'] - 1} records "
                   f"folded, at seq {cluster['seq']} state {_short(again)} "
                   + ("as before" if again == cluster["hash"] else "NOT as before"))
        same = stage.trace.pids(self.task) == pids and all(map(is_running, pids.values()))
        stage.note(None, f"{len(pids)} ranks adopted, same pids; no rank was started or stopped")
        stage.promise(again == cluster["hash"], "the log folds to the state before the kill")
        stage.promise(agrees, "the new control plane's state is the fold of the log")
        stage.promise(same, "no rank was killed or restarted for the control plane")
        stage.look()
        stage.promise(not [kind for kind in ("StartRank", "StopRank", "IncidentOpened")
                           if stage.find(kind, after=cluster["seq"])],
                      "nothing was ordered because of it")
        return ("-", "control plane killed", "-", "-", "-", ms(epoch["at_s"] - at_s), "-", "0")

    def _finish(self) -> None:
        stage, train = self.stage, self.train
        ended = stage.wait(lambda: stage.find("TaskEnded", task=self.task), FINISH_S_MAX,
                           "the end")
        past = stage.told.tasks[self.task]
        output = Path(train.output) / "latest"
        stage.say("FINISH", f"{self.spec.name} {len(past.losses)}/{train.iterations} at "
                            f"{rfc3339(ended['at_s'])}, model in {shown(output)}")
        stage.promise(ended["body"]["outcome"] == "finished", "the task finished")
        stage.promise(sorted(past.losses) == list(range(train.iterations)),
                      "every iteration has its loss in the log")
        stage.promise(set(past.micro_batches) == {train.num_micro_batches},
                      "the global batch never changed")
        stage.promise(output.exists(), "the model was written")
        for one in stage.told.incidents.values():
            stage.promise(one.iterations_lost == 0 and not one.ckpt_read,
                          "no iteration was lost, no checkpoint read")
            stage.say("healed", f"inc-{one.id} {one.outcome}: pause {ms(one.pause_s)}, "
                                f"{one.iterations_lost} iterations lost, kept {one.kept}, "
                                f"dealt {one.dealt}")


def _short(state_hash: str) -> str:
    return state_hash.rpartition(":")[2][:8]

