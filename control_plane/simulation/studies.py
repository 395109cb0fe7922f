"""How often which cause was, as published: what a drawn trace may name instead of a mix of its own.

`tests/data/failure_categories.csv` has the studies' own words, and which row of the paper's table
each became; a test adds them up to these. Studies of other severities than the table's rows
(FT-HSDP, Fire-Flyer 2, Philly, Meta's lemon nodes) are not here: which row a fault of theirs is
would be a guess.
"""

from __future__ import annotations

from ...events import statuses as s

STUDIES: dict[str, dict[str, float]] = {
    # Unicron, arXiv 2401.00134, table 1: per cent of all tasks of a month. Its "others", 3.3, are
    # left out.
    "unicron": {
        s.NCCL_TIMEOUT: 10.1, s.ECC_ERRORS: 5.0, s.NVLINK_ERRORS: 4.5, s.OTHER_NETWORK: 4.0,
        s.LINK_FLAPPING: 3.9, s.TASK_HANG: 3.1, s.ILLEGAL_MEMORY_ACCESS: 2.1,
        s.INVALID_DMA_MAPPING: 2.1, s.CONNECTION_REFUSED: 2.1, s.CUDA_ERRORS: 1.6,
        s.CONNECTION_RESET: 1.0, s.GPU_DRIVER_ERRORS: 0.6},
    # Llama 3, arXiv 2407.21783, table 5: 419 unexpected interruptions in 54 days on 16,384 H100.
    "llama3": {
        s.GPU_DRIVER_ERRORS: 171, s.ECC_ERRORS: 97, s.OTHER_SOFTWARE: 56, s.LOST_CONNECTION: 53,
        s.OTHER_NETWORK: 35, s.NCCL_TIMEOUT: 7},
    # ByteRobust, arXiv 2509.16293, table 1: 3 months, 778,135 jobs. Without its slow jobs, NaNs and
    # restarts by hand.
    "byterobust": {
        s.CUDA_ERRORS: 19968, s.OTHER_SOFTWARE: 11130, s.EXITED_ABNORMALLY: 6348,
        s.TASK_HANG: 5506, s.OTHER_NETWORK: 1727, s.LOST_CONNECTION: 250, s.ECC_ERRORS: 188,
        s.GPU_DRIVER_ERRORS: 76},
    # Acme, arXiv 2403.07648, table 3: how many, most of them errors of scripts; by the GPU-time
    # that was lost, NVLink and CUDA errors lead.
    "acme": {
        s.OTHER_SOFTWARE: 2274, s.CONNECTION_REFUSED: 147, s.NVLINK_ERRORS: 54, s.CUDA_ERRORS: 35,
        s.OTHER_NETWORK: 25, s.LOST_CONNECTION: 16, s.ECC_ERRORS: 12, s.NCCL_TIMEOUT: 6,
        s.EXITED_ABNORMALLY: 6},
}
