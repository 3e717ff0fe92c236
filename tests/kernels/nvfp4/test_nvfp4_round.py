"""Rounded activations are the numbers that packing and unpacking give: one scale, a scale an expert, in any order."""

from __future__ import annotations

import pytest
import torch
from nvfp4_cases import awkward_rows, code_edges, rows_of_scales, rows_with_scale
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.kernels.nvfp4 import round as rounding
from fanfold.kernels.nvfp4.reference import pack_rows, unpack_rows
from graphs import check_replays, dirty_memory, same_bits
from samples import numbers

K, T, TOP_K = 80, 9, 3
SCALES = torch.tensor([0.1, 1.0, 3e-3, 20.0])


def expected(x: Tensor, by_row: Tensor) -> Tensor:
    return unpack_rows(*pack_rows(x, by_row)).to(x.dtype)


def ids_of(tokens: int = T) -> Tensor:
    """Experts of rows, two of them of another rank."""
    ids = torch.arange(tokens * TOP_K, dtype=torch.int32) * 7 % 4
    ids[1], ids[5] = -1, 4
    return ids


@pytest.mark.parametrize("scale", [1.0, 0.3, 1.7e-3, 1e4, 1e-9, 3e-36, 1e36])
def test_every_edge_of_codes_and_scales(scale: float, device: str) -> None:
    for x in (rows_with_scale(code_edges()).view(1, -1), rows_of_scales().view(1, -1)):
        gs = torch.tensor([scale])
        found = rounding.round_rows((x * gs).to(device), gs.to(device))
        assert same_bits(found.cpu(), expected(x * gs, gs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_scale_for_each_expert(dtype: torch.dtype, device: str) -> None:
    x, ids = awkward_rows(K).to(dtype), ids_of()
    token = torch.arange(T * TOP_K) // TOP_K
    inside = (ids >= 0) & (ids < 4)
    by_row = torch.where(inside, SCALES[ids.clamp(0, 3).long()], 1.0)
    dirty_memory(device)
    given = SCALES.to(device), ids.to(device)
    wide = torch.cat([x, x], dim=1)[:, :K].to(device)  # rows lie apart
    found = rounding.round_rows(wide, *given, top_k=TOP_K)
    assert found.dtype == dtype
    assert same_bits(found.cpu()[inside], expected(x[token], by_row)[inside])
    # down: rows in another order, ids of 64 bits
    order = torch.randperm(T * TOP_K, generator=torch.Generator().manual_seed(1)).int()
    h = x[token[order.long()]]
    found = rounding.round_rows(h.to(device), given[0], given[1].long(), order.to(device))
    at = inside[order.long()]
    assert same_bits(found.cpu()[at], expected(h, by_row[order.long()])[at])


def test_nan_no_rows_and_one_scale(device: str) -> None:
    x = torch.ones(3, 32)
    x[0, 3], x[1, 3], x[2, 20] = torch.nan, torch.inf, -torch.inf
    found = rounding.round_rows(x.to(device), torch.ones(1, device=device)).cpu()
    assert found[0, :16].isnan().all()
    assert torch.equal(found[0, 16:], torch.full((16,), 1.03125))  # 6 * e4m3(1 / 6)
    assert (float(found[1, 3]), float(found[2, 20])) == (2688, -2688)
    assert rounding.round_rows(x[:0].to(device), torch.ones(1, device=device)).shape == (0, 32)


@pytest.mark.gpu
def test_bf16_and_replays() -> None:
    batches = [numbers(300, 4096, seed=seed, dtype=torch.bfloat16) for seed in range(2)]
    ids = ids_of(300).cuda()
    inside = ((ids >= 0) & (ids < 4)).cpu()
    by_row = torch.where(inside, SCALES[ids.cpu().clamp(0, 3).long()], 1.0)
    for x in batches:
        found = rounding.round_rows(x.cuda(), SCALES.cuda(), ids, top_k=TOP_K)
        assert same_bits(found.cpu()[inside], expected(x.repeat_interleave(TOP_K, 0), by_row)[inside])
    one = SCALES[:1].cuda()
    check_replays(lambda x: [rounding.round_rows(x, one)], [[x.cuda()] for x in batches])


@pytest.mark.parametrize("by_expert", [False, True])
@ALL_ARCHS
def test_it_compiles(arch: str, by_expert: bool) -> None:
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "gs_ptr": "*fp32"}
    types |= dict.fromkeys(("rows", "groups", "experts", "top_k", "stride_x"), "i32")
    constants = {"NATIVE": int(arch[3:]) >= 89, "GROUPS": rounding.GROUPS}
    if by_expert:
        types |= {"ids_ptr": "*i64", "rows_ptr": "*i32"}
    else:
        constants |= {"ids_ptr": None, "rows_ptr": None}
    case = "an expert's scale" if by_expert else "one scale"
    check_fits(compile_kernel(rounding.round_groups, types, constants, arch, 4, case=case), arch)
