"""Kinds of GPU and their specifications."""

from __future__ import annotations

from msgspec import Struct

from ...events.spec.model import Gpu

_GIB_BYTES = 1 << 30


class GpuKind(Struct, frozen=True, kw_only=True):
    """One GPU in its maker's reference server; rates per second, links in one direction.
    `peak_flops`: dense tensor cores in fp16 and bf16; `fp8_flops`: 0 without fp8."""

    peak_flops: float
    fp8_flops: float = 0.0
    memory_bytes: int
    """Total memory as CUDA reports it: less than the nominal size."""
    memory_bytes_s: float
    nvlink_bytes_s: float
    network_bytes_s: float


KINDS: dict[Gpu, GpuKind] = {
    # Data sheet of the V100 SXM3; DGX-2: 8 times 100 Gbit/s for 16 GPUs.
    "V100-32": GpuKind(peak_flops=125e12, memory_bytes=int(31.7 * _GIB_BYTES),
                       memory_bytes_s=900e9, nvlink_bytes_s=150e9, network_bytes_s=6.25e9),
    # Data sheet of the A100 SXM4; DGX A100: 8 times 200 Gbit/s for 8 GPUs.
    "A100-40": GpuKind(peak_flops=312e12, memory_bytes=int(39.4 * _GIB_BYTES),
                       memory_bytes_s=1555e9, nvlink_bytes_s=300e9, network_bytes_s=25e9),
    "A100-80": GpuKind(peak_flops=312e12, memory_bytes=int(79.2 * _GIB_BYTES),
                       memory_bytes_s=2039e9, nvlink_bytes_s=300e9, network_bytes_s=25e9),
    # The A100 with 8 of its 12 NVLinks.
    "A800-80": GpuKind(peak_flops=312e12, memory_bytes=int(79.2 * _GIB_BYTES),
                       memory_bytes_s=2039e9, nvlink_bytes_s=200e9, network_bytes_s=25e9),
    # Data sheet of the H100 SXM5, without sparsity; DGX H100: 8 times 400 Gbit/s for 8 GPUs.
    "H100-80": GpuKind(peak_flops=989.4e12, fp8_flops=1978.9e12,
                       memory_bytes=int(79.1 * _GIB_BYTES), memory_bytes_s=3350e9,
                       nvlink_bytes_s=450e9, network_bytes_s=50e9),
    # The H100 with 8 of its 18 NVLinks.
    "H800-80": GpuKind(peak_flops=989.4e12, fp8_flops=1978.9e12,
                       memory_bytes=int(79.1 * _GIB_BYTES), memory_bytes_s=3350e9,
                       nvlink_bytes_s=200e9, network_bytes_s=50e9),
    "H20-96": GpuKind(peak_flops=148e12, fp8_flops=296e12, memory_bytes=int(95.0 * _GIB_BYTES),
                      memory_bytes_s=4000e9, nvlink_bytes_s=450e9, network_bytes_s=50e9),
    # Data sheet of the H200 SXM; memory as reported by a device.
    "H200-141": GpuKind(peak_flops=989.4e12, fp8_flops=1978.9e12,
                        memory_bytes=int(139.8 * _GIB_BYTES), memory_bytes_s=4800e9,
                        nvlink_bytes_s=450e9, network_bytes_s=50e9),
    # Data sheet of the DGX B200, without sparsity: 8 GPUs with 1,440 GB and 64 TB/s together.
    "B200-180": GpuKind(peak_flops=2250e12, fp8_flops=4500e12,
                        memory_bytes=int(178.0 * _GIB_BYTES), memory_bytes_s=8000e9,
                        nvlink_bytes_s=900e9, network_bytes_s=50e9),
}
