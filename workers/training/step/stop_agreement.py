"""How members that train together agree to stop after the same micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StopAgreement:
    """Whether any of these members must stop. The answer is read one micro-batch later: then the
    device has computed it, and has work while the host reads."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._flag: Tensor | None = None
        self._is_copied: Any = None

    def ask(self, *, must_stop: bool) -> None:
        """Begin to ask the members. All of them call it equally often."""
        flag = torch.full((1,), float(must_stop), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        if self._device.type != "cuda":
            self._flag = flag
            return
        self._flag = torch.empty(1, dtype=flag.dtype, pin_memory=True)
        self._flag.copy_(flag, non_blocking=True)
        self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_copied.record()

    def answer(self) -> bool:
        """The answer to the last question; False before the first. The same on all members."""
        if self._flag is None:
            return False
        if self._is_copied is not None:
            self._is_copied.synchronize()
        return bool(self._flag.numpy()[0])
