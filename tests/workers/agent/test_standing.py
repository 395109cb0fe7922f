"""What a process does that makes no progress, of real processes that do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from unicron.workers.agent.monitoring import process_state


def said(code: str, number: signal.Signals | None = None) -> str:
    with subprocess.Popen([sys.executable, "-c", f"print('up', flush=True)\n{code}"],
                          stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            before = process_state.look(child.pid)
            assert before is not None
            if number is not None:
                os.kill(child.pid, number)
            time.sleep(0.4)
            return process_state.describe(child.pid, before)
        finally:
            child.kill()


def test_a_process_that_stands_is_described() -> None:
    assert said("while True: pass").startswith("computes")
    assert said("import time; time.sleep(60)").startswith("sleeps in ")
    assert said("import time; time.sleep(60)", signal.SIGSTOP) == "stopped by a signal"
    thread = "import threading, time; threading.Lock().acquire(); time.sleep(60)"
    assert said(thread).startswith("sleeps")


def test_a_process_that_is_gone_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    assert process_state.look(child.pid) is None
    assert process_state.describe(child.pid, None) == ""
