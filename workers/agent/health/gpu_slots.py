"""Maps GPUs to slots by PCI address, UUID or index."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_ADDRESS = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.\d)?$", re.IGNORECASE)


class GpuSlots:
    """PCI addresses of the slots' GPUs. `is_known`: the mapping is complete."""

    def __init__(self, addresses: Mapping[int, str] | None = None, num_slots: int = 0) -> None:
        self._by_address = {normalize_address(address): slot
                            for slot, address in (addresses or {}).items()}
        self.is_known = num_slots > 0 and len(self._by_address) == num_slots

    def find(self, device: str) -> int | None:
        """The slot of a PCI address; None if the GPU is not ours, or unknown."""
        return self._by_address.get(normalize_address(device))


def normalize_address(address: str) -> str:
    """Normalize a PCI address to domain:bus:device; kernel, NVML and tools pad it differently."""
    found = _ADDRESS.search(address.strip())
    if found is None:
        return address.strip().lower()
    domain, bus, device = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def slots_from_driver(devices: Sequence[str], gpus: Path = GPUS) -> GpuSlots:
    """Read the mapping from the driver's /proc files, without NVML. `devices`, as
    CUDA_VISIBLE_DEVICES: a UUID, a prefix of one, or an index by PCI address as in nvidia-smi."""
    found: dict[str, str] = {}
    try:
        folders = sorted(gpus.iterdir(), key=lambda folder: normalize_address(folder.name))
        for number, folder in enumerate(folders):
            found[str(number)] = folder.name
            uuid = _UUID.search((folder / "information").read_text(encoding="utf-8"))
            if uuid is not None:
                found[uuid[1]] = folder.name
    except OSError:
        return GpuSlots()
    addresses: dict[int, str] = {}
    for slot, device in enumerate(devices):
        matches = [address for name, address in found.items()
                   if name == device or (device.startswith("GPU-") and name.startswith(device))]
        if len(matches) == 1:
            addresses[slot] = matches[0]
    return GpuSlots(addresses, len(devices))
