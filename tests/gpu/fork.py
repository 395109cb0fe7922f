"""No CUDA before the zygote forks: ranks that it forks can use the GPU.

CUDA does not work in a fork of a process that has initialised it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bench.recovery.rows import Row
from gpu.result import CUDA, of
from nursery import PATCH, Forked, Nursery

FORKS_NUM = 2
"""The second rank is forked while the first one uses the GPU."""
RANK_S_MAX = 120.0
RANK = """
import json, os, time, torch
found = {{"initialised": torch.cuda.is_initialized(), "sum": None}}
began_s = time.monotonic()
if {uses_gpu}:
    ones = torch.ones(64, 64, device="cuda")
    found["sum"] = ones.mm(ones)[0, 0].item()
found["context_s"] = time.monotonic() - began_s
open({file!r} + ".partial", "w").write(json.dumps(found))
os.rename({file!r} + ".partial", {file!r})
if {stays}:
    time.sleep(600)
os._exit(0)
"""


def check(folder: Path, device: str) -> list[Row]:
    """Fork ranks from the product's zygote; each uses the GPU."""
    nursery = Nursery(folder / "zygote.log")
    times_s: list[float] = []
    ranks = list[Forked]()
    try:
        for number in range(FORKS_NUM):
            file, log = folder / f"found-{number}", folder / f"rank-{number}.log"
            code = RANK.format(uses_gpu=device == CUDA, file=str(file), stays=number == 0)
            with log.open("wb") as output, open(os.devnull, "rb") as nothing:
                ranks.append(
                    nursery.fork(
                        {**os.environ, "UNICRON_RANK": str(number), PATCH: code},
                        output.fileno(),
                        nothing.fileno(),
                    )
                )
            found = _wait(file, log, ranks[-1])
            assert not found["initialised"], "the zygote has initialised CUDA"
            assert found["sum"] == (64.0 if device == CUDA else None), found
            times_s.append(float(found["context_s"]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
        nursery.close()
    return [of("fork", "context_s", times_s, "s", "a forked rank's first use of the GPU")]


def _wait(file: Path, log: Path, rank: Forked) -> dict[str, Any]:
    """What the rank has found."""
    last_s = time.monotonic() + RANK_S_MAX
    while not file.exists():
        code = rank.poll()
        assert code in (None, 0), f"exit code {code}\n{log.read_text(errors='replace')[-3000:]}"
        assert time.monotonic() < last_s, f"a rank has not used the GPU in {RANK_S_MAX:.0f} s"
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(file.read_text())
    return found
