"""Field: what one tensor of a packed matrix must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fanfold.errors import UnsupportedError
from fanfold.spec.weight_format import WeightFormat

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Field:
    """What one tensor of a matrix W [N, K] must be.

    Attributes:
        shape: its shape.
        dtypes: the dtypes it may have.
        required: whether a matrix without it is incomplete.
        squeezable: axes of size 1 may be missing or added in a file. Writers disagree on scales only: one
            scale is met as [] and [1], one a row as [N] and [N, 1], one a block as [R, C] and [R, 1, C, 1].
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    required: bool = True
    squeezable: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape holds this field."""
        if self.squeezable:
            return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]
        return tuple(shape) == self.shape


def require_multiple(fmt: WeightFormat, axis: str, size: int, multiple: int) -> None:
    """Refuses a size that the packing can't hold.

    Raises:
        UnsupportedError: `size` is no positive multiple of `multiple`.
    """
    if size < 1 or size % multiple:
        raise UnsupportedError(
            f"{fmt} matrix",
            found=f"{axis} = {size}",
            expected=f"{axis} a positive multiple of {multiple}",
            next_step=f"Quantise such a matrix to a format with smaller steps along {axis}.",
        )
