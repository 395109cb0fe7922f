"""XIDs, NVIDIA's numbers of GPU faults: which row of the table each one belongs to.

Source: NVIDIA's catalogue of XIDs, r590; the row is our reading of its "immediate action": reset,
reboot or replace is the GPU's or the link's fault, restart the application is a CUDA error, ignore
has no consequence. tests/data/xid_catalog.csv has the whole of it.
"""

from __future__ import annotations

from ..events.statuses import (
    CUDA_ERRORS,
    ECC_ERRORS,
    EXITED_ABNORMALLY,
    GPU_DRIVER_ERRORS,
    ILLEGAL_MEMORY_ACCESS,
    NVLINK_ERRORS,
)

_SPANS = {
    GPU_DRIVER_ERRORS:
        "1-7 9-10 12 15-24 26-30 33-36 42 46-47 49-59 61-62 65 73 78-79 81 87 90-91 109-120 "
        "122-125 138 143 151 158 162",
    CUDA_ERRORS:
        "8 11 25 32 39-41 43 60 68-72 75-77 80 82-86 88-89 96-105 126-135 139 142 159 163-172",
    ILLEGAL_MEMORY_ACCESS: "13 31",
    ECC_ERRORS: "48 64 94-95 140 156 160",
    NVLINK_ERRORS: "74 136 144-150 155",
    EXITED_ABNORMALLY: "45",
    "": "14 37-38 44 63 66-67 92-93 106-108 121 137 141 152-154 157 161",
}


def _numbers(spans: str) -> list[int]:
    ends = [[int(number) for number in span.split("-")] for span in spans.split()]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


XIDS: dict[int, str] = {number: status for status, spans in _SPANS.items()
                        for number in _numbers(spans)}
"""XID -> row; "": no consequence. 154 and the NVLink numbers also need their text: see `row_of`."""
NVLINK_5 = range(144, 151)
RECOVERY_ACTION_CODE = 154


def row_of(xid: int, text: str) -> str:
    """The row of one XID by its number and the message behind it, in lower case.

    The numbers 144 to 150 say themselves whether they are fatal; 154 tells the recovery action that
    the driver wants now: anything but none needs the node drained. A stranger has no consequence.
    """
    if xid in NVLINK_5 and ("nonfatal" in text or "non-fatal" in text):
        return ""
    if xid == RECOVERY_ACTION_CODE:
        _, found, wanted = text.rpartition(" to ")
        return GPU_DRIVER_ERRORS if found and "none" not in wanted[:24] else ""
    return XIDS.get(xid, "")
