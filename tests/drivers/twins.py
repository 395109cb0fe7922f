"""Reference runs of tasks: plain Megatron, one process, no agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import reference

LIMIT_S = 600.0
"""A reference run has low priority and takes minutes on a loaded machine."""
NICE_NUM = 5
"""Low priority, but not starved: at 10, a run beside eight busy processes took over ten minutes."""
RATE = 1e-4
"""The learning rate of every small task: about the change of a parameter in one step."""
STEP_SHARE_MAX = 0.01
"""Largest difference of a model, in optimizer steps. A missing or repeated micro-batch changes
Adam's step by far more, rounding by far less."""
LOSS_REL_MAX = 1e-5
SAME_REL_MAX = 1e-9
Spec = dict[str, Any]


def small(
    name: str,
    output: Path,
    *,
    weight: float = 1.0,
    slots: tuple[int, int] = (1, 4),
    rates: dict[int, float] | None = None,
    seed: int = 7,
    iterations: int = 100_000,
    checkpoint_every: int = 0,
    copy_every: int = 10,
    **train: Any,
) -> Spec:
    """A tiny GPT, four micro-batches per iteration.

    `rates`: TFLOP/s by slots; the spec declares those of its sizes. `train` replaces keys of the
    spec. The learning rate is constant, so a task of K iterations equals the first K of a longer
    one.
    """
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "weight": weight,
        "slots": {"min": slots[0], "max": slots[1]},
        "throughput": {
            str(size): rate * 1e12
            for size, rate in (rates or {}).items()
            if slots[0] <= size <= slots[1]
        },
        "train": {
            "model": {"num_layers": 1, "hidden": 64, "num_heads": 2, "sequence": 64},
            "batch": {"global": 8, "micro": 2},
            "optimizer": {"lr": RATE, "min_lr": RATE, "decay": "constant"},
            "iterations": iterations,
            "seed": seed,
            "checkpoint_every": checkpoint_every,
            "copy_every": copy_every,
            "output": str(output / name),
            **train,
        },
    }


class Twins:
    """One reference run for each task that is compared. They run at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self, spec: Spec, *options: str) -> tuple[Path, Path]:
        """Start the reference run of the task up to its published checkpoint.

        Returns that checkpoint and the folder of the run. `options` go to the reference run.
        """
        ours = (Path(spec["train"]["output"]) / "latest").resolve()
        return ours, self.begin(spec, int(ours.name.removeprefix("iter-")), *options)

    def begin(self, spec: Spec, iterations: int, *options: str) -> Path:
        """Start the reference run of this many iterations; returns its folder."""
        out = self._folder / f"{len(self._running)}-{spec['name']}"
        out.mkdir()
        file = out / "spec.json"
        file.write_text(json.dumps(spec))
        with (out / "log").open("wb") as log:
            self._running[out] = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    reference.__file__,
                    "--spec",
                    str(file),
                    "--out",
                    str(out),
                    "--iterations",
                    str(iterations),
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        _give_way(self._running[out].pid, NICE_NUM)
        return out

    def trained(self, out: Path) -> Path:
        """The final state of a reference run, after waiting for its end."""
        _give_way(self._running[out].pid, 0)  # the test waits for it
        assert self._running[out].wait(LIMIT_S) == 0, (out / "log").read_text()[-2000:]
        return out / "final"

    def hold(self, ours: Path, out: Path, losses: list[float], untold_s_max: float = 0.0) -> None:
        """Assert that a checkpoint and the logged losses until then equal the reference run's.

        `untold_s_max`: the time of iterations that a cancelled task saved but did not report.
        """
        final = self.trained(out)
        wanted = list(reference.read(final)["numbers.losses"])
        # Not bit by bit: another member may report, and members may sum in another order.
        saved = reference.read(ours)
        kept = list(saved["numbers.losses"])
        assert len(kept) == len(wanted)
        assert sum(saved["numbers.step_s"][len(losses) :]) <= untold_s_max
        assert all(abs(a - b) < SAME_REL_MAX * b for a, b in zip(losses, kept, strict=False))
        assert not (why := unequal(ours, final)), why
        # The check must be able to fail: losses shifted by one iteration are far outside.
        shifted = [abs(a - b) / b for a, b in zip(wanted[1:], wanted, strict=False)]
        assert max(shifted) > 100 * LOSS_REL_MAX

    def compare_and_cancel(
        self, cluster: Any, task: int, spec: Spec, since: int = 0, again_rel: float = 0.0
    ) -> None:
        """Compare the task's next checkpoint with its reference run, and cancel the task. `since`:
        the record from which on every decision of the log is this version's. `again_rel`: by how
        much the loss of an iteration that is repeated from a copy may differ."""
        cluster.wait_told(cluster.seq(), "CheckpointPublished", task=task)
        ours, twin = self.start(spec)
        saved = int(ours.name.removeprefix("iter-"))
        cluster.wait(lambda: cluster.task(task)["iteration"] >= saved or None, f"iteration {saved}")
        cluster.cancel(task)
        self.hold(ours, twin, cluster.losses(task, again_rel))
        cluster.verify(since)

    def stop(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def unequal(ours: Path, final: Path, rate: float = RATE) -> str:
    """Why the losses or the model of a checkpoint are not those of a reference run; "": they are.
    `rate`: the learning rate of the last steps."""
    gap, twin = reference.compare(ours, final), reference.read(final)
    params = [value for name, value in twin.items() if name.startswith("model.")]
    squares = sum(float(param.double().square().sum()) for param in params)
    step_rel = rate * float(sum(param.numel() for param in params) / squares) ** 0.5
    is_equal = (
        gap.num_losses == len(twin["numbers.losses"])
        and gap.loss_rel < LOSS_REL_MAX
        and gap.param_rel < STEP_SHARE_MAX * step_rel
    )
    return "" if is_equal else f"{gap}, a step is {step_rel:.1e} of the parameters"


def _give_way(pid: int, nice_num: int) -> None:
    """Lower the priority of a reference run: other processes of the test have deadlines.

    The priority is not raised again if the process lacks the right to.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice_num)
    with suppress(OSError):  # with autogroups, the group's value counts
        Path(f"/proc/{pid}/autogroup").write_text(str(nice_num))
