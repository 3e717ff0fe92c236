"""NVFP4 in readable torch (semantics, section 4): packing of rows, swizzled scales, products.

M rows of K values; K is a multiple of 16, the values that share an E4M3 scale. A global scale of a row multiplies its
scales. Divisions are by tensors: torch multiplies by the reciprocal of a number on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from fanfold.kernels.common.invariant import invariant_matmul

GROUP = 16
LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0  # of E2M1 and E4M3
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ATOM_ROWS, ATOM_GROUPS = 128, 4

Ties = Literal["even", "zero"]
"""Where a value goes that lies halfway between two codes."""


def encode(sizes: Tensor, ties: Ties) -> Tensor:
    """Sizes fp32 >= 0 -> nearest E2M1 codes uint8 in [0, 8), saturating at 6 (code 7); NaN gives 0."""
    code = torch.zeros_like(sizes, dtype=torch.uint8)
    for low in range(7):
        middle = (MAGNITUDES[low] + MAGNITUDES[low + 1]) / 2
        code += sizes >= middle if ties == "even" and low % 2 else sizes > middle
    return code


def pack_rows(
    x: Tensor, global_scales: Tensor | None = None, token_ids: Tensor | None = None, ties: Ties | None = None
) -> tuple[Tensor, Tensor]:
    """Rows as E2M1 codes and E4M3 scales: x ~ code * scale (* global scale of the row).

    Args:
        x: [T, K] in bf16, fp16 or fp32.
        global_scales: fp32 [M], finite and > 0: two levels. None: one level, where groups of zeros have a scale of 1.
        token_ids: int32 [M], row -> row of x; what lies outside [0, T) reads as zeros. None: M = T.
        ties: None: to zero with one level, to even with two.

    Returns:
        uint8 [M, K/2], low nibble = even k; and E4M3 [M, K/16], saturating at 448. A scale of 0 gives codes 0, values
        that round to 0 keep their sign. A group that holds a NaN has a scale of NaN.
    """
    rows = x if token_ids is None else _gathered(x, token_ids)
    groups = rows.float().reshape(len(rows), x.shape[1] // GROUP, GROUP)
    amax = groups.abs().amax(-1)
    wanted = amax / torch.full_like(amax, LARGEST_CODE)
    if global_scales is None:
        scales = wanted.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
        scales = torch.where(amax == 0, torch.ones_like(amax), scales.float()).to(torch.float8_e4m3fn)
        step = scales.float()
    else:
        scales = (wanted / global_scales[:, None]).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
        step = scales.float() * global_scales[:, None]
    step = step[..., None]
    codes = encode(groups.abs() / step, ties or ("zero" if global_scales is None else "even"))
    codes |= torch.signbit(groups).to(torch.uint8) << 3
    codes = torch.where(step == 0, 0, codes).flatten(-2)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def unpack_rows(packed: Tensor, scales: Tensor) -> Tensor:
    """fp32 [., K] = code * scale, exact: at most six bits, so that a product of two such numbers is exact as well.

    Args:
        packed: uint8 [., K/2].
        scales: E4M3 [., K/16].
    """
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    values = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), device=packed.device)[codes.long()]
    return values * scales.float().repeat_interleave(GROUP, dim=-1)


def swizzled_size(n: int, k: int) -> int:
    """Bytes of the swizzled scales of [N, K]."""
    return _up(n, ATOM_ROWS) * _up(k // GROUP, ATOM_GROUPS)


def swizzle(scales: Tensor) -> Tensor:
    """Scales in the order of tensor cores.

    Args:
        scales: E4M3 or uint8 [..., N, K/16].

    Returns:
        [..., round_up(N, 128) * round_up(K/16, 4)]: atoms of 128 rows x 4 groups, along K first. Byte
        (n % 32) * 16 + (n % 128) / 32 * 4 + g % 4 of an atom is row n, group g; padding is zero.
    """
    n, groups = scales.shape[-2:]
    padded = zero_pad(scales.view(torch.uint8), (0, -groups % ATOM_GROUPS, 0, -n % ATOM_ROWS))
    batch = scales.shape[:-2]
    atoms = padded.reshape(batch.numel(), *_atoms(n, groups, swizzled=False)).permute(0, 1, 4, 3, 2, 5)
    return atoms.reshape(*batch, swizzled_size(n, groups * GROUP)).view(scales.dtype)


def unswizzle(swizzled: Tensor, n: int, k: int) -> Tensor:
    """[..., N, K/16] of swizzled scales; inverse of `swizzle`."""
    groups, batch = k // GROUP, swizzled.shape[:-1]
    atoms = swizzled.view(torch.uint8).reshape(batch.numel(), *_atoms(n, groups, swizzled=True))
    padded = atoms.permute(0, 1, 4, 3, 2, 5).reshape(*batch, _up(n, ATOM_ROWS), _up(groups, ATOM_GROUPS))
    return padded[..., :n, :groups].contiguous().view(swizzled.dtype)


def product(
    packed: Tensor,
    scales: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    weights: Sequence[tuple[Tensor, Tensor] | None],
    alphas: Tensor,
    out: Tensor,
) -> None:
    """out[i] = act(alpha[e] * sum over k of (code * scale of row i) * (code * scale of W[e])), sums in fp32.

    Args:
        packed: uint8 [., K/2] of `pack_rows`.
        scales: E4M3 [., K/16].
        rows: int32 [M], row of the group order -> row of `packed`; None: the same.
        offsets: int32 [E+1].
        weights: codes uint8 [N, K/2] and scales E4M3 [N, K/16] of each expert; None: it lives elsewhere.
        alphas: fp32 [E].
        out: [M, N], written at rows of experts that are here.
    """
    bounds = cast("list[int]", offsets.tolist())
    for expert, matrix in enumerate(weights):
        start, end = bounds[expert], bounds[expert + 1]
        if matrix is None or start == end:
            continue
        at = torch.arange(start, end, device=out.device) if rows is None else rows[start:end].long()
        y = invariant_matmul(unpack_rows(packed[at], scales[at]), unpack_rows(*matrix))
        out[start:end] = (y * alphas[expert]).to(out.dtype)


def _gathered(x: Tensor, token_ids: Tensor) -> Tensor:
    there = (token_ids >= 0) & (token_ids < x.shape[0])
    return torch.where(there[:, None], x[torch.where(there, token_ids, 0).long()], 0)


def _atoms(n: int, groups: int, swizzled: bool) -> tuple[int, ...]:
    """Axes of padded scales: 128-row blocks, four rows of 32 in each, blocks of 4 groups; or as swizzled."""
    down, along = _up(n, ATOM_ROWS) // ATOM_ROWS, _up(groups, ATOM_GROUPS) // ATOM_GROUPS
    return (down, along, 32, 4, ATOM_GROUPS) if swizzled else (down, 4, 32, along, ATOM_GROUPS)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
