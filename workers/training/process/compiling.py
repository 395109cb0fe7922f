"""Tells the agent that this process compiles: in any iteration, for as long as that takes."""

from functools import partial

from ...ipc.work_row import COMPILES, RowWriter
from ..dependencies import private_torch


def tell_in(row: RowWriter | None) -> None:
    """From now on the row says so while torch.compile compiles. What Triton compiles beside it, and
    what a library builds, is not seen."""
    if row is not None:
        write = partial(row.write, unit="", done=0, total=0, is_storage=False)
        private_torch.on_compiling(lambda: write(COMPILES), lambda: write(""))
