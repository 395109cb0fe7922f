"""The throughput model's constants, as `make bench-throughput` fits them.

To 246 published rows of A100 and H100 in 16 bits, each source counting the same: what they are
worth in and out of sample stands in docs/guides/throughput-model.md. A kind without rows takes
those of the kind that is built most alike: its level is a guess, and one measured point corrects
it.
"""

from __future__ import annotations

from ..events.model_spec import MegatronModel
from .layout_time import Constants

AMPERE = Constants(gemm_share=0.679, scores_share=0.556, passes=6.94, link_share=0.628,
                   network_share=0.993)
HOPPER = Constants(gemm_share=0.686, scores_share=0.279, passes=6.94, link_share=0.628,
                   network_share=0.993)


def constants_of(model: MegatronModel) -> Constants:
    """Of the model's kind of GPU."""
    return AMPERE if model.gpu[0] in "VA" else HOPPER
