"""Act-ordered weights sorted by group: the same weights in another order, and the same products."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from grouped_jobs import check_close, configs, exact, job_of, plain, projection, random_job

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.errors import ArgumentError
from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.grouped.act_order import sort_by_group
from fanfold.spec import Activation
from graphs import dirty_memory, same_bits
from samples import numbers

HALF = torch.float16
FORMATS = [
    "gptq2-g32-asym-v2-actorder",
    "gptq3-g64-asym-v1-actorder",
    "gptq4-g64-actorder",
    "gptq8-g32-actorder",
    "packed4-g64-asym-actorder",
    "packed3-g32-actorder",
]
K = 224  # the last group of 64 is short


@pytest.mark.parametrize("name", FORMATS)
def test_sorted_weights_are_the_same_numbers(name: str) -> None:
    weights = projection(name, 3, 2, 32, K, "cpu")
    by_group, order = sort_by_group(weights)
    assert str(by_group.format) == name.removesuffix("-actorder")
    assert "g_idx" not in by_group.tensors
    for e in range(3):
        assert not torch.equal(order[e], torch.arange(K).int())
        for half in range(2):
            assert torch.equal(
                dequantize_expert(by_group, e, half), dequantize_expert(weights, e, half)[:, order[e].long()]
            )


@pytest.mark.parametrize("name", ["gptq3-g64-asym-v1-actorder", "packed4-g64-asym-actorder"])
def test_products_in_sorted_order(name: str, device: str) -> None:
    """gate_up reads x by token and down by position; with a plan and without one the same bits."""
    from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up
    from fanfold.kernels.grouped.rows import gather_down, gather_gate_up

    weights, down = projection(name, 2, 2, 32, 96, device), projection(name, 2, 1, 32, 96, device)
    by_group, order = sort_by_group(weights)
    config = configs(by_group, HALF, device)[-1]
    job = random_job(4, 2, 2, 96, config, HALF, device)
    at = job.route.sorted_rows[: job.rows].long()
    dirty_memory(device)
    y1 = grouped_gate_up(job.x, by_group, job.work, job.route.sorted_rows, 2, config, permutation=order)
    x = job.x[job.tokens[: job.rows]]
    for half in range(2):
        found = y1[: job.rows, half * 32 : (half + 1) * 32]
        check_close(found, exact(weights, x, job.route, half), plain(weights, x, job.route, half))
    assert same_bits(gather_gate_up(job.x, by_group, job.ids, config, permutation=order)[at], y1[: job.rows])

    h = numbers(8, 96, seed=5, dtype=HALF).to(device)
    by_group, order = sort_by_group(down)
    y2 = grouped_down(h, by_group, job.work, job.route.sorted_rows, config, permutation=order)[: job.rows]
    check_close(y2, exact(down, h[: job.rows], job.route, 0), plain(down, h[: job.rows], job.route, 0))
    rows = torch.zeros_like(h)
    rows[at] = h[: job.rows]
    assert same_bits(gather_down(rows, by_group, job.ids, config, permutation=order)[at], y2)


def test_more_rows_than_a_program_permutes(device: str) -> None:
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection("gptq4-g32-actorder", 2, 2, 32, 64, device)
    by_group, order = sort_by_group(weights)
    config = replace(configs(by_group, HALF, device)[-1], block_t=16)
    job = job_of(numbers(25, 64, dtype=HALF).to(device), torch.ones(25, 1, device=device).int(), 2, 16)
    arguments = (job.x, by_group, job.work, job.route.sorted_rows, 1, config, Activation("silu"))
    alone = job_of(job.x[24:], torch.ones(1, 1, device=device).int(), 2, 16)
    h = grouped_gate_up(*arguments, permutation=order)
    last = grouped_gate_up(
        alone.x, by_group, alone.work, alone.route.sorted_rows, 1, config, Activation("silu"), permutation=order
    )
    assert same_bits(h[24:], last)
    assert len(h.unique(dim=0)) == 25


@pytest.mark.parametrize("case", ["in order", "unequal groups", "gate unlike up"])
def test_what_can_not_be_sorted_is_refused(case: str) -> None:
    weights = projection("gptq4-g64" + ("" if case == "in order" else "-actorder"), 2, 2, 32, K, "cpu")
    if case != "in order":
        g_idx = weights.tensors["g_idx"].clone()
        if case == "unequal groups":
            g_idx[1, :, :] = g_idx[1, :, :].clamp(max=1)
        else:
            g_idx[1, 1] = g_idx[1, 1].flip(0)
        weights = replace(weights, tensors={**weights.tensors, "g_idx": g_idx})
    with pytest.raises(ArgumentError, match="as they are"):
        sort_by_group(weights)


def test_a_permutation_of_other_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fanfold.kernels.grouped import launch

    monkeypatch.setattr(launch, "arch_of", lambda device: 0)
    by_group, order = sort_by_group(projection("gptq4-g64-actorder", 3, 2, 32, K, "cpu"))
    config = configs(by_group, HALF, "cpu")[0]
    job = job_of(numbers(2, K, dtype=HALF), torch.zeros(2, 1).int(), 3, config.block_t)
    for wrong in (order[:2], order.long(), order.T.contiguous().T):
        with pytest.raises(ArgumentError, match=r"grouped_gate_up: permutation: found .*expected .*int32 \[3, 224\]"):
            launch.grouped_gate_up(job.x, by_group, job.work, job.route.sorted_rows, 1, config, permutation=wrong)


@ALL_ARCHS
def test_the_permutation_compiles(arch: str) -> None:
    from fanfold.kernels.grouped.act_order import ROWS, permute_rows

    pointers = {"x_ptr": "*bf16", "y_ptr": "*bf16", "order_ptr": "*i32", "work_ptr": "*i32", "rows_ptr": "*i32"}
    types = {**pointers, "experts": "i32", "K": "i32", "top_k": "i32", "stride_x": "i32"}
    for planned, gather, block in ((True, True, 1024), *product((True, False), (True, False), (16384,))):
        constants = {"PLANNED": planned, "GATHER": gather, "ROWS": ROWS if planned else 1, "BLOCK": block}
        case = f"{'planned' if planned else 'single'} rows{' by token' if gather else ''}, {block} inputs"
        warps = 8 if block > 4096 else 4
        check_fits(compile_kernel(permute_rows, types, constants, arch, warps, case), arch)
