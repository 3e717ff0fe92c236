"""Blocks of ModelOpt's FP8_PB_WO, whose config may leave them out: the shape of the scales tells.

128 x 128 is what ModelOpt does unless told otherwise. Where scales do not fit that, an axis of `size` with `count`
scales has blocks of size / count, or of a power of two where the last block is partial. Where both are possible and
differ, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fanfold.errors import ConfigError

DEFAULT = 128


class Shaped(Protocol):
    """A tensor, or what a header says of one."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""
        ...


def block_of(where: str, scale: Shaped | None, n: int, k: int) -> tuple[int, int]:
    """Rows and columns that share a scale of W [N, K].

    Args:
        where: the matrix, for the message.
        scale: the scales: [R, C], [R, 1, C, 1], or one number; None where they are missing.
        n: N.
        k: K.

    Returns:
        The block; the default for scales of an impossible shape, which a check of shapes then names.

    Raises:
        ConfigError: several blocks would give such scales.
    """
    grid = None if scale is None else _grid(list(scale.shape))
    if grid is None:
        return DEFAULT, DEFAULT
    block = [_candidates(size, count) for size, count in zip((n, k), grid, strict=True)]
    if any(len(sizes) > 1 for sizes in block):
        raise ConfigError(
            f"{where}: block of the scales",
            found=f"scales {list(grid)} for a weight [{n}, {k}]: blocks of "
            + " x ".join(" or ".join(map(str, sizes)) or "?" for sizes in block),
            expected="one possible block",
            next_step="Add weight_block_size, as the quantiser was told, to quantization_config in config.json.",
        )
    if not all(block):
        return DEFAULT, DEFAULT
    return block[0][0], block[1][0]


def _grid(shape: list[int]) -> tuple[int, int] | None:
    if all(size == 1 for size in shape):
        return 1, 1
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        return shape[0], shape[2]
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _candidates(size: int, count: int) -> list[int]:
    """Block sizes that give an axis of `size` so many scales."""
    if -(-size // DEFAULT) == count:
        return [DEFAULT]
    if count == 0 or size == 0:
        return []
    if count == 1:
        return [size]
    found = {1 << power for power in range(size.bit_length()) if -(-size // (1 << power)) == count}
    if size % count == 0:
        found.add(size // count)
    return sorted(found)
