"""Faults of other systems that concern the grouped product, each by its smallest input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grouped_jobs import check_gate_up, configs, job_of, projection, random_job

from fanfold.errors import ArgumentError
from fanfold.formats import codec
from fanfold.formats.stack import stack
from fanfold.spec import ProjectionWeights, WeightFormat
from fanfold.spec.launch import LaunchConfig
from graphs import same_bits
from samples import numbers

SMALL = LaunchConfig(32, 32, 16, 4, 2)
HALF = torch.float16


def product(weights: ProjectionWeights, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from fanfold.kernels.grouped.launch import grouped_gate_up

    job = job_of(x, ids, weights.num_experts, 16)
    return grouped_gate_up(x, weights, job.work, job.route.sorted_rows, ids.shape[1], SMALL)[: job.rows]


def check(name: str, device: str, n: int = 32, k: int = 96, tokens: int = 9, experts: int = 2) -> None:
    weights = projection(name, experts, 1, n, k, device)
    config = configs(weights, HALF, device)[0]
    check_gate_up(weights, random_job(tokens, 1, experts, k, config, HALF, device), config)


def zero_points_as(version: str, zeros: torch.Tensor) -> ProjectionWeights:
    """Random codes with these true zero points [G, N], stored as v1 or v2."""
    fmt = WeightFormat.parse(f"gptq4-g32-asym-{version}")
    matrix = codec.quantize(fmt, numbers(zeros.shape[1], 32 * zeros.shape[0]))
    matrix["qzeros"] = codec.INTEGER["gptq"].pack_zeros(fmt, zeros)
    return stack(fmt, [[matrix]])


@pytest.mark.interpreter
def test_b1_v1_and_v2_files_of_the_same_weights() -> None:
    zeros = torch.randint(1, 16, (3, 32), generator=torch.Generator().manual_seed(0)).int()
    x, ids = numbers(5, 96, dtype=HALF), torch.zeros(5, 1).int()
    assert same_bits(product(zero_points_as("v1", zeros), x, ids), product(zero_points_as("v2", zeros), x, ids))


@pytest.mark.interpreter
def test_b25_zeros_of_0_borrow_from_their_word_and_are_undone() -> None:
    zeros = torch.randint(0, 16, (3, 32), generator=torch.Generator().manual_seed(0)).int()
    zeros[0, 0], zeros[0, 9], zeros[1, :8], zeros[2, 7] = 0, 0, 0, 0  # lowest, inner, all and highest field of a word
    x, ids = numbers(5, 96, dtype=HALF), torch.zeros(5, 1).int()
    assert same_bits(product(zero_points_as("v1", zeros), x, ids), product(zero_points_as("v2", zeros), x, ids))


def test_b3_zero_points_of_symmetric_files_mean_nothing(device: str) -> None:
    weights = projection("gptq4-g32", 2, 1, 32, 96, device)
    x, ids = numbers(5, 96, dtype=HALF).to(device), torch.zeros(5, 1, device=device).int()
    before = product(weights, x, ids)
    weights.tensors["qzeros"].random_()
    assert same_bits(product(weights, x, ids), before)


@pytest.mark.parametrize("name", ["gptq4-channel", "gptq8-channel", "packed4-channel-asym"])
def test_b4_one_group_over_all_inputs(name: str, device: str) -> None:
    check(name, device)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_b6_groups_with_1344_inputs(group: int, device: str) -> None:
    check(f"gptq4-g{group}", device, k=1344, tokens=3)


def test_b7_b23_tiles_that_are_not_full(device: str) -> None:
    """17 rows over 8 experts; then 4 tokens to one expert, in a tile of 16."""
    check("gptq4-g32", device, tokens=17, experts=8)
    weights = projection("gptq4-g32", 2, 1, 32, 96, device)
    config = configs(weights, HALF, device)[0]
    x = numbers(4, 96, dtype=HALF).to(device)
    y1 = check_gate_up(weights, job_of(x, torch.ones(4, 1, device=device).int(), 2, config.block_t), config)
    assert len(y1.unique(dim=0)) == 4


def test_b9_b11_scales_that_differ_tenfold_between_groups(device: str) -> None:
    for name in ("gptq4-g32", "gptq4-g64", "packed4-g16"):
        weights = projection(name, 2, 1, 32, 128, device)
        scales = weights.tensors.get("scales")
        if scales is None:
            scales = weights.tensors["scale"].transpose(2, 3)
        scales[:, :, ::2] *= 10
        for config in configs(weights, HALF, device):
            check_gate_up(weights, random_job(5, 1, 2, 128, config, HALF, device), config)


def test_b12_no_g_idx_without_act_order(device: str) -> None:
    weights = projection("gptq4-g32", 2, 1, 32, 96, device)
    assert "g_idx" not in weights.tensors
    check("gptq4-g32", device)


@pytest.mark.parametrize("name", ["gptq4-g64-actorder", "gptq4-g32-asym-v2-actorder", "packed4-g64-asym-actorder"])
def test_act_order_differs_between_experts(name: str, device: str) -> None:
    check(name, device, n=32, k=128, experts=3)


@pytest.mark.interpreter
def test_b14_scales_with_too_many_groups_are_refused() -> None:
    weights = projection("gptq4-g32", 2, 1, 32, 96, "cpu")
    longer = torch.cat([weights.tensors["scales"]] * 2, 2)
    wrong = replace(weights, tensors={**weights.tensors, "scales": longer})
    with pytest.raises(ArgumentError, match=r"scales: found float16 \[2, 1, 6, 32\]; expected .*\[2, 1, 3, 32\]"):
        product(wrong, numbers(2, 96, dtype=HALF), torch.zeros(2, 1).int())


@pytest.mark.parametrize(
    "name", ["gptq4-g32-asym-v1", "awq4-g32-asym", "packed4-g32-asym", "gptq8-g32", "gptq8-channel"]
)
def test_b16_b17_asymmetric_and_8_bits(name: str, device: str) -> None:
    check(name, device)


def test_b20_rows_of_other_ranks_are_not_touched(device: str) -> None:
    from fanfold.kernels.grouped.launch import grouped_down

    weights = projection("gptq4-g32", 2, 1, 32, 96, device)
    ids = torch.tensor([[-1], [1], [2], [0], [2**31 - 1]], dtype=torch.int32, device=device)
    job = job_of(numbers(5, 96, dtype=HALF).to(device), ids, 2, 16)
    config = replace(SMALL, block_n=32)
    h = job.x[job.route.sorted_rows.long()]
    y2 = grouped_down(h, weights, job.work, job.route.sorted_rows, config, scatter=True)
    alone = grouped_down(h, weights, job.work, job.route.sorted_rows, config)
    assert job.rows == 2
    assert same_bits(y2[[3, 1]], alone[:2])


def test_c1_gate_and_up_have_their_own_global_scale(device: str) -> None:
    weights = projection("nvfp4", 2, 2, 32, 96, device)
    weights.tensors["global_scale"][:, 1] = 4 * weights.tensors["global_scale"][:, 0]
    config = configs(weights, HALF, device)[0]
    check_gate_up(weights, random_job(5, 1, 2, 96, config, HALF, device), config)


def test_c4_multiplier_and_divisor(device: str) -> None:
    """The same weights in both conventions; the scale is a power of two, so that its reciprocal is exact."""
    weights = projection("nvfp4", 2, 1, 32, 96, device)
    weights.tensors["global_scale"].fill_(2.0**-7)
    inverse = {**weights.tensors, "global_scale": torch.full_like(weights.tensors["global_scale"], 2.0**7)}
    other = ProjectionWeights(WeightFormat.parse("nvfp4-divisor"), 32, 96, inverse)
    x, ids = numbers(5, 96, dtype=HALF).to(device), torch.zeros(5, 1, device=device).int()
    assert same_bits(product(weights, x, ids), product(other, x, ids))


@pytest.mark.parametrize("n", [352, 160, 80])
def test_c6_c8_outputs_that_fill_no_tile(n: int, device: str) -> None:
    check("nvfp4", device, n=n, tokens=3)


def test_c11_sums_beyond_fp16_before_the_global_scale(device: str) -> None:
    weights = projection("nvfp4", 1, 1, 32, 512, device)
    weights.tensors["packed"].fill_(0x77)  # 6
    weights.tensors["scale"].copy_(torch.full((), 448.0).to(torch.float8_e4m3fn))
    weights.tensors["global_scale"].fill_(1e-3)
    y1 = product(weights, torch.ones(1, 512, dtype=HALF, device=device), torch.zeros(1, 1, device=device).int())
    assert torch.equal(y1, torch.tensor(512 * 2688e-3, device=device).to(HALF).expand(1, 32))


@pytest.mark.parametrize("size", [192, 320, 704])
def test_d16_fp8_blocks_that_are_partial(size: int, device: str) -> None:
    check("fp8-block128x128", device, n=size // 4, k=size, tokens=3)
    check("fp8-block128x128", device, n=size, k=160, tokens=2)
