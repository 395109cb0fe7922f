"""Plays agent and control plane for real rank processes over the real protocol."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_trace
from checkpoint_stores import NODE_KEY, LocalKeeper
from nursery import PATCH, Forked, Nursery
from unicron.events.log.identity import store_keys
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.types import (
    Body,
    Member,
    MemoryCheckpoint,
    NodeStores,
    QuiesceMode,
    Slot,
)
from unicron.events.spec.job import JobSpec, Loop, Train, parse
from unicron.events.spec.model import Axes
from unicron.workers.agent.processes.launcher import interface_variables
from unicron.workers.ipc.pipe_protocol import Frame, MayAbort, Unpacker, WillAbort, pack
from unicron.workers.training.process.control_thread import EXIT_AGENT_GONE

START_S = 90.0
WAIT_S = 60.0
ALONE_S = 20.0
TASK = 7
Drive = Callable[..., Any]
"""The fixture `drive`: `drive(dropout=0.1, iterations=20)` makes a driver."""
Twins = Callable[..., Any]
"""The fixture `twin`: `twin(0.1)` is the reference run with that dropout."""
EXEC = [sys.executable, "-m", "unicron.workers.training.rank"]
"""Starts a rank without a zygote, as an agent does; takes seconds of CPU time."""
NO_ORDER = o.DropMemoryCheckpoints(nodes=("n1",), task=0)
"""An order that a rank ignores."""


class Process:
    """One rank's process and the driver's end of its socket. Forked by a nursery, or by exec."""

    def __init__(
        self,
        rank: int,
        attempt: int,
        by: Nursery | list[str],
        patch: str,
        folder: Path,
        trace: Path,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self.socket, theirs = socket.socketpair()
        self.log = folder / f"{rank}-{attempt}.log"
        environment = {
            **interface_variables("127.0.0.1"),
            **os.environ,
            "UNICRON_TRACE_DIR": str(trace),
            "OMP_NUM_THREADS": "1",
            "UNICRON_RANK": str(rank),
        }
        self.popen: subprocess.Popen[bytes] | Forked
        with self.log.open("wb") as output, theirs:
            if isinstance(by, Nursery):
                environment[PATCH] = patch
                self.popen = by.fork(environment, output.fileno(), theirs.fileno())
            else:
                assert not patch, "only forked ranks can run a patch"
                self.popen = subprocess.Popen(
                    [*by, "--fd", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
        self.ready: r.RankReady | None = None
        self.num_sent = 0

    def send(self, body: Body) -> None:
        self.num_sent += 1
        self.socket.sendall(
            pack(
                Frame(
                    body=body,
                    seq=self.num_sent,
                    epoch=1,
                    store_keys=store_keys(lambda node: NODE_KEY, body, ""),
                )
            )
        )

    def read_all(self, limit_s: float) -> bool:
        """Wait until the process has read everything sent to it. Source: tcp(7), SIOCOUTQ."""
        last_s = time.monotonic() + limit_s
        while any(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))):
            if time.monotonic() > last_s:
                return False
            time.sleep(0.001)
        return True

    def signal(self, number: int) -> None:
        os.kill(self.popen.pid, number)


class Driver:
    """A task of real ranks. Every wait has a limit. `close` kills the started processes."""

    def __init__(self, spec: JobSpec, folder: Path, nursery: Nursery) -> None:
        self.by: Nursery | list[str] = nursery
        """Forks the ranks that are launched from now on, or the command that starts each."""
        self.patch = ""
        """Code that forked ranks run first."""
        self.spec = spec
        self.folder = folder
        self.trace_dir = folder / "trace"
        rank_trace.install(self.trace_dir)
        self.processes: dict[int, Process] = {}
        self.started: list[Process] = []
        self.generation = 0
        self.keepers: list[LocalKeeper] = []
        """The stores that receive copies, from the next generation on."""
        self.stores: tuple[NodeStores, ...] = ()
        """By node, which of them; empty: all."""
        self.reports: list[tuple[int, int, Body]] = []
        self.changed = threading.Condition()
        self._num_held: dict[int, int] = {}
        self._traces: dict[int, tuple[int, tuple[dict[str, Any], ...]]] = {}
        """By rank: the offset up to which the trace is read, and its lines."""
        self.hears = threading.Event()
        """While it is cleared, the driver reads nothing, like a stopped agent."""
        self.hears.set()

    @property
    def work(self) -> Train | Loop:
        """The spec's `train`, or the `loop` of its command."""
        work = self.spec.train or self.spec.loop
        assert work is not None
        return work

    def start(self, *ranks: int, attempt: int = 1, axes: Axes | None = None) -> None:
        """Start processes and wait until all are ready. With `axes`: see `launch`."""
        self.launch(*ranks, attempt=attempt, axes=axes)
        for rank in ranks:
            self.processes[rank].ready = self.wait(
                r.RankReady, rank, attempt=attempt, limit_s=START_S
            )

    def launch(self, *ranks: int, attempt: int = 1, axes: Axes | None = None) -> None:
        """Start processes. With `axes`, each is expected at its rank's position in this layout."""
        for rank in ranks:
            process = Process(rank, attempt, self.by, self.patch, self.folder, self.trace_dir)
            self.processes[rank] = process
            self.started.append(process)
            process.send(
                o.StartRank(
                    nodes=("n1",),
                    task=TASK,
                    rank=rank,
                    attempt=attempt,
                    slot=Slot("n1", rank),
                    spec=self.spec,
                    num_seats=len(ranks),
                    host="",
                    port=0,
                    checkpoint="",
                    axes=axes,
                    place=-1 if axes is None else rank,
                )
            )
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: Process) -> None:
        unpacker = Unpacker()
        while True:
            try:
                process.socket.recv(1, socket.MSG_PEEK)  # peek: consume nothing if stopped
                self.hears.wait()
                data = process.socket.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            with self.changed:
                for frame in unpacker.feed(data):
                    if isinstance(frame.body, WillAbort):
                        process.send(MayAbort(generation=frame.body.generation))
                    else:
                        self.reports.append((process.rank, process.attempt, frame.body))
                self.changed.notify_all()

    def wait(
        self,
        kind: type[Any],
        rank: int,
        *,
        attempt: int | None = None,
        where: Callable[[Any], bool] = lambda body: True,
        limit_s: float = WAIT_S,
    ) -> Any:
        """The first report of this kind from this rank; fails after `limit_s` with the logs."""

        def find() -> Any:
            return next(
                (
                    body
                    for told, tried, body in self.reports
                    if told == rank
                    and isinstance(body, kind)
                    and where(body)
                    and (attempt is None or tried == attempt)
                ),
                None,
            )

        with self.changed:
            if self.changed.wait_for(find, limit_s):
                return find()
        raise AssertionError(
            f"no {kind.__name__} of rank {rank} within {limit_s} s\n{self.story()}"
        )

    def told(self, kind: type[Any], rank: int | None = None) -> list[Any]:
        with self.changed:
            return [
                body
                for told, _, body in self.reports
                if isinstance(body, kind) and rank in (None, told)
            ]

    def story(self) -> str:
        lines = [f"{rank}.{attempt} {body}"[:300] for rank, attempt, body in self.reports[-40:]]
        for process in self.started:
            text = process.log.read_text(errors="replace")
            lines.append(f"--- {process.log.name} exit {process.popen.poll()}\n{text[-1500:]}")
        return "\n".join(lines)

    def order(self, body: Body, ranks: list[int]) -> None:
        for rank in ranks:
            self.processes[rank].send(body)

    def heard(self, *ranks: int) -> None:
        """Wait until these ranks have received every order sent to them."""
        for rank in ranks:
            process = self.processes[rank]
            assert process.read_all(WAIT_S), self.story()
            process.send(NO_ORDER)  # a rank handles earlier orders before it reads this one
            assert process.read_all(WAIT_S), self.story()

    def says(self, rank: int, text: str, times: int = 1) -> None:
        """Wait until the rank's log has this text `times` times."""
        log = self.processes[rank].log
        self.until(lambda: log.read_text().count(text) >= times)

    def until(self, holds: Callable[[], bool], more: object = "") -> None:
        """Wait until this holds; fails after WAIT_S with the logs, and `more`."""
        last_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < last_s, f"{more}\n{self.story()}"
            time.sleep(0.005)

    def reconfigure(
        self,
        ranks: list[int],
        checkpoint: str = "",
        copies: tuple[MemoryCheckpoint, ...] = (),
        axes: Axes | None = None,
    ) -> int:
        """Order a new generation of these ranks, in this layout; return its number."""
        self.generation += 1
        members: list[Member] = []
        for rank in ranks:
            ready = self.processes[rank].ready
            assert ready is not None
            members.append(Member(rank, self.processes[rank].attempt, "n1", ready.endpoint))
        self.order(
            o.Reconfigure(
                nodes=("n1",),
                task=TASK,
                generation=self.generation,
                members=tuple(members),
                store=members[0].endpoint,
                dp=len(members) if axes is None else axes.dp,
                checkpoint=checkpoint,
                copies=copies,
                axes=axes,
                keepers=tuple(one.keeper for one in self.keepers),
                stores=self.stores,
            ),
            ranks,
        )
        return self.generation

    def reconfigured(self, ranks: list[int]) -> dict[int, r.Reconfigured]:
        return {rank: self.wait(r.Reconfigured, rank, where=self._now) for rank in ranks}

    def resume(self, ranks: list[int], progress_from: int = 0) -> None:
        self.order(
            o.Resume(
                nodes=("n1",), task=TASK, generation=self.generation, progress_from=progress_from
            ),
            ranks,
        )

    def form(
        self,
        ranks: list[int],
        progress_from: int = 0,
        checkpoint: str = "",
        copies: tuple[MemoryCheckpoint, ...] = (),
        axes: Axes | None = None,
    ) -> dict[int, r.Reconfigured]:
        """Start a new generation and let it train."""
        self.reconfigure(ranks, checkpoint, copies, axes)
        reports = self.reconfigured(ranks)
        self.resume(ranks, progress_from)
        return reports

    def quiesce(
        self, ranks: list[int], mode: QuiesceMode, hold: Path | None = None
    ) -> dict[int, r.Quiesced]:
        """Order the current generation to end, and wait until these ranks have quiesced.

        A `hold` is removed when all have received the order.
        """
        self.ask_to_leave(ranks, mode)
        if hold is not None:
            self.heard(*ranks)
            hold.unlink()
        return self.quiesced(ranks)

    def ask_to_leave(self, ranks: list[int], mode: QuiesceMode) -> None:
        """Order the current generation to end."""
        self.order(
            o.Quiesce(
                nodes=("n1",), task=TASK, generation=self.generation, mode=mode, ranks=tuple(ranks)
            ),
            ranks,
        )

    def leave(
        self, ranks: list[int], mode: QuiesceMode, hold: Path | None = None
    ) -> dict[int, list[Body]]:
        """Order these ranks to quiesce, the first with a checkpoint; their reports until then.

        A `hold` is removed when all have received the order.
        """
        with self.changed:
            begin = len(self.reports)
        self.order(
            o.Quiesce(
                nodes=("n1",),
                task=TASK,
                generation=self.generation,
                mode=mode,
                ranks=tuple(ranks),
                save=True,
            ),
            ranks,
        )
        if hold is not None:
            self.heard(*ranks)
            hold.unlink()

        def said(rank: int) -> list[Body]:
            return [
                body
                for told, _, body in self.reports[begin:]
                if told == rank and not isinstance(body, r.TaskProgressed)
            ]

        with self.changed:
            assert self.changed.wait_for(
                lambda: all(
                    any(isinstance(body, r.Quiesced) for body in said(rank)) for rank in ranks
                ),
                WAIT_S,
            ), self.story()
            return {rank: said(rank) for rank in ranks}

    def quiesced(self, ranks: list[int]) -> dict[int, r.Quiesced]:
        return {rank: self.wait(r.Quiesced, rank, where=self._now) for rank in ranks}

    def left_by_themselves(self, ranks: list[int]) -> set[int]:
        """The ranks that a fault made quiesce without an order.

        Rarely, gloo does not report a closed connection to a wait in progress. Those ranks get an
        order to quiesce, as from the control plane.
        """

        def found() -> set[int]:
            return {
                body.rank
                for _, _, body in self.reports
                if isinstance(body, r.Quiesced) and self._now(body)
            } & set(ranks)

        with self.changed:
            self.changed.wait_for(lambda: len(found()) == len(ranks), ALONE_S)
            alone = found()
        self.ask_to_leave([rank for rank in ranks if rank not in alone], "now")
        return alone

    def _now(self, body: Any) -> bool:
        return bool(body.generation == self.generation)

    def kill(self, rank: int) -> None:
        """SIGKILL and reap, as an agent would."""
        process = self.processes.pop(rank)
        process.popen.kill()
        process.popen.wait(10)

    def lose_agents(self, *ranks: int) -> None:
        """Close the agents' sockets. Each rank must end as soon as it sees that."""
        for rank in ranks:
            self.processes[rank].socket.shutdown(socket.SHUT_RDWR)
        for rank in ranks:
            assert self.processes.pop(rank).popen.wait(20) == EXIT_AGENT_GONE, self.story()

    def finish(self, ranks: list[int]) -> dict[int, r.RankFinished]:
        told = {rank: self.wait(r.RankFinished, rank) for rank in ranks}
        for rank in ranks:
            assert self.processes[rank].popen.wait(20) == 0, self.story()
        assert not [told for told in self.told(r.RankErrored) if told.rank in ranks], self.story()
        return told

    def final_checkpoint(self, generation: int | None = None) -> Path:
        """The final checkpoint's path. Its generation is checked if one is given."""
        saved, work = self.told(r.CheckpointSaved)[-1], self.work
        assert (saved.final, saved.step_version) == (True, work.iterations)
        if generation is not None:
            assert saved.path == f"gen-{generation}/iter-{work.iterations}"
        return Path(work.output) / saved.path

    def trace(self, rank: int) -> list[dict[str, Any]]:
        """All lines of a rank's trace; only new lines are read from the file."""
        path = self.trace_dir / f"{TASK}-{rank}.jsonl"
        begin, lines = self._traces.get(rank, (0, ()))
        if path.exists() and path.stat().st_size > begin:
            with path.open("rb") as file:
                file.seek(begin)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
            lines = (*lines, *map(json.loads, whole.splitlines()))
            self._traces[rank] = begin + len(whole), lines
        return list(lines)

    def strike(self, rank: int, *, iteration: int, event: str, nth: int = 1) -> None:
        """Return when the rank starts its `nth` `event` of this iteration."""
        last_s = time.monotonic() + WAIT_S
        while time.monotonic() < last_s:
            seen = [
                line
                for line in self.trace(rank)
                if line["iteration"] == iteration and line["event"] == event
            ]
            if len(seen) >= nth:
                return
            time.sleep(0.001)
        raise AssertionError(f"rank {rank} did not start {event} of {iteration}\n{self.story()}")

    def hold(
        self, rank: int, event: str, iteration: int, *, then: str = "wait", **where: int
    ) -> Path:
        """Make the rank wait, or raise, at this event; return the file that requests it."""
        file = self.trace_dir / "hold" / f"{TASK}-{rank}"
        file.parent.mkdir(parents=True, exist_ok=True)
        self._num_held[rank] = self._times_held(rank, iteration)
        text = json.dumps({"event": event, "iteration": iteration, "then": then, **where})
        partial = file.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(file)
        return file

    def held(self, rank: int, iteration: int) -> dict[str, Any]:
        """Wait until the rank is held; return the line of its trace."""
        self.strike(rank, iteration=iteration, event="held", nth=self._num_held[rank] + 1)
        return next(line for line in self.trace(rank)[::-1] if line["event"] == "held")

    def _times_held(self, rank: int, iteration: int) -> int:
        return sum(
            line["event"] == "held" and line["iteration"] == iteration for line in self.trace(rank)
        )

    def losses(self) -> dict[int, float]:
        """Iteration -> loss, as last reported."""
        return {
            told.first_iteration + index: loss
            for told in self.told(r.TaskProgressed)
            for index, loss in enumerate(told.losses)
        }

    def close(self) -> None:
        self.hears.set()
        for process in self.started:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGCONT)
                process.popen.kill()
            process.popen.wait(10)
            process.socket.close()
        for keeper in self.keepers:
            keeper.close()


def small_spec(output: Path | str, **changes: Any) -> JobSpec:
    """A small GPT: 2 layers, hidden 64, 12 micro-batches."""
    train: dict[str, Any] = {
        "model": {
            "num_layers": 2,
            "hidden": 64,
            "num_heads": 4,
            "sequence": 64,
            "dropout": changes.pop("dropout", 0.0),
        },
        "batch": {"global": 24, "micro": 2},
        "iterations": 14,
        "output": str(output),
        "optimizer": {"lr": 3e-3, "warmup_iterations": 2},
    }
    train.update(changes)
    return parse(
        {"apiVersion": "unicron/v1", "name": "small", "slots": {"min": 1, "max": 4}, "train": train}
    )
