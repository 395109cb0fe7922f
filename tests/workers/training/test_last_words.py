"""What a rank says when one of its threads fails; one that is not its own ends nothing."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import unicron
from unicron.events.records.reports import RankErrored
from unicron.events.records.statuses import CONNECTION_REFUSED
from unicron.workers.ipc.pipe_protocol import Unpacker
from unicron.workers.training.process.exit_report import OWN_THREADS, TEXT_CHARS_MAX

PROGRAM = """
import os, socket, sys, threading
from unicron.events.records.orders import Slot, StartRank
from unicron.events.spec.job import parse
from unicron.workers.training.process.control_thread import Control
from unicron.workers.training.process.exit_report import ExitReporter
from unicron.workers.ipc.pipe_protocol import Unpacker

spec = parse({"apiVersion": "unicron/v1", "name": "small", "slots": {"min": 1, "max": 1},
              "command": ["true"]})
order = StartRank(nodes=("n1",), task=7, rank=2, attempt=1, slot=Slot("n1", 0), spec=spec,
                  num_seats=1, host="", port=0, checkpoint="")
control = Control(socket.socket(fileno=int(sys.argv[1])), 2, Unpacker())
threading.excepthook = ExitReporter(control, order).report_thread

def end(name, error):
    def fail():
        raise error
    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()
    print(name, "ended", flush=True)

end("QueueFeederThread", OSError("a library's"))
end("checkpoint", SystemExit(0))
error = ValueError("ours" + "!" * 10_000)
error.__cause__ = ConnectionRefusedError(111, "Connection refused")
end("checkpoint", error)
"""


def test_a_thread_that_is_not_ours_ends_no_rank() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                              pass_fds=[theirs.fileno()], capture_output=True, text=True,
                              timeout=60, check=False)
        theirs.close()
        (frame,) = Unpacker().feed(ours.recv(1 << 16))
    assert done.stdout == "QueueFeederThread ended\ncheckpoint ended\n", done.stderr
    assert done.returncode == 1
    assert "thread QueueFeederThread has ended, training continues: Traceback" in done.stderr
    assert "OSError: a library's" in done.stderr
    assert isinstance(frame.body, RankErrored)
    assert (frame.body.rank, frame.body.error) == (2, "ValueError")
    assert (frame.body.status, frame.body.second_hand) == (CONNECTION_REFUSED, False)
    assert len(frame.body.text) == TEXT_CHARS_MAX
    assert frame.body.text.startswith("ConnectionRefusedError: [Errno 111] Connection refused\n")
    assert frame.body.text.endswith("!!!\n")


def test_every_thread_that_a_rank_starts_is_known_as_its_own() -> None:
    folder = Path(unicron.__file__).parent / "workers" / "training"
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    starts = re.findall(r"threading\.Thread\(|ThreadPoolExecutor\(", source)
    names = re.findall(r"threading\.Thread\(.*?name=\"([^\"]+)\"", source, re.DOTALL)
    names += re.findall(r"ThreadPoolExecutor\(1, \"([^\"]+)\"", source)
    assert len(names) == len(starts)
    names += re.findall(r"DetachedThread\(\"([^\"]+)\"", source)
    optional = {"flight recorder"}  # an error in it is logged, and training continues
    assert set(names) == {*OWN_THREADS, *optional}
