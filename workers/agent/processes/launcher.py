"""Starts ranks with their environment: forked from the zygote if possible, else by exec."""

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog
from msgspec import Struct, json, msgpack, structs

from ....events import network_address
from ....events.decoding import from_msgpack
from ....events.records.orders import StartRank
from ....events.records.types import Labels
from ....events.spec.launchers import launcher_of
from ....events.spec.policy import OUTPUT_BYTES_MAX, REDACT
from ...host import output_owner, rank_cgroups
from ...host.rank_cgroups import Limits, RankCgroups
from ...host.rank_user import RankUser
from ...ipc import stack_signal
from ...ipc.pipe_protocol import FD, LOOP, PULSE, Frame, Unpacker, pack
from ...ipc.progress_page import ProgressPage
from . import former_outputs, torch_files
from .pipe import Pipe
from .process import Output, Process
from .shim import ZYGOTE, Shim
from .zygote import Zygote

MARKER = "UNICRON_PROCESS"
"""Environment variable of every process that an agent starts: identifies its owner."""
FD_ENV = {"--fd": FD, "--pulse": PULSE}
"""Option of a rank -> the environment variable that a command gets instead."""
CGROUPS_ENV = "UNICRON_CGROUPS"
"""Set to 0: ranks get no cgroups."""
RANK_ARGV = (sys.executable, "-P", "-m", "unicron.workers.training.rank")

_log = structlog.get_logger("agent")


class NodeConfig(Struct, frozen=True, kw_only=True):
    """The agent's configuration. `devices` has one entry per slot, or none (CPU)."""

    name: str
    incarnation: int
    cluster: str
    host: str
    num_slots: int
    state_dir: Path
    cluster_id: str = ""
    """Distinguishes clusters of the same name."""
    labels: Labels = Labels()
    devices: tuple[str, ...] = ()
    rank_argv: tuple[str, ...] = RANK_ARGV
    redact: tuple[str, ...] = REDACT
    """Policy.redact: names of variables whose values must not enter the log."""
    run_as: RankUser | None = None
    """The user of its ranks; None: that of the agent."""
    watch: bool = True
    """Whether its ranks are monitored for stalls."""
    limits: Limits = Limits()
    """Of each rank: Policy.rank_pids_max, Policy.rank_memory_bytes_max."""
    gone_s: float = 60.0
    """Policy.agent_gone_s_max."""
    output_bytes_max: int = OUTPUT_BYTES_MAX
    """Policy.output_bytes_max."""
    probe_port: int = 0
    """The UDP port at which the shim answers probes; 0: at none."""
    store_secret: bytes = b""
    """Of the node's checkpoint store (workers/checkpoint_store/protocol.py)."""

    @property
    def source(self) -> str:
        return f"{self.name}/{self.incarnation}"

    @property
    def mark(self) -> str:
        return marker_prefix(self.state_dir, self.name)


def marker_prefix(state_dir: Path, node: str) -> str:
    """The prefix of the marker value in all processes of any incarnation of this node."""
    return f"{state_dir}:{node}/"


class _Note(Struct, frozen=True):
    """What the shim holds of a rank: its StartRank as a frame, its log, where its output begins,
    the folder where it writes files for the agent, and its cgroup ("": it has none)."""

    order: bytes
    log_path: str
    log_start: int
    folder: str
    cgroup: str = ""


