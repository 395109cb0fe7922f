"""How members that train together agree to stop after the same micro-batch."""

from typing import Any

import torch
from torch import Tensor

from ..communicators.operations import MAX, Operations, Role


class StopAgreement:
    """Whether any member of the group of this role must stop.

    An answer is read some passes after its question: after the backward pass, or in a pipeline when
    the next group of micro-batches begins. The device has computed it by then, and still has those
    passes to run, so that it never idles. An answer that is read at once would make the host wait
    until the device has nothing left to do.
    """

    def __init__(self, operations: Operations, role: Role, device: torch.device) -> None:
        self._operations, self._device = operations, device
        self._role: Role = role
        self._flag: Tensor | None = None
        self._is_copied: Any = None

    def ask(self, *, must_stop: bool) -> None:
        """Begin to ask the members. All of them call it equally often."""
        flag = torch.full((1,), float(must_stop), device=self._device)
        self._operations.all_reduce(flag, self._role, MAX)
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
