"""Tasks that fail by their own software, one after the other, beside one that trains.

`make chaos-blame`: a real cluster of two agents of three slots. A witness trains on both nodes all
the time. The other tasks fail each in its way: commands, and loops that heal in memory. Rows of
`build/bench/blame.json`, for each: whether the witness was touched, slots that went out, whether
the outcome is right, and seconds from the first failure until `status TASK` told it. The exit code
is 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.recovery.rows import stamp
from real_cluster import ENDED, RealCluster, running
from twins import Twins, small

FOLDER = Path("build/chaos-blame")
FIGURES = Path("build/bench/blame.json")
LOOP = Path(__file__).with_name("failing_loop.py").resolve()
NODES_NUM, SLOTS_NUM, WITNESS_NUM = 2, 3, 2
POLICY = {
    "restarts_max": 1,
    "restart_iterations": 4,
    "restart_pause_s_max": 0.5,
    "passing_s_max": 6.0,
}
"""Short budgets. The pauses and times of the defaults are tested in virtual time."""
CASE_S_MAX = 150.0
TOLD_S_MAX = 5.0
POLL_S = 0.05
REST_S = 0.4
"""How long a rank of the witness sleeps in an iteration: it leaves the cores to the others."""


class Case(NamedTuple):
    """A task that fails, and what is right."""

    name: str
    slots: tuple[int, int]
    script: str = ""
    """A command, run by `sh -c`. With `fault`: arguments of the loop."""
    fault: str = ""
    """Environment of the failing loop; empty: it is a command."""
    outcome: str = "failed"
    words: str = ""
    """What its reason contains."""


def _says(text: str, code: int = 1) -> str:
    return f"sleep 0.2; echo '{text}' >&2; exit {code}"


PYTHON = "python -c 'import time; time.sleep(0.2); {}'"
CASES = (
    Case("exit-1", (2, 2), "sleep 0.2; exit 1", words="exit code 1"),
    Case("exit-77", (1, 1), "sleep 0.2; exit 77", words="exit code 77"),
    Case("key-error", (2, 2), PYTHON.format('{}["rate"]'), words="KeyError"),
    Case("no-module", (1, 1), PYTHON.format("import nomodule"), words="nomodule"),
    Case("no-program", (2, 2), "exec /does/not/exist"),
    Case("segfault", (1, 2), "sleep 0.2; kill -SEGV $$", words="signal 11"),
    Case("abort", (2, 2), "sleep 0.2; kill -ABRT $$", words="signal 6"),
    Case("kills-itself", (1, 1), "sleep 0.2; kill -KILL $$", words="signal 9"),
    Case("cuda-error", (1, 1), _says("RuntimeError: CUDA error: unspecified launch failure")),
    Case("illegal", (2, 2), _says("CUDA error: an illegal memory access was encountered")),
    Case("gpu-memory", (1, 1), _says("torch.OutOfMemoryError: CUDA out of memory.")),
    Case("old-driver", (2, 2), _says("RuntimeError: The NVIDIA driver on your system is too old")),
    Case("says-ecc", (1, 1), _says("CUDA error: uncorrectable ECC error encountered")),
    Case("says-nvlink", (2, 2), _says("NVLink error detected: uncorrectable NVLink error")),
    Case("full-cluster", (4, 4), _says("RuntimeError: shape mismatch in layer 3")),
    Case("one-rank", (2, 2), 'test "$RANK" = 1 && exit 4; sleep 60', words="exit code 4"),
    Case(
        "every-way",
        (2, 2),
        "sleep 0.2; n=$(date +%N); exit $((1 + ${n#${n%??????}} % 40))",
        words="exit code",
    ),
    Case(
        "name-for-4-s",
        (2, 2),
        "f={folder}/born; test -e $f || touch $f; "
        "test $(($(date +%s) - $(stat -c %Y $f))) -ge 4 && exit 0; "
        "echo 'ValueError: host not found: Name or service not known' >&2; exit 1",
        outcome="finished",
    ),
    Case("refused", (1, 1), _says("ConnectionRefusedError: [Errno 111] Connection refused")),
    Case("stale", (2, 2), _says("OSError: [Errno 116] Stale file handle")),
    Case("full-disk", (1, 1), _says("OSError: [Errno 28] No space left on device")),
    Case(
        "one-node",
        (1, 1),
        'test "$UNICRON_NODE" = {node} && { sleep 0.3; exit 9; }; sleep 1',
        outcome="finished",
    ),
    Case("loop-bug", (1, 2), fault="FAULT=bug", words="shape mismatch"),
    Case("loop-start", (2, 2), fault="FAULT=bug AT=-1", words="shape mismatch"),
    Case("loop-data", (2, 2), fault="FAULT=data", words="IndexError"),
    Case("loop-memory", (1, 1), fault="FAULT=memory", words="out of memory"),
    Case("loop-segfault", (1, 2), fault="FAULT=segfault", words="signal 11"),
    Case("loop-exit", (2, 2), fault="FAULT=exit", words="exit code 3"),
    Case("loop-disk", (1, 2), fault="FAULT=disk", words="No space left"),
    Case("loop-many", (1, 1), fault="FAULT=many"),
    Case("no-output", (1, 2), fault="FAULT=output", outcome="finished"),
)


class Result(NamedTuple):
    """What became of one case."""

    healthy_touched: int
    slots_out: int
    verdict_right: int
    told_s: float
    why: str


class Trial:
    """The cluster with its witness."""

    def __init__(self, cluster: RealCluster) -> None:
        self.cluster = cluster
        self.began_s = time.monotonic()
        self.witness = small(
            "witness", cluster.path / "out", slots=(WITNESS_NUM, WITNESS_NUM), checkpoint_every=5
        )
        self.task = cluster.submit(self.witness)
        cluster.wait_whole(self.task, WITNESS_NUM)
        cluster.rest(self.task, rest_s=REST_S)
        self.pids = cluster.pids(self.task)
        self.places = self.now(self.task)

    def now(self, task: int) -> list[str]:
        """Where the task's processes are."""
        return [f"{one['node']}/{one['slot']}" for one in self.cluster.task(task)["ranks"]]

    def out(self) -> int:
        """The slots that are out."""
        view = self.cluster.client().get("/v1/state")
        return sum(slot["out"] for node in view["nodes"] for slot in node["slots"])

    def needs(self, task: int) -> list[dict[str, Any]]:
        """What of the task needs a person."""
        view = self.cluster.client().get("/v1/state")
        return [need for need in view["needs"] if need["task"] == task]

    def play(self, case: Case) -> Result:
        """Submit the task, and watch it to its end."""
        cluster, after = self.cluster, self.cluster.seq()
        task = cluster.submit(self._spec(case))
        told_s, num_out, deadline_s = 0.0, 0, time.monotonic() + CASE_S_MAX
        while (view := cluster.task(task))["state"] not in ENDED:
            if not told_s and (view["failing"] or view["incident"] or self.needs(task)):
                told_s = time.time()
            num_out = max(num_out, self.out())
            if time.monotonic() > deadline_s:
                cluster.cancel(task)
                view = cluster.task(task) | {"state": "endless"}
                break
            time.sleep(POLL_S)
        num_out = max(num_out, self.out())
        failures = [
            record.occurred_s
            for kind in ("RankErrored", "RankExited", "CheckpointFailed")
            for record in cluster.told(after, kind, task=task)
        ]
        first_s = min(failures, default=0.0)
        touched = cluster.pids(self.task) != self.pids or self.now(self.task) != self.places
        right = view["state"] == case.outcome and case.words in view["why"]
        return Result(
            int(touched),
            num_out,
            int(right),
            max((told_s or time.time()) - first_s, 0.0),
            f"{view['state']}: {view['why']}",
        )

    def _spec(self, case: Case) -> dict[str, Any]:
        folder = self.cluster.path / case.name
        folder.mkdir(exist_ok=True)
        most = {"min": case.slots[0], "max": case.slots[1]}
        plain = {"apiVersion": "unicron/v1", "name": case.name, "slots": most}
        if not case.fault:
            script = case.script.replace("{folder}", str(folder)).replace("{node}", "n1")
            return plain | {"command": ["sh", "-c", script]}
        return plain | {
            "command": [
                "env",
                f"PYTHONPATH={LOOP.parent}",
                f"OUTPUT={folder / 'out'}",
                *case.fault.split(),
                sys.executable,
                str(LOOP),
                "--iterations",
                "30",
                "--micro-batches",
                "4",
            ],
            "heal": "in-memory",
            "loop": {"micro_batches": 4, "iterations": 30, "output": str(folder / "out")},
        }

    def equal(self) -> bool:
        """Whether the witness's losses and parameters are those of an undisturbed run."""
        self.cluster.cancel(self.task)
        losses = self.cluster.losses(self.task)
        folder = self.cluster.path / "twins"
        folder.mkdir()
        twins = Twins(folder)
        try:
            ours, out = twins.start(self.witness)
            twins.hold(ours, out, losses[: int(ours.name.removeprefix("iter-"))], 60.0)
        except AssertionError as error:
            print(f"the witness differs: {error}")
            return False
        return True


