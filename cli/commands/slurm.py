"""`slurm`: a cluster on nodes of Slurm. The scripts of deploy/slurm use most of these commands."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ...control_plane.api.needs import ENDED
from ...events.errors import UnicronError, UsageError
from ..cluster.answers import Interrupted
from ..cluster.client import Client, Refused, Unable, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain
from .operate import reason_or_user

JOIN_S_MAX = 120.0
"""How long the agents of an allocation may take to join."""
LEAVE_S_MAX = 240.0
"""How long tasks may take to leave nodes that Slurm takes back."""
SLURM_S_MAX = 30.0
"""How long a command of Slurm may take; `sinfo` waits while slurmctld is away."""
POLL_S = 1.0
REASON_CHARS_MAX = 200
BY_SLURM, BY_JOB, BY_UNICRON = "slurm: ", "slurm job ", "unicron: "
"""How reasons begin: of a drain that Slurm has caused, of one by a job that ends, and, in Slurm, of
one that Unicron has caused."""
OUT_OF_USE = ("drain", "drng", "down", "fail")


class SlurmNode(Struct, frozen=True):
    """A node as Slurm knows it: its name there, `%T` and `%E` of sinfo."""

    name: str
    state: str
    reason: str

    @property
    def is_out(self) -> bool:
        """Whether Slurm gives it to no job: drained, draining, down or failing."""
        return self.state.startswith(OUT_OF_USE)


class Step(Struct, frozen=True):
    """What `follow` does next to a node of Unicron, or, if it names one, of Slurm."""

    what: str
    """drain, undrain: in Unicron. DRAIN, RESUME: in Slurm."""
    node: str
    reason: str = ""
    down: bool = False
    """Slurm says that the node is down, and Unicron does not hear it."""


def unicron_name(name: str) -> str:
    """The name in Unicron of a node of Slurm, as deploy/slurm/agent.sh makes it."""
    return re.sub(r"[^a-z0-9.-]", "-", name.lower())


def parse_nodes(listing: str) -> dict[str, SlurmNode]:
    """The nodes of `sinfo -h -N -o '%N|%T|%E'`, by their names in Unicron."""
    lines = (line.split("|", 2) for line in listing.splitlines() if line.count("|") >= 2)
    return {unicron_name(name): SlurmNode(name, state, reason) for name, state, reason in lines}


def steps(
    slurm: Mapping[str, SlurmNode], nodes: Sequence[Plain], *, both_ways: bool
) -> Iterator[Step]:
    """What must change so that Slurm and Unicron agree on the nodes that both know.

    `both_ways`: a node that Unicron has quarantined is drained in Slurm, until that ends."""
    for node in nodes:
        there = slurm.get(node["id"])
        if there is None:
            continue
        by_unicron = there.reason.startswith(BY_UNICRON)
        down = (
            there.state.startswith("down") and node["contact"] == "unreachable" and not node["down"]
        )
        if there.is_out and not by_unicron and (down or not node["drained"]):
            reason = f"{BY_SLURM}{there.state.rstrip('*')}, {there.reason}"
            yield Step("drain", node["id"], reason[:REASON_CHARS_MAX], down)
        elif not there.is_out and node["drained"] and node["drain_reason"].startswith(BY_SLURM):
            yield Step("undrain", node["id"], f"{BY_SLURM}{there.state}")
        if both_ways and node["quarantine"] and not there.is_out:
            yield Step("DRAIN", there.name, f"{BY_UNICRON}{node['quarantine']['why']}")
        elif both_ways and not node["quarantine"] and there.is_out and by_unicron:
            yield Step("RESUME", there.name)


def follow(
    state: StateDir, url: Urls, tasks: Sequence[int] | None, *, both_ways: bool, every: float
) -> int:
    """Keep Unicron's nodes as Slurm's until the tasks have ended; without tasks, for ever.

    Returns 0 if all of them finished, else 1. While slurmctld or the control plane is away, it
    waits for it."""
    client, failed, away = connect(state, url), set[Step](), ""
    while True:
        slurm, why = _slurm_nodes()
        if why != away:
            console.talk(f"slurm: {why}; nodes stay as they are" if why else "slurm: answers again")
            away = why
        try:
            view: Plain = client.get("/v1/state")
            for step in steps(slurm, view["nodes"], both_ways=both_ways):
                if step not in failed:
                    console.talk(f"{step.what} {step.node}  {step.reason}".rstrip())
                    if why := _take(client, step):
                        console.talk(f"{step.what} {step.node} failed: {why}")
                        failed.add(step)
        except (Interrupted, Unable, Unreachable):
            client = _again(state, url, client)
        else:
            found = {task["id"]: task for task in view["tasks"] if task["id"] in (tasks or ())}
            if tasks and all(task["state"] in ENDED for task in found.values()):
                for task in found.values():
                    console.talk(f"task {task['id']}  {task['name']} {task['state']}")
                return int(any(task["state"] != "finished" for task in found.values()))
        time.sleep(every)


def enter(state: StateDir, url: Urls, names: Sequence[str]) -> None:
    """Wait until the agents on these nodes of Slurm have joined, and allow tasks on nodes from
    which an earlier job has taken them. Raises UnicronError if none joins."""
    client, wanted = connect(state, url), [unicron_name(name) for name in names]
    deadline_s = time.monotonic() + JOIN_S_MAX
    while True:
        nodes = [node for node in client.nodes() if node["id"] in wanted]
        joined = [node for node in nodes if node["contact"] == "heard"]
        if len(joined) == len(wanted) or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    for node in joined:
        if node["drained"] and node["drain_reason"].startswith(BY_JOB):
            _take(client, Step("undrain", node["id"], "its agent is back"))
    slots = sum(node["num_slots"] for node in joined)
    console.talk(f"{len(joined)} of {len(wanted)} nodes have joined, with {slots} slots")
    if missing := set(wanted) - {node["id"] for node in joined}:
        console.talk(f"not joined within {JOIN_S_MAX:g} s: {', '.join(sorted(missing))}")
    if not joined:
        raise UnicronError(
            "no node has joined", f"their errors: {state.path / 'slurm' / 'agent-NODE.log'}"
        )


def leave(state: StateDir, url: Urls, names: Sequence[str], reason: str) -> None:
    """Drain these nodes of Slurm, and wait until no task is there. Raises UnicronError if one is
    still there after LEAVE_S_MAX."""
    client, wanted = connect(state, url), [unicron_name(name) for name in names]
    deadline_s = time.monotonic() + LEAVE_S_MAX
    while True:
        nodes = [node for node in client.nodes() if node["id"] in wanted]
        for node in nodes:
            if not node["drained"]:
                _take(client, Step("drain", node["id"], reason_or_user(reason)))
        # A task that waits for its checkpoint is there until its processes have ended.
        there = {
            node["id"]
            for node in nodes
            if node["contact"] == "heard" and any(slot["task"] for slot in node["slots"])
        }
        if not there and all(node["drained"] for node in nodes):
            console.talk(f"no task is on {', '.join(wanted)}")
            return
        if time.monotonic() > deadline_s:
            raise UnicronError(f"tasks are still on {', '.join(sorted(there))}")
        time.sleep(POLL_S)


def grow(state: StateDir, url: Urls, num: int, options: Sequence[str] | None) -> None:
    """Submit a job whose nodes join the cluster. `options`: of sbatch. Raises UsageError."""
    sbatch = shutil.which("sbatch")
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "join.sbatch"
    if sbatch is None:
        raise UsageError("there is no sbatch on this host", "run it on a login node of Slurm")
    connect(state, url).get("/v1/state")
    ran = subprocess.run(
        [sbatch, "--parsable", f"--nodes={num}", *(options or ()), str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "UNICRON_STATE": str(state.path)},
    )
    if ran.returncode:
        raise UsageError(
            f"sbatch: {' '.join(ran.stderr.split())}",
            "options for sbatch go behind --: unicron slurm grow 2 -- -p PARTITION",
        )
    job = ran.stdout.strip().partition(";")[0]
    console.out(f"job {job}  {num} node{'s' * (num > 1)} will join {state.path}")
    console.talk(f"look: squeue -j {job}   give them back: scancel --batch --signal=USR2 {job}")


def _slurm_nodes() -> tuple[dict[str, SlurmNode], str]:
    """The nodes that Slurm knows, and why it does not answer."""
    try:
        ran = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N|%T|%E"],
            capture_output=True,
            text=True,
            check=False,
            timeout=SLURM_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return {}, f"slurmctld does not answer within {SLURM_S_MAX:g} s"
    except OSError:
        raise UsageError("there is no sinfo on this host", "run it on a host of Slurm") from None
    if ran.returncode:
        return {}, " ".join(ran.stderr.split())[:REASON_CHARS_MAX] or "sinfo failed"
    return parse_nodes(ran.stdout), ""


def _take(client: Client, step: Step) -> str:
    """Take the step; why that failed."""
    if step.what in ("DRAIN", "RESUME"):
        reason = [f"Reason={step.reason}"] if step.reason else []
        ran = subprocess.run(
            ["scontrol", "update", f"NodeName={step.node}", f"State={step.what}", *reason],
            capture_output=True,
            text=True,
            check=False,
        )
        return " ".join(ran.stderr.split()) if ran.returncode else ""
    try:
        client.post(
            f"/v1/nodes/{step.node}/{step.what}",
            {"reason": step.reason, **({"down": True} if step.down else {})},
        )
    except Refused as error:
        return str(error)
    return ""


def _again(state: StateDir, url: Urls, client: Client) -> Client:
    """A client of the control plane, which may have another address now."""
    try:
        return connect(state, url)
    except Unreachable:
        return client
