"""A trace of every phase of every micro-batch, for observation and for fault injection.

`install` puts this file into a folder as `trace.py`. Ranks whose UNICRON_TRACE_DIR is that folder
use its `Trace` (workers/training/process/trace.py). When a phase begins, the rank writes one line
of JSON to `<task>-<rank>.jsonl`: `t` (seconds since 1970), task, rank, attempt, pid, generation,
iteration, micro_batch and bucket (-1 if meaningless), event, nth (how often it came in this
iteration).

A file `hold/<task>-<rank>` holds the rank at an event, or injects a fault there
(real_cluster.py, `hold`).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

from unicron.workers.training.process import trace
from unicron.workers.training.process.trace import Event

HOLD_S = 0.002


def install(folder: Path) -> None:
    """Let ranks whose UNICRON_TRACE_DIR is this folder write their traces there."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{os.getpid()}.py"
    shutil.copyfile(__file__, new)
    new.replace(folder / trace.FILE)


class InjectedFault(BaseException):
    """An injected fault. No handler of Exception may take it for a failure of its own."""


RAISED: dict[str, type[BaseException]] = {"raise": InjectedFault, "fail": RuntimeError}


def _hold_gil() -> NoReturn:
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock in every call
    while True:
        library.sleep(1 << 20)


def _loop() -> NoReturn:
    while True:
        pass


def _sleep() -> NoReturn:
    while True:
        time.sleep(1 << 20)


BLOCKING: dict[str, Callable[[], NoReturn]] = {"gil": _hold_gil, "loop": _loop, "sleep": _sleep}

# --- Wrong collectives ---
#
# With NCCL, what does not match hangs. gloo matches operations of one kind by their number,
# whatever their size, and ends a process that receives too much. So where a wrong operation would
# match, those of its group are kept behind others that never end.
GLOO_THREADS_NUM = 2
"""How many operations of a group gloo runs at a time."""
OTHER_NUM = 7919
"""Elements of a tensor that no step has."""
_unending: list[Any] = []


def _keep_behind(group: Any) -> None:
    """Let no operation that this process starts in `group` from now on begin."""
    import torch
    import torch.distributed as dist

    backend = group._get_backend(torch.device("cpu"))  # its methods are not counted
    _unending.extend(backend.barrier(dist.BarrierOptions()) for _ in range(GLOO_THREADS_NUM))


def _enter_alone() -> None:
    import torch.distributed as dist

    dist.barrier()


def _enter_another_size() -> None:
    import torch
    import torch.distributed as dist

    _keep_behind(dist.group.WORLD)
    dist.all_reduce(torch.zeros(OTHER_NUM))