def main() -> None:
    """Play the cases, print a line for each, write the rows."""
    parser = argparse.ArgumentParser(prog="make chaos-blame")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    asked = parser.parse_args()
    if unknown := {*asked.cases} - {case.name for case in CASES}:
        parser.error(f"no such case: {' '.join(sorted(unknown))}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    cases = [case for case in CASES if case.name in asked.cases]
    results: list[Result] = []
    with running(FOLDER.resolve(), NODES_NUM, POLICY, num_slots=SLOTS_NUM) as cluster:
        trial = Trial(cluster)
        for case in cases:
            results.append(found := trial.play(case))
            is_good = found.verdict_right and not found.healthy_touched and not found.slots_out
            print(
                f"{time.monotonic() - trial.began_s:6.0f} s  {case.name:14} "
                f"{'right' if is_good else 'WRONG'}  told {found.told_s:4.1f} s  {found.why[:110]}",
                flush=True,
            )
        is_equal = trial.equal()
        cluster.verify()
    _write(cases, results, is_equal=is_equal)
    sys.exit(_judged(results, is_equal=is_equal))


def _judged(results: Sequence[Result], *, is_equal: bool) -> int:
    """Print the sums; the exit code."""
    touched = sum(one.healthy_touched for one in results)
    num_out = sum(one.slots_out for one in results)
    wrong = sum(not one.verdict_right for one in results)
    told_s = max((one.told_s for one in results), default=0.0)
    print(
        f"{len(results)} tasks: witness touched by {touched}, its run "
        f"{'EQUAL' if is_equal else 'NOT EQUAL'}, slots out {num_out}, wrong outcomes {wrong}, "
        f"told after {told_s:.1f} s at most; every decision made again from the log: VERIFIED"
    )
    return int(bool(touched or num_out or wrong or told_s > TOLD_S_MAX) or not is_equal)


def _write(cases: Sequence[Case], results: Sequence[Result], *, is_equal: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "case": case.name,
            "system": "unicron",
            "metric": metric,
            "value": getattr(found, metric),
            "unit": "s" if metric == "told_s" else "",
            "n": 1,
        }
        for case, found in zip(cases, results, strict=True)
        for metric in ("healthy_touched", "slots_out", "verdict_right", "told_s")
    ]
    rows.append(
        {
            "case": "witness",
            "system": "unicron",
            "metric": "equal",
            "value": int(is_equal),
            "unit": "",
            "n": 1,
        }
    )
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(rows, indent=1) + "\n")
    stamp(FIGURES)


if __name__ == "__main__":
    main()
