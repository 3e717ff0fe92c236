"""The steps of a product of NVFP4 experts with activations in 4 bits: global scales, packing, one product a projection.

The reference and the kernels take the same steps, and differ in what packs and multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from fanfold.errors import UnavailableError
from fanfold.kernels.nvfp4.experts import Experts
from fanfold.kernels.nvfp4.reference import LARGEST_CODE, LARGEST_SCALE


class Pack(Protocol):
    """`reference.pack_rows`, or the kernel."""

    def __call__(
        self, x: Tensor, global_scales: Tensor | None = None, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales."""
        ...


class Product(Protocol):
    """`experts.product`, or the kernel."""

    def __call__(
        self,
        packed: Tensor,
        scales: Tensor,
        rows: Tensor | None,
        offsets: Tensor,
        experts: Experts,
        alphas: Tensor,
        out: Tensor,
    ) -> None:
        """Writes the rows of the experts that are here."""
        ...


def run(
    pack: Pack,
    product: Product,
    x: Tensor,
    token_ids: Tensor | None,
    offsets: Sequence[int] | Tensor,
    projections: Sequence[Experts],
    input_scales: Sequence[float] | None,
    outputs: Sequence[Tensor],
) -> None:
    """Makes the outputs [M, N] of the projections; arguments as for `checks.check_call`, which has accepted them."""
    if not outputs[0].shape[0] or not projections[0].packed:
        return
    if not isinstance(offsets, Tensor):
        offsets = torch.tensor(offsets, dtype=torch.int32, device=x.device)
    rows = _packed(pack, x, token_ids, offsets, projections, input_scales)
    for projection, out in zip(projections, outputs, strict=True):
        alphas = constant(tuple(projection.global_scales), torch.float32, x.device)
        if rows.global_scales is not None:
            alphas = alphas * rows.global_scales
        product(rows.packed, rows.scales, rows.token_ids, offsets, projection, alphas, out)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Packed activations, one packing for all projections.

    Attributes:
        packed, scales: of `reference.pack_rows`.
        token_ids: row of the group order -> row of `packed`; None: the same.
        global_scales: fp32 [E], or one for all experts, or None.
    """

    packed: Tensor
    scales: Tensor
    token_ids: Tensor | None
    global_scales: Tensor | None


def _packed(
    pack: Pack,
    x: Tensor,
    token_ids: Tensor | None,
    offsets: Tensor,
    projections: Sequence[Experts],
    input_scales: Sequence[float] | None,
) -> _Rows:
    if input_scales is None:
        return _Rows(*pack(x), token_ids, None)
    here = tuple(any(p.packed[e] is not None for p in projections) for e in range(len(input_scales)))
    given = torch.tensor(input_scales, dtype=torch.float32)
    given = torch.where(torch.isfinite(given) & (given > 0), given, 0.0)
    numbers = cast("list[float]", given.tolist())
    needed = {number for number, is_here in zip(numbers, here, strict=True) if is_here}
    if len(needed) == 1 and 0.0 not in needed:  # one packing of a token serves all its experts
        scale = torch.full((x.shape[0],), needed.pop(), dtype=torch.float32, device=x.device)
        return _Rows(*pack(x, scale), token_ids, scale[:1])
    scales = constant(tuple(numbers), torch.float32, x.device)
    expert, inside = experts_of_rows(offsets, len(x) if token_ids is None else len(token_ids))
    live = constant(here, torch.bool, x.device)
    scales = global_scales(x, token_ids, expert, inside, scales, live)
    by_row = torch.where(inside, scales[expert], 1.0)
    return _Rows(*pack(x, by_row, token_ids), None, scales)


def experts_of_rows(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The expert of each row of the group order, int64 [M], and whether it has one, bool [M]."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    last = offsets.shape[0] - 2
    return expert.clamp(max=last), (expert <= last) & (row >= offsets[0])


def global_scales(
    x: Tensor, token_ids: Tensor | None, expert: Tensor, inside: Tensor, given: Tensor, here: Tensor
) -> Tensor:
    """The global scale of each expert's activations.

    Args:
        x: [T, K].
        token_ids: int32 [M] or None.
        expert: int64 [M] of `experts_of_rows`.
        inside: bool [M] of `experts_of_rows`.
        given: fp32 [E] of the checkpoint.
        here: bool [E], which experts live on this rank.

    Returns:
        fp32 [E]: the given one where it is finite and > 0; else one for all others: the largest size in their rows
        divided by 2688, 1 where that is 0 or not finite. No value is read back to the host.
    """
    sound = torch.isfinite(given) & (given > 0)
    sizes = x.abs().amax(1).float()
    if token_ids is not None:
        there = (token_ids >= 0) & (token_ids < x.shape[0])
        sizes = torch.where(there, sizes[torch.where(there, token_ids, 0).long()], 0.0)
    largest = torch.where(inside & (here & ~sound)[expert], sizes, 0.0).amax()
    scale = largest / torch.full_like(largest, LARGEST_CODE * LARGEST_SCALE)
    scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
    return torch.where(sound, given, scale)


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on the device.

    Those on a GPU are kept for good: they are few, the same at each call, and graphs that were captured read them.

    Raises:
        UnavailableError: a graph is being captured, and these numbers were never used before.
    """
    return torch.tensor(values, dtype=dtype) if device.type == "cpu" else _kept(values, dtype, device)


@cache
def _kept(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise UnavailableError(
            "NVFP4 products in a CUDA graph",
            found="experts or scales that no call before the capture had",
            expected="those of a call before",
            next_step="Call the operation once with these experts and scales, then capture it.",
        )
    return torch.tensor(values, dtype=dtype, device=device)
