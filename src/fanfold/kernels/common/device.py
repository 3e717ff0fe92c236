"""Which machine a tensor's kernels run on."""

from __future__ import annotations

from functools import cache

import torch
from triton import knobs

from fanfold.errors import UnavailableError

OLDEST = 80
NATIVE_E4M3 = 89
"""The first compute capability that converts E4M3."""
CHAINS = 90
"""The first that starts a kernel while the one before still runs."""


def arch_of(device: torch.device) -> int:
    """The compute capability, e.g. 90; 0 for the CPU, where Triton interprets kernels.

    Raises:
        UnavailableError: no kernel runs there.
    """
    if device.type == "cpu" and knobs.runtime.interpret:
        return 0
    if device.type != "cuda" or torch.version.hip is not None:
        raise UnavailableError(
            "Triton kernels",
            found=f"tensors on {device}",
            expected="an NVIDIA GPU",
            next_step='Move the layer to device "cuda", or pass implementation="reference".',
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major * 10 + minor < OLDEST:
        raise UnavailableError(
            "Triton kernels",
            found=f"compute capability {major}.{minor}",
            expected=f"at least {OLDEST // 10}.{OLDEST % 10}",
            next_step='Use an Ampere GPU or a later one, or pass implementation="reference".',
        )
    return major * 10 + minor


@cache
def gpu_name(device: torch.device) -> str:
    """What tables of measured configs are for, e.g. "NVIDIA H200"; "interpreter" on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
