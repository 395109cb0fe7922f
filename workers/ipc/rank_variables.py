"""Environment variables of torch that healing needs in every rank, unless the user sets others."""

from collections.abc import Mapping

NEEDED = {
    # On an NCCL error torch must neither exit nor block the process: the rank reports and waits.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Nor at a CUDA error that its watchdog sees first: the training thread gets the same error, and
    # the rank reports it.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The rank writes its dumps itself. A thread of torch would ask the store every second whether
    # to write one, and fill the log when the store's connection is gone.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

STORE = {
    # gloo then asks a group's store for the addresses of all members at once, not one by one.
    "GLOO_ENABLE_STORE_V2_API": "1",
    # A member's address is then as long with many members as with few.
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1",
}
"""Without these, a rank's requests to the store, and the bytes of its address, grow with the ranks;
it heals as well."""


def others(environment: Mapping[str, str]) -> list[str]:
    """NAME=VALUE of those that are set to something else: an NCCL fault may then end the rank."""
    return [
        f"{name}={environment[name]}"
        for name, value in NEEDED.items()
        if environment.get(name, value) != value
    ]
