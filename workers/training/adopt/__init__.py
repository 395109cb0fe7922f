"""A training loop of your own on megatron-core adopts Unicron: import `adopt` from here.

Read `adoption`, `arguments`, `drivers`, `custom_loop`. Imports `workers/training` and what is below
it.
"""

from .adoption import Declined, Job, adopt

__all__ = ["Declined", "Job", "adopt"]
