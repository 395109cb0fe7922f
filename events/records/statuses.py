"""Error statuses: the rows of the paper's table, by which whoever notices and who decides speak.

"Unicron", section 3 (our reading: rows and severities as reported; docs/guides/detection.md).
"""

from __future__ import annotations

LOST_CONNECTION = "lost connection"
EXITED_ABNORMALLY = "exited abnormally"
CONNECTION_REFUSED = "connection refused"
CONNECTION_RESET = "connection reset"
ILLEGAL_MEMORY_ACCESS = "illegal memory access"
ECC_ERRORS = "ECC errors"
INVALID_DMA_MAPPING = "invalid DMA mapping"
CUDA_ERRORS = "CUDA errors"
NVLINK_ERRORS = "NVLink errors"
GPU_DRIVER_ERRORS = "GPU driver errors"
OTHER_NETWORK = "other network errors"
OTHER_SOFTWARE = "other software errors"
NCCL_TIMEOUT = "NCCL timeout"
"""The table's name of a collective's timeout, NCCL's or another backend's."""
LINK_FLAPPING = "link flapping"
TASK_HANG = "task hang"
WRONG_INPUT = "wrong input"
"""No row of the paper: a rank cannot use what the job spec names; starting again does not help."""
