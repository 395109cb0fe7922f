"""Makes a custom megatron-core training loop recover under Unicron: import `adopt` from here.

A loop that trains by itself imports `keep_in_memory`: it restarts from memory.

Read `adoption`, `arguments`, `drivers`, `custom_loop`, `own_loop`. Imports `workers/training` and
the layers below it.
"""

from .adoption import Declined, Job, adopt
from .own_loop import OwnLoop, keep_in_memory

__all__ = ["Declined", "Job", "OwnLoop", "adopt", "keep_in_memory"]
