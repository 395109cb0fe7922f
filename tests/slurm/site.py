"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each node.

Two partitions have all nodes: `low`, the default, and `high`, which preempts it. All processes end
with the site: the daemons, and by SLURM_CONF in their environment all that jobs have started.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unicron.cli.cluster.local_cluster import free_port
from unicron.events.network_address import interfaces, is_loopback
from unicron.workers.host import linux

INSTALL_S_MAX = 300.0
CALL_S_MAX = 60.0
START_S_MAX = 30.0
DOWN_S = 5
"""SlurmdTimeout: after so long without an answer a node is down. Slurm's default is 300."""
GRACE_S = 90
NUM_GPUS = 2
"""GPUs of each node, as far as Slurm knows: a job that asks for them gets CUDA_VISIBLE_DEVICES."""
REVOKED_S = 3.0
POLL_S = 0.2
CONF = """
ClusterName=unicron
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={path}/munge.sock
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool-%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd-%n.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=100000
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdTimeout={down_s}
KillWait=5
GresTypes=gpu
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def why_not() -> str:
    """The reason why there is no Slurm here, or "". Installs it if that is possible."""
    try:
        ran = subprocess.run(
            [Path(__file__).with_name("install.sh")],
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"Slurm could not be installed within {INSTALL_S_MAX:g} s"
    if ran.returncode:
        return f"no Slurm here: {(ran.stderr.strip() or 'install.sh failed').splitlines()[-1]}"
    return "" if os.geteuid() == 0 else "several slurmd on one machine need root"


class Site:
    """Slurm with these nodes, from `start` to `stop`. Calls raise CalledProcessError."""

    def __init__(self, path: Path, nodes: Sequence[str]) -> None:
        self.path, self.nodes = path, tuple(nodes)
        self.address = next(
            (address for _, address in interfaces() if not is_loopback(address)), "127.0.0.1"
        )
        self.env = {**os.environ, "SLURM_CONF": str(path / "slurm.conf")}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.path / name).mkdir(parents=True)
        Path(self.env["SLURM_CONF"]).write_text(
            CONF.format(
                host=host,
                address=self.address,
                port=free_port(),
                user=getpass.getuser(),
                path=self.path,
                down_s=DOWN_S,
                grace_s=GRACE_S,
                nodes="\n".join(
                    f"NodeName={node} NodeAddr={self.address} NodeHostname={host} "
                    f"Port={free_port()} "
                    f"CPUs=1 RealMemory=100 Gres=gpu:{NUM_GPUS} State=UNKNOWN"
                    for node in self.nodes
                ),
            )
        )
        for number in range(NUM_GPUS):
            os.mknod(self.path / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (self.path / "gres.conf").write_text(f"Name=gpu File={self.path}/gpu[0-{NUM_GPUS - 1}]\n")
        key = self.path / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={self.path}/munge.sock",
            f"--pid-file={self.path}/munged.pid",
            f"--seed-file={self.path}/munge.seed",
            f"--log-file={self.path}/munged.log",
        )
        self.wait(lambda: (self.path / "munge.sock").exists(), "munged listens")
        self.start_slurmctld()
        for node in self.nodes:
            self.start_slurmd(node)
        self.wait(
            lambda: all(self.state(node) == "idle" for node in self.nodes), "all nodes are idle"
        )

    def start_slurmctld(self) -> None:
        self._start("slurmctld", "-D")
        self.wait(lambda: not self._call("scontrol", "ping").returncode, "slurmctld answers")

    def start_slurmd(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill(self, name: str) -> None:
        """Kill slurmctld, or a node: its slurmd and all that runs there."""
        daemon = self._running.pop(name)
        daemon.kill()
        daemon.wait()
        if name not in self.nodes:
            return
        ours = {f"SLURM_CONF={self.env['SLURM_CONF']}".encode(), f"SLURMD_NODENAME={name}".encode()}
        there = [
            proc
            for proc in linux.table()
            if ours <= set(linux.environ(proc.pid))
            or str(self.path / f"slurmd-{name}.log") in _open_files(proc.pid)
        ]
        # All at once: one that is left would tell slurmctld how the others ended, or cancel them.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for proc in there:
                with suppress(ProcessLookupError):
                    os.kill(proc.pid, number)

    def stop(self) -> None:
        """End all that runs on the site, and servers of logs in folders beside it."""
        for daemon in self._running.values():
            daemon.kill()
        while linux.kill_marked(f"SLURM_CONF={self.env['SLURM_CONF']}".encode()):
            time.sleep(POLL_S)
        for proc in linux.table():  # a log's server has written its title over its environment
            if any(
                file.startswith(f"{self.path.parent}/") and "/server/lock" in file
                for file in _open_files(proc.pid)
            ):
                linux.kill(proc)
        for daemon in self._running.values():
            daemon.wait()

    # --- what a user does ---
    def call(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """The output of a command of Slurm."""
        ran = self._call(*words, env=env)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        return ran.stdout.strip()

    def sbatch(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a job; its number."""
        return self.call(
            "sbatch", "--parsable", f"--output={self.path}/job-%j.txt", *words, env=env
        ).partition(";")[0]

    def job(self, job: str) -> str:
        """The state of a job, "" if it is gone."""
        return self._call("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()

    def ended(self, job: str) -> str:
        """How a job has ended, as COMPLETED, FAILED or TIMEOUT; "" while it has not."""
        shown = self.call("scontrol", "show", "job", "-o", job)
        state = shown.partition("JobState=")[2].partition(" ")[0]
        return "" if state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED") else state

    def start_again(self, job: str) -> None:
        """Wait until the job is requeued, and let it begin soon. Slurm waits 120 s, so that no node
        takes the credential of the next run for that of the former one, which is revoked."""
        self.wait(lambda: self.job(job) == "PENDING", f"job {job} is requeued", CALL_S_MAX)
        time.sleep(REVOKED_S)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def output(self, job: str) -> str:
        file = self.path / f"job-{job}.txt"
        return file.read_text() if file.exists() else ""

    def state(self, node: str) -> str:
        """The state of a node, as sinfo has it."""
        return self._call("sinfo", "-h", "-p", "low", "-n", node, "-o", "%T").stdout.strip()

    def reason(self, node: str) -> str:
        return self.call("sinfo", "-h", "-p", "low", "-n", node, "-o", "%E")

    def wait(self, look: object, what: str, limit_s: float = START_S_MAX) -> None:
        """Poll until `look` is true."""
        assert callable(look)
        deadline_s = time.monotonic() + limit_s
        while not look():
            assert time.monotonic() < deadline_s, f"timed out: {what}"
            time.sleep(POLL_S)

    def _call(
        self, *words: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_S_MAX,
            cwd=self.path,
        )

    def _start(self, program: str, *words: str, name: str = "") -> None:
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        assert path is not None
        with (self.path / f"{name or program}.out").open("ab") as out:
            self._running[name or program] = subprocess.Popen(
                [path, *words],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


def _open_files(pid: int) -> list[str]:
    found: list[str] = []
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # it has ended, or closed it
            found.append(os.readlink(file))
    return found


@contextmanager
def running(path: Path, *nodes: str) -> Iterator[Site]:
    """A site, ended and with all its processes gone at the end."""
    made = Site(path, nodes)
    try:
        made.start()
        yield made
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave a part
        try:
            made.stop()
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