class Launcher:
    """Starts the processes of one node's ranks, and finds those of a former agent. `lost`: the
    slots whose devices the driver does not find any more."""

    def __init__(
        self, node: NodeConfig, shim: Shim, lost: Callable[[], Collection[int]] = tuple
    ) -> None:
        self._node = node
        self._shim = shim
        self._lost = lost
        self._zygote: Zygote | None = None
        if node.rank_argv == RANK_ARGV:
            self._zygote = Zygote(
                os.environ,
                (MARKER, f"{node.mark}{node.incarnation}:{ZYGOTE}"),
                node.state_dir / "logs" / f"zygote-{node.name}.log",
                shim,
                node.run_as.name if node.run_as else "",
            )
        self._folders: Path | None = None
        """With `run_as`: where ranks write files for the agent."""
        self._cgroups = _cgroups(node, os.environ)
        self.clear()  # of an agent that was killed

    async def prepare(self, order: StartRank) -> None:
        """Wait for the zygote if the rank needs it: seconds the first time. Call before `start`."""
        if self._zygote is not None and order.spec.train is not None:
            await self._zygote.is_ready()

    def held(self) -> Iterator[tuple[Frame, Process, list[int]]]:
        """The ranks of a former agent: the order (its body is a StartRank, with seq and epoch), the
        process, and the files that the shim has held."""
        for key, held in self._shim.held.items():
            if held.note and held.pid:
                note = from_msgpack(held.note, _Note)
                (frame,) = Unpacker().feed(note.order)
                marker = f"{MARKER}={self._node.mark}{self._node.incarnation}:{key}".encode()
                process = Process(
                    held.pid,
                    Path(note.log_path),
                    note.log_start,
                    marker,
                    self._shim,
                    key,
                    Path(note.cgroup) if note.cgroup else None,
                )
                yield frame, self._with_user(process, Path(note.folder)), held.files

    def _with_user(self, process: Process, folder: Path) -> Process:
        process.folder = folder
        if self._node.run_as:
            process.uid, self._folders = self._node.run_as.uid, folder.parent
        return process

    def _folder(self, log_path: Path) -> Path:
        """Where a rank with this log writes files for the agent."""
        if self._node.run_as is None:
            return log_path.parent
        if self._folders is None:
            # Only root can change the parent, so no rank can replace a folder before its chown.
            self._folders = Path(tempfile.mkdtemp(prefix="unicron-ranks-"))
            self._folders.chmod(0o711)
        path = self._folders / log_path.parent.name
        path.mkdir(mode=0o700, exist_ok=True)
        os.chown(path, self._node.run_as.uid, self._node.run_as.gid)
        return path

    def clear(self) -> None:
        """Remove the cgroups of ranks that have ended, with what is in them."""
        if self._cgroups is not None:
            self._cgroups.clear(self._shim.pids)

    def end(self) -> None:
        """End all processes of the node, with the shim."""
        self._shim.end()
        self.clear()

    def _cgroup(self, key: str) -> Path | None:
        """A new cgroup for a rank; None: it cannot have one."""
        if self._cgroups is None:
            return None
        self.clear()
        try:
            return self._cgroups.make(key)
        except OSError as error:
            _log.warning("a rank has no cgroup", key=key, why=str(error))
            return None

    def start(
        self, order: StartRank, frame: Frame, pipe: Pipe | None, page: ProgressPage | None
    ) -> Process:
        """Start the rank with its pipe to the agent and its progress page. `frame`: the order, for
        the next agent. Raises OSError, ValueError."""
        cgroup = self._cgroup(key_of(order))
        try:
            return self._start(order, frame, pipe, page, cgroup)
        except (OSError, ValueError):
            self.clear()
            raise

    def _start(
        self,
        order: StartRank,
        frame: Frame,
        pipe: Pipe | None,
        page: ProgressPage | None,
        cgroup: Path | None,
    ) -> Process:
        node = self._node
        user = node.run_as.name if node.run_as else ""
        log_path = (
            node.state_dir
            / "logs"
            / f"{order.task}-{order.spec.name}"
            / f"rank-{order.rank}.attempt-{order.attempt}.log"
        )
        key, folder = key_of(order), self._folder(log_path)
        marker = (MARKER, f"{node.mark}{node.incarnation}:{key}")

        def note(log_start: int) -> bytes:
            return msgpack.encode(
                _Note(pack(frame), str(log_path), log_start, str(folder), str(cgroup or ""))
            )

        output = Output(log_path, node.output_bytes_max)
        former_outputs.remove_attempts(output.path, folder, output.bytes_max)
        env = environment(order, node, os.environ, self._lost())
        env |= files_for_agent(log_path, folder)
        files = {"--fd": pipe.theirs.fileno()} if pipe is not None else {}
        if page is not None:
            files["--pulse"] = page.fd
        held = [
            *([pipe.fileno()] if pipe is not None else []),
            *([page.fd] if page is not None else []),
        ]
        by_exec = partial(
            Process.start,
            self._shim,
            key,
            note,
            env=env,
            marker=marker,
            output=output,
            held=held,
            user=user,
            cgroup=cgroup,
        )
        if order.spec.command:
            process = by_exec(
                on_this_node(order.spec.command, env),
                files={FD_ENV[option]: fd for option, fd in files.items()},
                folder=order.spec.folder,
            )
        elif self._zygote is not None and self._zygote.can_fork(env):
            process = Process.fork(
                self._zygote,
                self._shim,
                key,
                note,
                env=env,
                marker=marker,
                output=output,
                files=tuple(files.values()),
                held=held,
                cgroup=cgroup,
            )
        else:
            process = by_exec(node.rank_argv, files=files)
        return self._with_user(process, folder)


def files_for_agent(log_path: Path, folder: Path) -> dict[str, str]:
    """The variables that name the files that a process with this log writes for its agent."""
    return {
        torch_files.ERROR_FILE_ENV: str(torch_files.error_file_of(log_path, folder)),
        stack_signal.VARIABLE: str(stack_signal.dump_file_of(log_path, folder)),
    }


def unlimited(limits: Limits) -> tuple[str, ...]:
    """Those of these limits that ranks of this agent do not get."""
    base = _cgroups_here(os.environ)
    given = rank_cgroups.limiting(base) if base is not None else frozenset[str]()
    return tuple(name for name, value in limits._asdict().items() if value and name not in given)


