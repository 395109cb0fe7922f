"""What the installed torch offers to change a communicator instead of building a new one.

Unicron builds all communicators of a generation anew. A part of a living communicator (`split`)
needs all its members, which a fault does not leave; `shrink` leaves members out, and none can join;
`reconfigure`, which could do both, is an interface of torchcomms. `python -m` of this module prints
what is there, for `unicron doctor`.
"""

import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
from msgspec import Struct

SPLITS_FROM, SHRINKS_FROM = (2, 18), (2, 27)
"""Versions of NCCL from which it has ncclCommSplit and ncclCommShrink. Source: its release notes.
"""

GLOO_S_MAX = 60.0
"""A group of one member, which waits for nobody."""


class Offers(Struct, frozen=True):
    """`torch`: its version; `nccl`: that of NCCL, empty without. The backends that can split a
    group and shrink it by torch's `split_group` and `shrink_group`; whether there is torchcomms,
    or a method `reconfigure` of groups."""

    torch: str
    nccl: str
    split: tuple[str, ...]
    shrink: tuple[str, ...]
    reconfigure: bool


def offers() -> Offers:
    """Probe the installed torch. Imports it. Raises ImportError."""
    import torch
    import torch.distributed as dist

    nccl: tuple[int, ...] = ()
    if dist.is_nccl_available():
        library: Any = import_module("torch.cuda.nccl")
        nccl = library.version()
    split = ["nccl"] if hasattr(dist, "split_group") and nccl >= SPLITS_FROM else []
    shrink = ["nccl"] if hasattr(dist, "shrink_group") and nccl >= SHRINKS_FROM else []
    if dist.is_gloo_available():
        gloo: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=GLOO_S_MAX))
        split += ["gloo"] * bool(getattr(gloo, "supports_splitting", False))
        shrink += ["gloo"] * bool(getattr(gloo, "supports_shrinking", False))
    return Offers(
        str(torch.__version__),
        ".".join(map(str, nccl)),
        tuple(split),
        tuple(shrink),
        hasattr(dist.ProcessGroup, "reconfigure") or find_spec("torchcomms") is not None,
    )


def in_words(offered: Offers) -> str:
    """One line, without the version of torch."""

    def by(backends: tuple[str, ...]) -> str:
        return f"by {' and '.join(backends)}" if backends else "by no backend here"

    nccl = f", NCCL {offered.nccl}" if offered.nccl else ""
    there = "there is" if offered.reconfigure else "there is no"
    return (
        f"built anew in each generation; groups could be split {by(offered.split)}, "
        f"shrunk {by(offered.shrink)}{nccl}; {there} reconfigure"
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(offers()))
