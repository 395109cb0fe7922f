"""NCCL's own word on a real communicator: its asynchronous error, the library, its RAS service.

Each member is a process: `python -m gpu.nccl_errors PLACE NUM FOLDER`. With two GPUs the second
member ends in the middle of a generation, and the first must be told so, with nothing but NCCL.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.recovery.rows import Row
from gpu.result import CUDA, NotPossible, of
from unicron.workers.agent.monitoring import nccl_ras
from unicron.workers.training import rank

MEMBERS_S_MAX = 180.0
TOLD_S_MAX = 60.0
ASKS_NUM = 4


def check(folder: Path, device: str) -> list[Row]:
    """One member, or two if there are two GPUs."""
    if device != CUDA:
        raise NotPossible("NCCL needs a GPU")
    import torch

    num = min(torch.cuda.device_count(), 2)
    members = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu.nccl_errors", str(place), str(num), str(folder)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "NCCL_DEBUG": "WARN"},
        )
        for place in range(num)
    ]
    try:
        assert members[0].wait(MEMBERS_S_MAX) == 0, f"exit code {members[0].returncode}"
    finally:
        for member in members:
            member.kill()
            member.wait()
    found = json.loads((folder / "found").read_text())
    note = f"{num} members, library {found['library']}, RAS: {found['ras_chars']} characters"
    rows = [of("nccl_errors", "ask_s", found["ask_s"], "s", note)]
    if found["told_s"] is not None:
        words = f"from the end of the peer until NCCL tells: {found['words']}"[:200]
        rows.append(of("nccl_errors", "told_s", [found["told_s"]], "s", words))
    return rows


def member(place: int, num: int, folder: Path) -> None:
    """Build a generation, ask; with a peer, wait for what NCCL says of its end."""
    import torch
    import torch.distributed as dist
    from gpu.groups import _endpoint
    from unicron.events.spec.model import Axes
    from unicron.workers.agent.processes.launcher import interface_variables
    from unicron.workers.training.communicators import nccl_errors
    from unicron.workers.training.communicators.communicators import Communicators
    from unicron.workers.training.dependencies import private_torch

    os.environ |= interface_variables("127.0.0.1")
    rank._prepare()
    here = torch.device(CUDA, place)
    torch.cuda.set_device(here)
    told: list[nccl_errors.NcclError] = []
    ours = Communicators("127.0.0.1", here, lambda generation, error: told.append(error))
    endpoint = _endpoint(folder / "endpoint", ours.endpoint if place == 0 else "")
    ours.meet(1, place, num, endpoint, b"news")
    ours.up(Axes(dp=num))
    numbers = torch.ones(1 << 20, device=here)
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    assert private_torch.error_of_group(dist.group.WORLD, here) == ""
    library, ask_s = nccl_errors.loaded_library(), list[float]()
    for _ in range(ASKS_NUM if library is not None else 0):
        began_s = time.monotonic()
        communicator = private_torch.communicator_of_group(dist.group.WORLD, here)
        assert communicator, "torch does not give the communicator"
        assert library is not None
        assert library.error_of(communicator) == ""
        ask_s.append(time.monotonic() - began_s)
    ras = asyncio.run(nccl_ras.status(nccl_ras.address(os.environ)))
    time.sleep(2 * nccl_errors.ASK_S)
    assert not told, f"an error without a fault: {told}"
    if place:
        os._exit(9)
    told_s = _told_s(told, numbers) if num > 1 else None
    (folder / "found").write_text(
        json.dumps(
            {
                "library": "found" if library is not None else "inside torch",
                "ask_s": ask_s or [0.0],
                "ras_chars": len(ras),
                "told_s": told_s,
                "words": told[0].words if told else "",
            }
        )
    )
    os._exit(0)


def _told_s(told: list[object], numbers: object) -> float:
    """How long NCCL needs to tell of the peer that has ended."""
    import torch.distributed as dist

    began_s = time.monotonic()
    dist.all_reduce(numbers, async_op=True)  # type: ignore[arg-type]
    while not told:
        assert time.monotonic() - began_s < TOLD_S_MAX, "NCCL does not tell of the lost peer"
        time.sleep(0.01)
    return time.monotonic() - began_s


if __name__ == "__main__":
    member(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
