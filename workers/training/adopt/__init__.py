"""Makes a custom megatron-core training loop recover under Unicron: import `adopt` from here.

Read `adoption`, `arguments`, `drivers`, `custom_loop`. Imports `workers/training` and the layers
below it.
"""

from .adoption import Declined, Job, adopt

__all__ = ["Declined", "Job", "adopt"]