def _cgroups_here(env: Mapping[str, str]) -> Path | None:
    return rank_cgroups.find() if env.get(CGROUPS_ENV) != "0" else None


def _cgroups(node: NodeConfig, env: Mapping[str, str]) -> RankCgroups | None:
    """Where the node's ranks have their cgroups; None: they are contained by adoption."""
    base = _cgroups_here(env)
    wanted = {name for name, value in node.limits._asdict().items() if value}
    given = rank_cgroups.enable(base) if base is not None and wanted else frozenset[str]()
    if lacking := wanted - given:
        _log.warning(
            "ranks are not limited: this agent has no cgroup with these controllers",
            limits=sorted(lacking),
            hint="docs/guides/systemd.md; unicron doctor",
        )
    return RankCgroups(base, node.mark, node.limits) if base is not None else None


def key_of(order: StartRank) -> str:
    """The name of a rank's attempt."""
    return f"{order.task}.{order.rank}.{order.attempt}"


def local_slots(order: StartRank, num_slots: int, lost: Collection[int] = ()) -> tuple[int, ...]:
    """The slots of the order's task on this node, by rank, without the `lost` ones of other ranks:
    CUDA shows no device behind one that it does not find."""
    own = order.slot.index
    slots = order.local_slots if own in order.local_slots else (own,)
    return tuple(slot for slot in slots if slot == own or (slot < num_slots and slot not in lost))


def environment(
    order: StartRank,
    node: NodeConfig,
    inherited: Mapping[str, str],
    lost: Collection[int] = (),
) -> dict[str, str]:
    """A rank's environment: the agent's, plus the variables for its kind of task. `lost`: as in
    `local_slots`.

    It sees the devices of its task on this node, by rank, and its own is that of its local rank.
    """
    env = {"PYTHONUNBUFFERED": "1", **interface_variables(node.host), **inherited}
    env |= {
        output_owner.VARIABLE: f"{node.cluster}/{node.cluster_id}",
        "UNICRON_HOST": node.host,
        "UNICRON_NODE": node.name,
        "UNICRON_TASK": str(order.task),
        "UNICRON_RANK": str(order.rank),
        "UNICRON_ATTEMPT": str(order.attempt),
    }
    if node.run_as:
        env |= {"HOME": node.run_as.home, "USER": node.run_as.name, "LOGNAME": node.run_as.name}
    slots = local_slots(order, node.num_slots, lost)
    env |= {
        "LOCAL_RANK": str(slots.index(order.slot.index)),
        "LOCAL_WORLD_SIZE": str(len(slots)),
    }
    if node.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(node.devices[slot] for slot in slots)
    if order.spec.command:
        env |= {
            "RANK": str(order.rank),
            "WORLD_SIZE": str(order.num_seats),
            "MASTER_ADDR": order.host,
            "MASTER_PORT": str(order.port),
        }
        env |= launcher_variables(order, node, env)
        if order.axes is not None:
            env |= {
                f"UNICRON_{name.upper()}": str(value)
                for name, value in structs.asdict(order.axes).items()
            }
        if order.spec.loop is not None:
            if not node.devices:
                env.setdefault("OMP_NUM_THREADS", "1")
            env[LOOP] = json.encode(order.spec.loop).decode()
    elif not node.devices:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def launcher_variables(
    order: StartRank, node: NodeConfig, env: Mapping[str, str]
) -> dict[str, str]:
    """What torchrun reads instead of its options; what Slurm sets for each task of srun, where the
    agent is a task itself."""
    found: dict[str, str] = {}
    rank, num_ranks = str(order.rank), str(order.num_seats)
    if launcher_of(order.spec.command) == "torchrun":
        found = {
            "PET_NNODES": num_ranks,
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": rank,
            "PET_MASTER_ADDR": order.host,
            "PET_MASTER_PORT": str(order.port),
        }
        if node.devices:  # its one process has the local rank 0, of 1
            found["CUDA_VISIBLE_DEVICES"] = node.devices[order.slot.index]
    if "SLURM_JOB_ID" in env:
        found |= {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": env["LOCAL_RANK"],
            "SLURM_NTASKS": num_ranks,
            "SLURM_NPROCS": num_ranks,
        }
    return found


def on_this_node(command: Sequence[str], env: Mapping[str, str]) -> Sequence[str]:
    """The command; srun starts one task, beside the agent's."""
    if launcher_of(command) != "srun" or not (name := env.get("SLURMD_NODENAME")):
        return command
    return (command[0], "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", *command[1:])


def interface_variables(host: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface that has this address."""
    interface = network_address.interface_of(host)
    if not interface:
        return {}
    found = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }  # without `=`, eth1 also stands for eth10
    if ":" in host:
        found["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return found
