"""WeightFormat: how the weights of one projection lie in memory, as the quantiser wrote them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from fanfold.errors import UnsupportedError

Kind = Literal["bf16", "fp16", "fp32", "gptq", "awq", "packed", "nvfp4", "mxfp4", "fp8"]
DENSE_KINDS: tuple[Kind, ...] = ("bf16", "fp16", "fp32")
INTEGER_BITS: dict[str, tuple[int, ...]] = {"gptq": (2, 3, 4, 8), "awq": (4,), "packed": (2, 3, 4, 8)}


@dataclass(frozen=True)
class WeightFormat:
    """The layout of one projection's weights W [N, K] (N outputs, K inputs).

    Attributes:
        kind: `bf16`, `fp16`, `fp32` (dense); `gptq`, `awq`, `packed` (integers: GPTQ's layout, AWQ's gemm layout,
            compressed-tensors' pack-quantized); `nvfp4`, `mxfp4`, `fp8`.
        bits: bits a weight.
        group_size: consecutive k that share a scale; -1 = all K (one scale a row). Integers, nvfp4 (16), mxfp4 (32).
        symmetric: zero_point is 2^(bits-1) whatever the file's zeros hold. Integers only.
        zero_point: asymmetric GPTQ files store the zero ("v2") or the zero minus 1 ("v1"); None elsewhere.
        act_order: a per-expert `g_idx` names the group of each k. Integers only.
        block: FP8, (rows, columns) that share a scale; -1 = the whole axis: (-1, -1) tensor, (1, -1) channel.
        divisor: NVFP4's global scale divides (compressed-tensors) instead of multiplying (ModelOpt).
    """

    kind: Kind
    bits: int
    group_size: int = -1
    symmetric: bool = True
    zero_point: Literal["v1", "v2"] | None = None
    act_order: bool = False
    block: tuple[int, int] | None = None
    divisor: bool = False

    def __post_init__(self) -> None:
        if self.kind in INTEGER_BITS and self.bits not in INTEGER_BITS[self.kind]:
            raise UnsupportedError(
                f"{self.kind} bits",
                found=str(self.bits),
                expected=f"one of {INTEGER_BITS[self.kind]}",
                next_step="Requantise the checkpoint to a supported bit width.",
            )
        if self.group_size == 0 or self.group_size < -1:
            raise UnsupportedError(
                f"{self.kind} group_size",
                found=str(self.group_size),
                expected="a positive number, or -1 for one group over all of K",
                next_step="Correct group_size in the checkpoint's quantization config.",
            )

    def run(self, k: int) -> int:
        """Consecutive inputs of k, from a multiple of that number on, that certainly share a scale group.

        Returns:
            A power of two; 0 where one group, or none, spans all K.
        """
        if self.act_order:
            return 1
        size = self.block[1] if self.block is not None else self.group_size
        return 0 if size == -1 or size >= k else size & -size

    def activation_group(self, k: int) -> int:
        """Inputs that share a scale of activations in 8 bits: those of an FP8 block, all of K without blocks."""
        return k if self.block is None or self.block[1] == -1 else min(self.block[1], k)

    @property
    def dense(self) -> bool:
        """Whether the weights are plain floating-point numbers without scales."""
        return self.kind in DENSE_KINDS

    def groups(self, k: int) -> int:
        """Number of scale groups along K; the last one may be short."""
        return 1 if self.group_size == -1 else -(-k // self.group_size)

    @property
    def name(self) -> str:
        """A name that `parse` reads back, e.g. `gptq4-g128`, `gptq4-g64-asym-v1-actorder`, `fp8-block128x128`."""
        if self.dense:
            return self.kind
        if self.kind == "nvfp4":
            return "nvfp4-divisor" if self.divisor else "nvfp4"
        if self.kind == "mxfp4":
            return "mxfp4"
        if self.kind == "fp8":
            assert self.block is not None
            return "fp8-" + {(-1, -1): "tensor", (1, -1): "channel"}.get(
                self.block, f"block{self.block[0]}x{self.block[1]}"
            )
        parts = [f"{self.kind}{self.bits}", f"g{self.group_size}" if self.group_size != -1 else "channel"]
        if not self.symmetric:
            parts.append("asym")
        if self.zero_point is not None:
            parts.append(self.zero_point)
        if self.act_order:
            parts.append("actorder")
        return "-".join(parts)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> WeightFormat:
        """The format of that `name`.

        Raises:
            UnsupportedError: no format is written like this.
        """
        fmt = _parse(name.lower())
        if fmt is None:
            raise UnsupportedError(
                "weight format name",
                found=repr(name),
                expected="e.g. bf16, gptq4-g128, gptq4-g64-asym-v1-actorder, awq4-g128-asym, packed8-channel, "
                "nvfp4, nvfp4-divisor, mxfp4, fp8-tensor, fp8-channel, fp8-block128x128",
                next_step="`fanfold inspect CHECKPOINT` prints the formats of a checkpoint.",
            )
        return fmt


def _parse(name: str) -> WeightFormat | None:
    head, *rest = name.split("-")
    for dense in DENSE_KINDS:
        if name == dense:
            return WeightFormat(dense, 32 if dense == "fp32" else 16)
    if head == "nvfp4" and rest in ([], ["divisor"]):
        return WeightFormat("nvfp4", 4, group_size=16, divisor=bool(rest))
    if name == "mxfp4":
        return WeightFormat("mxfp4", 4, group_size=32)
    if head == "fp8" and len(rest) == 1:
        if rest[0] in ("tensor", "channel"):
            return WeightFormat("fp8", 8, block=(-1, -1) if rest[0] == "tensor" else (1, -1))
        block = re.fullmatch(r"block(\d+)x(\d+)", rest[0])
        return WeightFormat("fp8", 8, block=(int(block[1]), int(block[2]))) if block else None
    integer = re.fullmatch(r"(gptq|awq|packed)(\d+)", head)
    if integer is None or not rest:
        return None
    size = re.fullmatch(r"g(\d+)|channel", rest[0])
    if size is None:
        return None
    kind: Kind = "gptq" if integer[1] == "gptq" else "awq" if integer[1] == "awq" else "packed"
    fmt = WeightFormat(kind, int(integer[2]), group_size=int(size[1]) if size[1] else -1)
    for flag in rest[1:]:
        if flag == "asym":
            fmt = replace(fmt, symmetric=False)
        elif flag in ("v1", "v2"):
            fmt = replace(fmt, zero_point="v1" if flag == "v1" else "v2")
        elif flag == "actorder":
            fmt = replace(fmt, act_order=True)
        else:
            return None
    return fmt
