"""Process groups created, aborted and rebuilt in one process, by Unicron's own communicators.

Each member is a process: `python -m gpu.groups PLACE NUM DEVICE FOLDER`. In each generation the
members run the collectives that training needs. Then one waits for a peer that never comes, until
`interrupt` ends the wait from another thread, as an order to stop does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.recovery.rows import Row
from gpu.result import CUDA, NotPossible, of
from unicron.workers.training import rank

GENERATIONS_NUM = 5
NUMBERS_NUM = 1 << 20
WAITS_S = 1.0
"""How long the member waits before it is interrupted."""
INTERRUPTED_S_MAX = 30.0
MEMBERS_S_MAX = 240.0
MEMBERS_NUM_MAX = 8
ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Allows two ranks on one GPU, by NCCL's source from 2.30 on."""
REFUSED = "Duplicate GPU detected"


def check(folder: Path, device: str) -> list[Row]:
    """A member on each GPU, of eight at most."""
    return _rows("groups", _run(folder, device, _num_members(device)))


def check_one_gpu(folder: Path, device: str) -> list[Row]:
    """Two members on one GPU, where NCCL allows it."""
    try:
        _run(folder, "cuda:0", 2, **ONE_GPU)
    except AssertionError as error:
        if REFUSED in str(error):
            raise NotPossible("this NCCL refuses two ranks on one GPU") from None
        raise
    return _rows("groups_on_one_gpu", _read(folder, 2))


def _num_members(device: str) -> int:
    if device != CUDA:
        return 2
    import torch

    return min(torch.cuda.device_count(), MEMBERS_NUM_MAX)


def _run(folder: Path, device: str, num: int, **more: str) -> list[dict[str, Any]]:
    """Run the members; what each found."""
    folder.mkdir(parents=True, exist_ok=True)
    members: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"member-{place}.log" for place in range(num)]
    try:
        for place, log in enumerate(logs):
            with log.open("wb") as output:
                members.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "gpu.groups",
                            str(place),
                            str(num),
                            device,
                            str(folder),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env={**os.environ, "NCCL_DEBUG": "WARN", **more},
                    )
                )
        last_s = time.monotonic() + MEMBERS_S_MAX
        while any(one.poll() is None for one in members) and time.monotonic() < last_s:
            if any(one.poll() for one in members):  # the others wait for it
                break
            time.sleep(0.05)
    finally:
        for one in members:
            one.kill()
            one.wait()
    codes = [one.returncode for one in members]
    story = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
    assert not any(codes), f"exit codes {codes}\n{story}"
    return _read(folder, num)


