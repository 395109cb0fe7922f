"""Waits for a core, as the kernel tells them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
from unicron.workers.host import cpu_wait
from unicron.workers.host.cpu_wait import NUM_THREADS_MAX, CpuWait
from unicron.workers.ipc.progress_page import OWN_CODE, ProgressPage, ProgressWriter

SPIN = "import time\nend_s = time.monotonic() + 20\nwhile time.monotonic() < end_s: pass"


def work(in_s: float) -> None:
    """So much work of this thread's own, however long that takes."""
    end_s = time.thread_time() + in_s
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize("elsewhere", [False, True])
def test_work_beside_another_on_one_core_is_all_but_what_was_waited(elsewhere: bool) -> None:
    """Also where another thread has passed a mark meanwhile."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    pinned = f"import os\nos.sched_setaffinity(0, {{{core}}})\n{SPIN}"
    other = subprocess.Popen([sys.executable, "-c", pinned])
    told = CpuWait()
    try:
        os.sched_setaffinity(0, {core})
        time.sleep(0.3)
        before_s, began_s = told.in_s(), time.monotonic()
        work(0.15)
        if elsewhere:
            thread = threading.Thread(target=told.in_s)
            thread.start()
            thread.join()
        work(0.15)
        took_s, waited_s = time.monotonic() - began_s, told.in_s() - before_s
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    assert waited_s > 0.1, "two shared it"
    assert took_s - waited_s == pytest.approx(0.3, abs=0.1)
    assert cpu_wait.cpu_wait_s(os.getpid()) > 0


def test_a_sleep_is_no_wait_for_a_core() -> None:
    told = CpuWait()
    before_s = told.in_s()
    time.sleep(1.0)
    assert told.in_s() - before_s < 0.75


def test_threads_that_hand_over_to_each_other_are_one_and_few() -> None:
    told = CpuWait()
    before = len(os.listdir("/proc/self/fd"))
    told.in_s()
    for _ in range(3 * NUM_THREADS_MAX):
        thread = threading.Thread(target=told.in_s)
        thread.start()
        thread.join()
    assert told.in_s() >= 0
    assert len(os.listdir("/proc/self/fd")) <= before + NUM_THREADS_MAX


def test_where_the_kernel_does_not_say_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*told: object) -> int:
        raise PermissionError

    monkeypatch.setattr(cpu_wait.os, "open", refuse)
    told = CpuWait()
    work(0.01)
    assert (told.in_s(), told.in_s()) == (0.0, 0.0)
    assert cpu_wait.cpu_wait_s(2**22 + 1) == 0.0


def test_waits_for_a_core_are_no_work_of_its_own() -> None:
    page = ProgressPage()
    pulse, waited_s = ProgressWriter(os.dup(page.fd)), 0.0
    pulse._cpu_wait = mock.Mock(in_s=lambda: waited_s)
    pulse.begin(1, 1, "usual")
    time.sleep(0.05)
    waited_s = 0.03
    pulse.enter("stats")
    waited_s = 7.0  # in a collective that counts as waiting for others
    time.sleep(0.02)
    pulse.mark("stats_done", OWN_CODE)
    waited_s += 0.01
    pulse.finish()
    mark, (done,) = page.mark(), page.done(0)
    assert mark is not None
    assert done.own_s == pytest.approx(done.iteration_s - mark.waited_s - 0.04)
    page.close()
