"""ActivationFormat: what the activations of both products of a layer are rounded to before they are multiplied."""

from __future__ import annotations

from typing import Literal

ActivationFormat = Literal["plain", "nvfp4", "fp8"]
"""`plain`: nothing, they stay in their dtype (weight only). `nvfp4`: E2M1 with two levels of scales (W4A4), for NVFP4
weights. `fp8`: E4M3 with a scale a row or a block (W8A8), for FP8 weights."""
ACTIVATION_FORMATS: tuple[ActivationFormat, ...] = ("plain", "nvfp4", "fp8")
PLAIN: Literal["plain"] = "plain"