def _read(folder: Path, num: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{place}").read_text()) for place in range(num)]


def _rows(case: str, found: list[dict[str, Any]]) -> list[Row]:
    note = f"{len(found)} members, {found[0]['backend']}"
    rows = [
        of(case, "up_s", [each for one in found for each in one["up_s"]], "s", note),
        of(case, "down_s", [each for one in found for each in one["down_s"]], "s"),
    ]
    if found[0]["interrupted_s"]:
        rows.append(of(case, "interrupted_s", found[0]["interrupted_s"], "s"))
    if found[0]["freed_s"]:
        rows.append(
            of(
                case,
                "freed_s",
                [each for one in found for each in one["freed_s"]],
                "s",
                "until NCCL has freed the memory, which no generation waits for",
            )
        )
    if grown := [one["grown_bytes"] for one in found if one["grown_bytes"] is not None]:
        rows.append(
            of(
                case,
                "grown_bytes",
                grown,
                "bytes",
                f"device memory that {GENERATIONS_NUM - 1} further generations have kept",
            )
        )
    return rows


def member(place: int, num: int, device: str, folder: Path) -> None:
    """One member: all generations; writes what it found."""
    import torch
    from unicron.events.spec.model import Axes
    from unicron.workers.agent.processes.launcher import interface_variables
    from unicron.workers.training.communicators.communicators import Communicators

    os.environ |= interface_variables("127.0.0.1")
    rank._prepare()
    here = torch.device(device)
    if here.type == CUDA:
        index = place % torch.cuda.device_count() if here.index is None else here.index
        here = torch.device(CUDA, index)
        torch.cuda.set_device(here)
    ours = Communicators("127.0.0.1", here)
    endpoint = _endpoint(folder / "endpoint", ours.endpoint if place == 0 else "")
    found: dict[str, Any] = {
        "backend": ours.backend,
        "up_s": [],
        "down_s": [],
        "interrupted_s": [],
        "freed_s": [],
        "grown_bytes": None,
    }
    free_bytes = 0
    for generation in range(1, GENERATIONS_NUM + 1):
        began_s = time.monotonic()
        ours.meet(generation, place, num, endpoint, b"news")
        ours.up(Axes(dp=num))
        _collectives(place, num, here)
        found["up_s"].append(time.monotonic() - began_s)
        if num > 1:
            _wait_in_vain(ours, place, here, folder / f"left-{generation}", found)
        ours.down([])
        assert not ours.is_up
        found["down_s"].append(ours.down_s)
        if here.type == CUDA:
            began_s = time.monotonic()
            ours._nccl_aborts.wait()
            found["freed_s"].append(ours.down_s + time.monotonic() - began_s)
            torch.cuda.empty_cache()
            now_bytes = torch.cuda.mem_get_info(here)[0]
            free_bytes = free_bytes or now_bytes
            found["grown_bytes"] = free_bytes - now_bytes
    (folder / f"found-{place}").write_text(json.dumps(found))


def _collectives(place: int, num: int, device: Any) -> None:
    """The collectives of training: all-reduce, reduce-scatter, all-gather, send and receive."""
    import torch
    import torch.distributed as dist

    mine = torch.full((NUMBERS_NUM,), float(place + 1), device=device)
    total = num * (num + 1) / 2
    summed = mine.clone()
    dist.all_reduce(summed)
    assert bool((summed == total).all()), "the all-reduce is wrong"
    part = torch.empty(NUMBERS_NUM // num, device=device)
    dist.reduce_scatter_tensor(part, mine[: NUMBERS_NUM // num * num])
    assert bool((part == total).all()), "the reduce-scatter is wrong"
    whole = torch.empty(num, device=device)
    dist.all_gather_into_tensor(whole, mine[:1])
    assert whole.tolist() == [float(one + 1) for one in range(num)], "the all-gather is wrong"
    if num == 2:
        got = torch.empty_like(mine)
        if place == 0:
            dist.send(mine, 1)
            dist.recv(got, 1)
        else:
            dist.recv(got, 0)
            dist.send(mine, 0)
        assert bool((got == 2 - place).all()), "what was received is wrong"


def _wait_in_vain(ours: Any, place: int, device: Any, left: Path, found: dict[str, Any]) -> None:
    """The first member waits for the others, which do not come, until it is interrupted."""
    import torch
    import torch.distributed as dist
    from unicron.workers.training.communicators.communicators import ABORTED
    from unicron.workers.training.process.exit_report import is_cuda_error

    if place:
        last_s = time.monotonic() + WAITS_S + INTERRUPTED_S_MAX
        while not left.exists():
            assert time.monotonic() < last_s, "the first member does not leave its wait"
            time.sleep(0.01)
        return
    alone = torch.ones(NUMBERS_NUM, device=device)
    began_s = list[float]()

    def interrupt() -> None:
        began_s.append(time.monotonic())
        ours.interrupt()

    timer = threading.Timer(WAITS_S, interrupt)
    timer.start()
    try:
        dist.all_reduce(alone)
        if device.type == CUDA:
            torch.cuda.synchronize(device)
    except (RuntimeError, *ABORTED) as error:
        if is_cuda_error(error):  # the abort has ruined the context
            raise
    ended_s = time.monotonic()
    timer.join(INTERRUPTED_S_MAX)
    assert began_s, "the collective returned without its peers"
    assert ended_s - began_s[0] < INTERRUPTED_S_MAX, "the interrupted wait went on"
    found["interrupted_s"].append(ended_s - began_s[0])
    left.touch()


def _endpoint(file: Path, own: str) -> str:
    """The address of the first member's store, which the first member publishes."""
    if own:
        partial = file.with_suffix(".partial")
        partial.write_text(own)
        partial.rename(file)
    last_s = time.monotonic() + MEMBERS_S_MAX
    while not file.exists():
        assert time.monotonic() < last_s, "the first member has not started"
        time.sleep(0.01)
    return file.read_text()


if __name__ == "__main__":
    member(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    os._exit(0)  # as a rank: without torch's clean-up
