"""`make gpu-check`: what only a machine with a GPU can show. PYTHON names the Python to check.

It needs no more than `pip install -e '.[gpu]'` in an environment with torch and megatron-core of
its own. The versions are printed first. Each check runs in a process with a limit; all processes
that it leaves are killed by pid. Without CUDA, every check is skipped with a word. Rows:
build/bench/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from bench.recovery.rows import Row, finish
from gpu.result import CPU, CUDA, NotPossible
from unicron.workers.host import linux

ROOT = Path(__file__).resolve().parents[2]
MARK = "UNICRON_GPU_CHECK"
CHECKS = {
    "groups": "gpu.groups:check",
    "groups_on_one_gpu": "gpu.groups:check_one_gpu",
    "nccl_errors": "gpu.nccl_errors:check",
    "fork": "gpu.fork:check",
    "nvml": "gpu.driver:check",
    "trial": "gpu.driver:check_trial",
    "xid": "gpu.driver:check_xid",
    "optimizer_state": "gpu.state:check",
    "te_layers": "gpu.state:check_te",
    "memory": "gpu.memory:check",
    "overhead": "gpu.overhead:check",
    "killed": "gpu.killed:check",
    "megatron_lm": "gpu.megatron_lm:check",
    "devices": "gpu.several:check_devices",
    "usual_job": "gpu.several:check_usual_job",
    "hang": "gpu.several:check_hang",
    "link_cut": "gpu.several:check_link_cut",
    "connections": "gpu.several:check_connections",
}
"""By name: the function of each check."""
EXPECTED = {
    "groups": "built, left in a wait, and rebuilt five times; left within 3 s, no memory kept",
    "nccl_errors": "the first member is told of the end of the second in seconds, by NCCL alone",
    "killed": "the survivor's process lives on, no iteration is lost, losses are equal",
    "devices": "every rank sees its own GPU by UUID, also where its task has not the first slot",
    "usual_job": "the survivors' processes live on (no illegal memory access), the losses go on as "
    "without a fault; with copies alone at most copy_every iterations are lost",
    "hang": "the rank that sleeps is named in the incident and replaced alone",
    "link_cut": "an incident of the network; all processes live on, no iteration is lost",
    "connections": "HTTP, S3, Redis and a socket in C work after 20 kills, on one connection each",
}
"""What two or more GPUs show, by the name `several`: what is expected of each check."""
ON_CPU = (
    *("groups", "fork", "optimizer_state", "te_layers", "overhead", "killed", "megatron_lm"),
    *("devices", "usual_job", "hang", "link_cut", "connections"),
)
"""Those that the same code can also run on the CPU, to test it."""
CHECK_S_MAX = 600.0
VERSIONS_S_MAX = 120.0
NO_CUDA = "torch finds no CUDA device"


class Outcome(NamedTuple):
    """What a check found. `word`: ok, failed, not possible."""

    name: str
    word: str
    why: str
    rows: list[Row]
    took_s: float = 0.0


def main() -> None:
    """Run the checks and print each outcome; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, with commas between")
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "gpu.json")
    options = parser.parse_args()
    names = options.checks.replace("several", ",".join(EXPECTED)).split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check {unknown[0]}; there are {', '.join(CHECKS)}")
    about = versions()
    for name, value in about.items():
        print(f"{name:18}  {_said(value)}", flush=True)
    if options.device == CUDA and not about["devices"]:
        for name in names:
            print(f"{name:18}  skipped: {NO_CUDA}")
        return
    began_s, outcomes = time.monotonic(), list[Outcome]()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for name in names:
            if name in EXPECTED:
                print(f"{name:18}  expected: {EXPECTED[name]}", flush=True)
            outcomes.append(run(name, options.device))
            one = outcomes[-1]
            print(
                f"{name:18}  {one.word}, {one.took_s:.0f} s{': ' * bool(one.why)}{one.why}",
                flush=True,
            )
    finally:  # also of a run that is stopped: the time on a GPU may be limited
        finish(
            [row for one in outcomes for row in one.rows],
            options.out,
            began_s,
            (),
            versions=about,
            outcomes={one.name: f"{one.word} {one.why}".strip()[:300] for one in outcomes},
        )
    sys.exit(any(one.word == "failed" for one in outcomes))


def _said(value: str | list[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value) or "none"


def versions() -> dict[str, Any]:
    """The versions by name, and the devices (environment.py). Exits with code 2 without torch."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpu.environment"],
        capture_output=True,
        text=True,
        timeout=VERSIONS_S_MAX,
        check=False,
        env=environment(),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended"])[-1]
        sys.stderr.write(
            f"{sys.executable} cannot load torch: {last}\n"
            "hint: make gpu-check PYTHON=/path/to/python\n"
        )
        sys.exit(2)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that imports the checks and Unicron."""
    paths = [ROOT / "tests", ROOT / "tests" / "drivers", ROOT / ".typing"]
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join([*known, *map(str, paths)])}


def run(name: str, device: str) -> Outcome:
    """Run a check in a process of its own; afterwards nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="unicron-gpu-"))
    log, began_s = folder / "log", time.monotonic()
    linux.adopt_orphans()
    try:
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpu.main_of_check", name, str(folder), device],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment(
                    CUDA_DEVICE_ORDER="PCI_BUS_ID", OMP_NUM_THREADS="1", **{MARK: str(folder)}
                ),
            )
        try:
            child.wait(CHECK_S_MAX)
        except subprocess.TimeoutExpired:
            log.open("a").write(f"\nnot done within {CHECK_S_MAX:.0f} s\n")
        finally:
            end(child, folder)
            if not (folder / "result.json").exists():
                print(log.read_text(errors="replace")[-6000:], file=sys.stderr, flush=True)
        return _outcome(name, folder, log, time.monotonic() - began_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the check and all that it has started, and reap them."""
    if child.poll() is None:
        child.kill()
    child.wait()
    for proc in linux.kill_marked(f"{MARK}={folder}".encode()):
        linux.reap(proc.pid)


def _outcome(name: str, folder: Path, log: Path, took_s: float) -> Outcome:
    result = folder / "result.json"
    if not result.exists():
        lines = log.read_text(errors="replace").strip().splitlines()
        return Outcome(name, "failed", lines[-1] if lines else "it ended", [], took_s)
    found = json.loads(result.read_text())
    return Outcome(name, found["word"], found["why"], [Row(**one) for one in found["rows"]], took_s)


def run_here(name: str, folder: Path, device: str) -> None:
    """Run a check in this process. Writes result.json, unless it fails."""
    module, _, function = CHECKS[name].partition(":")
    work = folder / "work"
    work.mkdir()
    rows, word, why = list[Row](), "ok", ""
    try:
        rows = getattr(import_module(module), function)(work, device)
    except NotPossible as error:
        word, why = "not possible", str(error)
    partial = folder / "result.partial"
    partial.write_text(
        json.dumps({"word": word, "why": why, "rows": [one._asdict() for one in rows]})
    )
    partial.rename(folder / "result.json")


def check_of(arguments: Sequence[str]) -> None:
    """The main of a check's process."""
    name, folder, device = arguments
    run_here(name, Path(folder), device)
    sys.stdout.flush()
    os._exit(0)  # torch would wait for peers that are gone


if __name__ == "__main__":
    main()
