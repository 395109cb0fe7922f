"""The drivers of a custom loop: with in-memory recovery (the member) or restart-only.

Without an agent, or if in-memory recovery does not support the loop, the same iterations run. A
fault then ends the processes, and the agent or launcher that started them restarts them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from time import sleep

import structlog
import torch.distributed as dist

from ....events import network_address
from ....events.errors import UsageError
from ....events.records.orders import StartRank
from ....events.spec.job import Train, is_url
from ....events.spec.model import Axes
from ....events.spec.parallelism import is_plain
from ...host import output_owner
from ...ipc.progress_page import ProgressWriter
from ..checkpoint import checkpoint
from ..checkpoint.final_save import save_at_end
from ..checkpoint.restart_memory import RestartMemory
from ..checkpoint.save_reports import SaveReports
from ..communicators.communicators import Communicators
from ..model import cpu_device, optimizers
from ..model.megatron_engine import MegatronEngine
from ..model.trainee import TrainingModel
from ..model.training_state import load_objects, objects_tree
from ..process.control_thread import Control
from ..process.history import History
from ..process.orders import NoOrders, Orders
from ..process.trace import Trace
from ..recovery.settlement import settle
from ..state_recovery import part_builder, with_shards
from ..step.checkpoints import NoCheckpoints
from ..step.iteration import Iteration
from ..step.results import Stepped
from ..step.stats import Stats
from .custom_loop import LoopWorkload

log = structlog.get_logger()


class RestartOnlyDriver:
    """Takes the place of a Member and trains without in-memory recovery: a single process, or one
    started by a launcher such as torchrun or by an agent.

    With an agent and an `output` it writes checkpoints and resumes from the last one. With
    `copy_every` it also stores its state in memory, and resumes from that if it is newer. Raises
    UsageError for a loop that cannot be trained.
    """

    def __init__(
        self,
        work: LoopWorkload,
        environment: Mapping[str, str],
        agent: tuple[Control, StartRank] | None = None,
    ) -> None:
        work.heals = False
        self.control: Orders = NoOrders() if agent is None else agent[0]
        self._train = work.train
        self._place = int(environment.get("RANK", "0"))
        num = int(environment.get("WORLD_SIZE", "1"))
        axes = self._axes(num)
        device = cpu_device.prepare_device(environment)
        host = environment.get("UNICRON_HOST", "")
        self.communicators = Communicators(host or "127.0.0.1", device)
        self.communicators.on_groups = work.on_groups
        self._hosted_store = None
        endpoint = self.communicators.endpoint
        if "MASTER_ADDR" in environment:
            port = int(environment["MASTER_PORT"])
            endpoint = network_address.endpoint(environment["MASTER_ADDR"], port)
            if self._place == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                host = host or "0.0.0.0"  # without an agent, which address is ours is not known
                with network_address.listen(host, port) as listener:
                    self._hosted_store = dist.TCPStore(
                        host,
                        port,
                        is_master=True,
                        wait_for_workers=False,
                        master_listen_fd=os.dup(listener.fileno()),
                        use_libuv=True,
                    )
        self.communicators.meet(1, self._place, num, endpoint, b"")
        self.communicators.up(axes)
        trainee = work.build(device, self.communicators.groups, axes, self._place)
        if not is_plain(work.train.parallel.largest):
            work.begin(with_shards(trainee), part_builder(work, self.communicators, device))
        self.history = History()
        name = "" if agent is None else agent[1].spec.name
        self._checkpoint = RestartCheckpoint(
            work.train, trainee, environment, name, _reports(agent)
        )
        self._memory: RestartMemory | None = None
        if agent is not None and work.train.copy_every:
            self._memory = RestartMemory(agent[1], agent[0], self._place, num)
        self.settled = self._agreed(self._load(trainee))
        self.iteration = Iteration(
            MegatronEngine(trainee),
            self.control,
            self.communicators,
            work,
            Trace(self._place),
            ProgressWriter(),
            self.history,
            self if self._memory is not None else NoCheckpoints(),
        )
        claims = [self.iteration.part.claim() for _ in range(num)]
        share = settle(claims, self._train.num_micro_batches, axes).shares[self._place]
        self.iteration.part.take(self.settled, share, 1, begun=False)

    def _axes(self, num: int) -> Axes:
        """The first layout of the spec with `num` ranks."""
        parallel, micro_batches = self._train.parallel, self._train.num_micro_batches
        for axes in parallel.layouts(num, micro_batches):
            return axes
        raise UsageError(
            f"no layout of tensor {list(parallel.tensor)} by pipeline "
            f"{list(parallel.pipeline)} has {num} ranks and at least one of "
            f"{micro_batches} micro-batches for each replica",
            "start another number of processes",
        )

    def _load(self, trainee: TrainingModel) -> int:
        if self._memory is not None:
            found = self._memory.restore(after=self._checkpoint.step_version)
            if found is not None:
                try:
                    load_objects(trainee.modules, trainee.optimizer, trainee.scheduler, found.tree)
                    self.history.replace(*found.tree["history"])
                    return found.step_version
                except (RuntimeError, ValueError, KeyError) as error:
                    raise UsageError(
                        f"the state in memory is of another model: {error}",
                        "submit the changed script as another task",
                    ) from None
        return self._checkpoint.load(trainee, self.history)

    def _store(self, stepped: Stepped) -> None:
        """Store the state in memory, if that is due and no process still sends its last one."""
        at = self.iteration.step_version
        if (
            self._memory is not None
            and at % self._train.copy_every == 0
            and at < self._train.iterations
            and stepped.may_copy
            and not self.history.spoilt_by
        ):
            self._copy(self._memory, is_whole=stepped.is_copied)

    # --- what an iteration asks (step/checkpoints.py), if the state is stored in memory ---
    def copy_status(self) -> tuple[float, float]:
        assert self._memory is not None
        return self._memory.status()

    def before_change(self) -> None:
        assert self._memory is not None
        self._memory.detach()

    def is_read_after(self, at: int) -> bool:
        return at % self._train.copy_every == 0

    def is_saving(self) -> bool:
        return False

    def keep_last(self, stats: Stats) -> None:
        """Store the present state in memory, unless that was due anyway."""
        at = self.iteration.step_version
        if self._memory is not None and not stats.num_sending and at % self._train.copy_every:
            self._copy(self._memory, is_whole=not stats.num_unstored)

    def _copy(self, memory: RestartMemory, *, is_whole: bool) -> None:
        trainee = self.iteration.engine.trainee
        memory.copy(
            lambda: {
                **objects_tree(trainee.modules, trainee.optimizer, trainee.scheduler),
                "history": [self.history.first, self.history.losses, self.history.step_s],
            },
            self.iteration.step_version,
            is_whole=is_whole,
        )

    def _agreed(self, step_version: int) -> int:
        """Check that all ranks loaded the same step version: nodes may not share `output`."""
        told = self.communicators.rounds.gather(str(step_version).encode())
        found = {int(each) for each in told}
        if len(found) > 1:
            self.communicators.rounds.leave()
            raise UsageError(
                f"some ranks resume from iteration {min(found)}, others from "
                f"{max(found)}: they do not see the same checkpoints",
                "loop.output must be a folder that all nodes share",
            )
        return step_version

    def steps(self) -> Generator[int | None]:
        """Yield each completed iteration. Raises RuntimeError if a collective fails."""
        yield None
        while self.iteration.step_version < self._train.iterations:
            outcome = self.iteration.run()
            if not isinstance(outcome, Stepped):
                raise RuntimeError(outcome.why)
            if self.iteration.step_version == self._train.iterations:
                saved = save_at_end([self._checkpoint], self._save, self.iteration.beside, sleep)
                if not saved.goes_on:
                    raise RuntimeError("" if isinstance(saved, Stepped) else saved.why)
            else:
                self._save(self._checkpoint)
            self._store(outcome)
            yield self.iteration.step_version - 1
        # A peer fails if this process exits before the peer has received the last message.
        self.iteration.beside.meet()
        self.iteration.beside.meet()

    def _save(self, checkpoint: RestartCheckpoint, num_failures: int = 0) -> bool:
        return self._place != 0 or checkpoint.save(self.iteration, self.history)

    def run_collectively(self, call: Callable[[], None]) -> bool:
        """Run `call` on all members. Raises RuntimeError if a collective fails."""
        ended = self.iteration.beside.run(call)
        if ended is not None:
            raise RuntimeError(ended.why)
        return True


def _reports(agent: tuple[Control, StartRank] | None) -> SaveReports | None:
    if agent is None:
        return None
    control, start = agent
    return SaveReports(start, "export", control.tell, is_unknown=start.attempt > 1)


class RestartCheckpoint:
    """The last checkpoint of a restart-only task, in folder `task-N` of its output; none without
    an agent, without a folder, or if no rank has the whole state of a known optimizer."""

    def __init__(
        self,
        train: Train,
        trainee: TrainingModel,
        environment: Mapping[str, str],
        name: str,
        reports: SaveReports | None,
    ) -> None:
        self._train, self._reports = train, reports
        self._folder = ""
        task = int(environment.get("UNICRON_TASK", "0"))
        if not (train.output and task):
            return
        if (
            trainee.is_plain
            and not optimizers.not_adam(trainee.optimizer)
            and not is_url(train.output)
        ):
            self._folder = checkpoint.folder_of(train.output, f"task-{task}")
            owner = output_owner.of_rank(environment, task, name, train.output)
            checkpoint.check_output(train.output, "loop.output", owner)
        else:
            log.warning(
                "no checkpoints: after a fault the task begins at the first iteration",
                why="no rank has the whole state to write to a folder",
            )

    @property
    def step_version(self) -> int:
        """That of the newest checkpoint; 0: there is none."""
        saved = self._saved()
        return int(saved[-1].name[5:]) if saved else 0

    def load(self, trainee: TrainingModel, history: History) -> int:
        """Load the newest checkpoint, or what the job begins from; returns the step version."""
        saved = self._saved()
        folder = str(saved[-1]) if saved else self._train.begin_from
        return checkpoint.load(folder, trainee, history) if folder else 0

    def save(self, iteration: Iteration[MegatronEngine], history: History) -> bool:
        """If a checkpoint is due, save the current state and remove the previous checkpoints. One
        that is NaN or infinite is saved at the end alone, beside the last that is not. Returns
        False if it could not be saved, which is told."""
        at, every = iteration.step_version, self._train.checkpoint_every
        is_last = at == self._train.iterations
        is_due = every and at % every == 0 and not history.spoilt_by
        if not self._folder or not (is_last or is_due):
            return True
        old = [] if history.spoilt_by else self._saved()
        name = f"{self._folder}/iter-{at}"
        try:
            checkpoint.save(name, iteration.engine.trainee, at, history)
        except checkpoint.NotSaved as error:
            then = "" if is_last else "; training continues"
            log.warning(f"checkpoint not saved{then}", iteration=at, why=str(error))
            if self._reports is not None:
                self._reports.failed(error, 0, at, final=is_last, is_repeated=is_last)
            return False
        if self._reports is not None:
            self._reports.worked(name, 0, at, is_whole=True)
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def _saved(self) -> list[Path]:
        """The complete checkpoints, the newest last."""
        folders = Path(self._folder).glob("iter-*") if self._folder else ()
        return sorted(
            (folder for folder in folders if folder.name[5:].isdecimal()),
            key=lambda folder: int(folder.name[5:]),
        )
