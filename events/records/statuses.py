"""Error statuses: the rows of the Unicron paper's table, shared by detection and decisions.

Source: Unicron paper, section 3 (rows and severities as we read them; docs/guides/detection.md).
"""

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
"""The table's name for the timeout of a collective, of NCCL or another backend."""
LINK_FLAPPING = "link flapping"
TASK_HANG = "task hang"
WRONG_INPUT = "wrong input"
"""Not in the paper: a rank cannot use an input of the job spec, so a restart does not help."""
