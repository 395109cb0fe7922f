"""The names that Megatron-LM's scripts import from megatron.training; see README.md."""

from .global_vars import get_args, get_tensorboard_writer, get_timers
from .training import pretrain, set_startup_timestamps
from .utils import print_rank_0

__all__ = [
    "get_args",
    "get_tensorboard_writer",
    "get_timers",
    "pretrain",
    "print_rank_0",
    "set_startup_timestamps",
]
