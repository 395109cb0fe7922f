"""A trial of a device, in its real process, on a CUDA driver that is a small library of this test.

No test here has a GPU: `make gpu-check CHECKS=trial` tries a real one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from unicron.events.log.port import FileRequest
from unicron.workers.agent import output_files
from unicron.workers.agent.health import limits
from unicron.workers.agent.health.device_trial import try_devices

DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <stdint.h>
static int fails(const char *call) {
  const char *fault = getenv("FAULT");
  if (fault && !strcmp(fault, "hang") && !strcmp(call, "cuInit")) for (;;) pause();
  if (fault && !strcmp(fault, "abort") && !strcmp(call, "cuInit")) abort();
  return fault && !strcmp(fault, call) ? 999 : 0;
}
int cuInit(unsigned f) { return fails("cuInit"); }
int cuDeviceGetCount(int *n) { *n = 1; return fails("cuDeviceGetCount"); }
int cuDeviceGet(int *d, int n) { *d = n; return fails("cuDeviceGet"); }
int cuDevicePrimaryCtxRetain(void **c, int d) { return fails("cuDevicePrimaryCtxRetain"); }
int cuCtxSetCurrent(void *c) { return fails("cuCtxSetCurrent"); }
int cuMemAlloc_v2(uint64_t *p, size_t n) {
  *p = (uint64_t)malloc(n); return fails("cuMemAlloc_v2");
}
int cuMemsetD32_v2(uint64_t p, unsigned v, size_t n) {
  for (size_t i = 0; i < n; i++) ((unsigned *)p)[i] = v;
  if (getenv("FAULT") && !strcmp(getenv("FAULT"), "flip")) ((unsigned *)p)[7] ^= 1;
  return fails("cuMemsetD32_v2");
}
int cuMemcpyDtoH_v2(void *to, uint64_t p, size_t n) {
  memcpy(to, (void *)p, n); return fails("cuMemcpyDtoH_v2");
}
int cuMemFree_v2(uint64_t p) { free((void *)p); return 0; }
int cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_UNKNOWN"; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "cuda.c").write_text(DRIVER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"],
        check=True,
        timeout=60,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", ""),
        ("cuInit", "cuInit: CUDA_ERROR_UNKNOWN"),
        ("cuMemAlloc_v2", "cuMemAlloc_v2: CUDA_ERROR_UNKNOWN"),
        ("cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2: CUDA_ERROR_UNKNOWN"),
        ("flip", "1 of 4194304 words of its memory are read back wrong"),
        ("abort", "its trial ended with code -6"),
    ],
)
def test_a_device_is_written_and_read_back(
    monkeypatch: pytest.MonkeyPatch, fault: str, found: str
) -> None:
    monkeypatch.setenv("FAULT", fault)
    assert asyncio.run(try_devices(("0", "GPU-1"), (1,))) == {1: found}


@pytest.mark.usefixtures("driver")
def test_a_driver_that_hangs_is_killed_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "hang")
    monkeypatch.setattr(limits, "TRIAL_S_MAX", 3.0)
    began_s = time.monotonic()
    found = asyncio.run(try_devices(("0", "1"), (0, 1)))
    assert found == dict.fromkeys((0, 1), "it does not answer within 3 s")
    assert time.monotonic() - began_s < 60


def test_a_slot_without_a_device_is_healthy_and_a_machine_without_a_driver_is_not() -> None:
    assert asyncio.run(try_devices((), (0, 3))) == {0: "", 3: ""}
    if not Path("/proc/driver/nvidia").exists():
        assert "CUDA's driver cannot be loaded" in asyncio.run(try_devices(("0",), (0,)))[0]


def test_the_agent_answers_a_check_and_an_older_one_refuses_it(tmp_path: Path) -> None:
    request = FileRequest(number="n", path="", offset=0, slots=(0,))
    assert output_files.read_part(tmp_path, request).error, "as an agent that knows no checks"
    part = asyncio.run(output_files._answer(tmp_path, (), request))
    assert (part.number, part.data, part.error) == ("n", b"\x81\x00\xa0", "")
