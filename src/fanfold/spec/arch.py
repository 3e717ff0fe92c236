"""Arch: what limits a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """Rates of one kind of GPU, for floors.

    Attributes:
        name: the device the rates belong to.
        read_bytes: bytes a second of a read-only stream.
        matrix_flops: bf16 operations a second of the matrix units.
    """

    name: str
    read_bytes: float
    matrix_flops: float


# Measured on one H200 on 30 November 2026: read-only stream 4.35-4.5 TB/s, 8192^3 bf16 product 750-785 TF/s.
ARCHS = {"sm_90": Arch("H200", 4.4e12, 770e12)}

RUN = frozenset({"sm_90"})
"""Where kernels have run, on an H200. For the others in SHARED_BYTES they are compiled, and nobody has run them."""
BLOCK_SCALED = 100
"""The first compute capability whose matrix units multiply E2M1 codes with E4M3 scales."""

# Most shared memory of one block, in bytes: "Maximum amount of shared memory per thread block" in the table of
# technical specifications per compute capability, CUDA C++ Programming Guide 13.
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