class _Ended:
    """The handle of an operation that was skipped."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _skip_one() -> None:
    """Skip the next collective of all members, and go on."""
    import torch.distributed as dist
    from unicron.workers.training.dependencies.private_torch import COLLECTIVES

    world: Any = dist.group.WORLD
    _keep_behind(world)
    skipped = [world.group_name]

    def unless_skipped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **options: Any) -> Any:
            if skipped and group.group_name == skipped[0]:
                skipped.clear()
                return _Ended()
            return original(group, *args, **options)

        return call

    for name in COLLECTIVES:
        if (original := getattr(dist.ProcessGroup, name, None)) is not None:
            setattr(dist.ProcessGroup, name, unless_skipped(original))


def _cut() -> None:
    """Shut every TCP connection of this process, as if its link were cut."""
    import socket

    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6):
                    own.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


WRONG: dict[str, Callable[[], None]] = {
    "cut": _cut,
    "alone": _enter_alone,
    "size": _enter_another_size,
    "skip": _skip_one,
}


class Trace(trace.Trace):
    """The trace of one rank. If `folder` is empty, it writes nothing and never holds the rank."""

    def __init__(self, folder: str, task: int, rank: int, attempt: int) -> None:
        super().__init__(rank)
        self._head = {"task": task, "rank": rank, "attempt": attempt, "pid": os.getpid()}
        self._file = -1
        if folder:
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(
                os.path.join(folder, f"{task}-{rank}.jsonl"),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                0o644,
            )
        self._hold = Path(folder, "hold", f"{task}-{rank}")
        self._noted: dict[str, tuple[int, int, int]] = {}
        """Event -> generation and iteration in which it came last, and how often there."""
        vars(sys)["rank_trace"] = self  # for scripts whose own functions are held

    def note(
        self,
        event: Event,
        generation: int,
        iteration: int,
        *,
        micro_batch: int = -1,
        bucket: int = -1,
    ) -> None:
        """Record a phase. Returns when the rank may continue. Raises an injected fault."""
        if self._file < 0:
            return
        where = {
            "generation": generation,
            "iteration": iteration,
            "micro_batch": micro_batch,
            "bucket": bucket,
            "event": event,
            "nth": self._count(event, generation, iteration),
        }
        self._write(where)
        is_held = False
        while (hold := self._read_hold()) is not None and all(
            where[name] == hold[name] for name in where if name in hold
        ):
            then = hold.get("then", "")
            if then == "slow":
                time.sleep(float(hold["slow_s"]))
                return
            if error := RAISED.get(then):
                self._hold.unlink()
                raise error(f"injected: {event} of iteration {iteration}")
            if block := BLOCKING.get(then):
                self._hold.unlink()
                self._write(where | {"event": "held"})
                block()
            if enter := WRONG.get(then):
                self._hold.unlink()
                self._write(where | {"event": "held"})
                enter()
                return
            if not is_held:
                self._write(where | {"event": "held"})
                is_held = True
            time.sleep(HOLD_S)

    def watch(self, engine: Any, note: trace.Note) -> None:
        """Note also the middle of the passes, and of the step."""
        trainee = getattr(engine, "trainee", None)
        if self._file < 0 or trainee is None:  # only Megatron's engine has one
            return
        from unicron.workers.training.model import optimizers  # not in a process of the tests

        layers = trainee.modules[0].decoder.layers
        middle = layers[len(layers) // 2]
        middle.register_forward_hook(partial(_middle, note))
        if trainee.axes.tp > 1:
            last = getattr(middle.mlp, "linear_fc2", middle.self_attention.linear_proj)
            last.register_forward_pre_hook(lambda module, inputs: note("tensor"))
        for part in optimizers.parts(trainee.optimizer):
            if not optimizers.is_fused(part):  # which steps all groups in one call
                _note_groups(part, note)

    def _count(self, event: str, generation: int, iteration: int) -> int:
        """How often this event has come in this iteration."""
        *before, num = self._noted.get(event, (-1, -1, 0))
        num = num + 1 if before == [generation, iteration] else 1
        self._noted[event] = (generation, iteration, num)
        return num

    def _read_hold(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._hold.read_bytes()))
        except (FileNotFoundError, ValueError):  # no file, or an incomplete one
            return None

    def _write(self, where: dict[str, Any]) -> None:
        line = json.dumps({"t": time.time(), **self._head, **where})
        os.write(self._file, line.encode() + b"\n")


def _middle(note: trace.Note, module: Any, inputs: Any, output: Any) -> None:
    import torch

    note("forward_mid")
    hidden = output[0] if isinstance(output, tuple) else output
    # Without gradients it is the first forward of a layer that is recomputed. A hook would keep
    # later ones from the output of the whole recomputation, which is the same tensor.
    if torch.is_grad_enabled() and hidden.requires_grad:
        hidden.register_hook(lambda gradient: note("backward_mid"))


def _note_groups(optimizer: Any, note: trace.Note) -> None:
    """Note when an Adam begins to step one of its parameter groups, but the first."""
    original, turns = optimizer._init_group, cycle(range(len(optimizer.param_groups)))

    def init_group(*args: Any, **options: Any) -> Any:
        if next(turns):  # the previous groups have been stepped
            note("step_mid")
        return original(*args, **options)

    optimizer._init_group = init_group
