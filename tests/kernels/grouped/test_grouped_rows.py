"""Products without a plan: the bits of the grouped ones, row for row; ids of other ranks; router weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouped_jobs import K, configs, job_of, projection

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped import rows as without_plan
from fanfold.spec import Activation
from graphs import dirty_memory, poison, same_bits
from samples import numbers

HALF = torch.float16


def ids_of(device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """3 tokens, 2 slots, 3 experts; -1, 3 and the largest number are none of them."""
    return torch.tensor([[2, -1], [2, 1], [torch.iinfo(dtype).max, 3]], dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("name", "ids_dtype"),
    [("fp16", torch.int64), ("gptq4-g64", torch.int32), ("nvfp4", torch.int32), ("fp8-block64x64", torch.int64)],
)
def test_bits_of_the_grouped_product(name: str, ids_dtype: torch.dtype, device: str) -> None:
    from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up

    weights, down = projection(name, 3, 2, 40, 64, device), projection(name, 3, 1, 40, 64, device)
    config = configs(weights, HALF, device)[-1]
    x, ids = numbers(3, 64, dtype=HALF).to(device), ids_of(device, ids_dtype)
    job = job_of(x, ids, 3, config.block_t)
    at = job.route.sorted_rows[: job.rows].long()
    grouped = grouped_gate_up(x, weights, job.work, job.route.sorted_rows, 2, config, Activation("silu"))
    dirty_memory(device)
    found = without_plan.gather_gate_up(x, weights, ids, config, Activation("silu"))
    assert same_bits(found[at], grouped[: job.rows])
    h = numbers(6, 64, seed=4, dtype=HALF).to(device)
    config = configs(down, HALF, device)[-1]
    grouped = grouped_down(h[job.route.sorted_rows.long()], down, job.work, job.route.sorted_rows, config)
    assert same_bits(without_plan.gather_down(h, down, ids, config)[at], grouped[: job.rows])


def test_rows_without_an_expert_are_not_written(device: str) -> None:
    from fanfold.kernels.grouped.launch import launch

    weights = projection("fp16", 3, 1, 32, 32, device)
    h, ids = numbers(6, 32, dtype=HALF).to(device), ids_of(device)
    out = torch.empty(6, 32, dtype=HALF, device=device)
    poison(out)
    launch("gather_down", h, weights, ids.flatten(), None, configs(weights, HALF, device)[0], out)
    nowhere = torch.tensor([False, True, False, False, True, True], device=device)
    assert out[nowhere].isnan().all()
    assert not out[~nowhere].isnan().any()


@pytest.mark.parametrize("scatter", [False, True])
def test_router_weights_multiply_rounded_outputs(scatter: bool, device: str) -> None:
    from fanfold.kernels.grouped.launch import grouped_down

    weights = projection("fp16", 3, 1, 40, 64, device)
    config = configs(weights, HALF, device)[0]
    h, ids = numbers(6, 64, dtype=HALF).to(device), ids_of(device)
    router = numbers(6, seed=8).to(device)
    y2 = without_plan.gather_down(h, weights, ids, config)
    wanted = (router[:, None] * y2.float()).to(HALF)
    job = job_of(h[::2], ids, 3, config.block_t)
    at = job.route.sorted_rows[: job.rows].long()
    assert same_bits(without_plan.gather_down(h, weights, ids, config, row_weights=router)[at], wanted[at])
    grouped = grouped_down(
        h[job.route.sorted_rows.long()], weights, job.work, job.route.sorted_rows, config, scatter, router
    )
    assert same_bits(grouped[at] if scatter else grouped[: job.rows], wanted[at])


def test_d10_no_tokens_no_experts(device: str) -> None:
    weights = projection("fp16", 3, 2, 40, K, device)
    none = torch.empty(0, 2, dtype=torch.int32, device=device)
    config = configs(weights, HALF, device)[0]
    assert without_plan.gather_gate_up(numbers(0, K, dtype=HALF).to(device), weights, none, config).shape == (0, 80)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ids of one axis": ({"topk_ids": torch.zeros(6).int()}, r"topk_ids: found int32 \[6\]"),
    "ids int16": ({"topk_ids": torch.zeros(3, 2).short()}, r"topk_ids: found int16"),
    "ids transposed": ({"topk_ids": torch.zeros(2, 3).int().T}, r"topk_ids: found .*strides"),
    "ids of other tokens": ({"topk_ids": torch.zeros(5, 2).int()}, r"h: found 6 rows for topk_ids \[5, 2\]"),
    "weights fp16": ({"row_weights": torch.zeros(6).half()}, r"row_weights: found float16 \[6\]"),
    "weights of tokens": ({"row_weights": torch.zeros(3)}, r"row_weights: found float32 \[3\]; expected .*\[6\]"),
    "h of another K": ({"h": torch.zeros(6, 64).half()}, r"h: found float16 \[6, 64\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_wrong_argument_is_named(case: str) -> None:
    weights = projection("fp16", 3, 1, 40, K, "cpu")
    config = configs(weights, HALF, "cpu")[0]
    given: dict[str, Any] = dict(
        h=torch.zeros(6, K, dtype=HALF), weights=weights, topk_ids=ids_of("cpu"), config=config
    )
    change, message = WRONG[case]
    with pytest.raises(ArgumentError, match="gather_down: " + message):
        without_plan.gather_down(**{**given, **change})
    gate_up = projection("fp16", 3, 2, 40, K, "cpu")
    with pytest.raises(ArgumentError, match=r"gather_gate_up: x: found 6 rows for topk_ids \[3, 2\]"):
        without_plan.gather_gate_up(given["h"], gate_up, ids_of("cpu"), config)
