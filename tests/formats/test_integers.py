from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of, random_weight

from fanfold.errors import ArgumentError
from fanfold.formats import integers

CPU = torch.device("cpu")


def test_groups_of_k_with_a_short_last_group_one_group_and_a_g_idx():
    assert integers.group_of_k(fmt_of("gptq4-g4"), None, 10, CPU).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert integers.group_of_k(fmt_of("gptq4-channel"), None, 3, CPU).tolist() == [0, 0, 0]
    g_idx = torch.tensor([1, 0, 1], dtype=torch.int32)
    assert integers.group_of_k(fmt_of("gptq4-g2-actorder"), g_idx, 3, CPU).tolist() == [1, 0, 1]
    with pytest.raises(ArgumentError, match=r"g_idx: found none; expected int32 \[3\]"):
        integers.group_of_k(fmt_of("gptq4-g2-actorder"), None, 3, CPU)


def test_the_product_is_rounded_once():
    scales = torch.tensor([[0.1]], dtype=torch.float16)
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    zeros = torch.tensor([[100]], dtype=torch.int32)
    found = integers.apply_scales(codes, zeros, scales, torch.zeros(256, dtype=torch.int64))
    exact = scales.double() * (torch.arange(256.0, dtype=torch.float64) - 100)
    assert torch.equal(found, exact.float())


def test_symmetric_rounding_by_hand():
    fmt = fmt_of("gptq4-g4")
    weight = torch.tensor([[7.5, -7.5, 1.0, -0.4, 0.0, 0.0, 0.0, 0.0]])
    groups = integers.group_of_k(fmt, None, 8, CPU)
    codes, zeros, scales = integers.round_to_nearest(fmt, weight, groups, torch.float16)
    assert scales.tolist() == [[1.0], [1.0]]  # 2 * 7.5 / 15; nothing to scale
    assert zeros.tolist() == [[8], [8]]
    assert codes.tolist() == [[15, 0, 9, 8, 8, 8, 8, 8]]


def test_asymmetric_rounding_by_hand():
    fmt = fmt_of("gptq4-g4-asym-v2")
    weight = torch.tensor([[-5.0, 10.0, 0.0, 1.2, 3.0, 15.0, 6.0, 6.4], [-15.0, -1.0, 0.0, -3.0, 0.0, 0.0, 0.0, 0.0]])
    groups = integers.group_of_k(fmt, None, 8, CPU)
    codes, zeros, scales = integers.round_to_nearest(fmt, weight, groups, torch.float16)
    assert scales.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert zeros.tolist() == [[5, 15], [0, 0]]
    assert codes.tolist() == [[0, 15, 5, 6, 3, 15, 6, 6], [0, 14, 15, 12, 0, 0, 0, 0]]


def test_codes_are_rounded_against_the_stored_scale():
    fmt = fmt_of("gptq8-channel")
    weight = random_weight(4, 64)
    groups = torch.zeros(64, dtype=torch.int64)
    codes, zeros, scales = integers.round_to_nearest(fmt, weight, groups, torch.bfloat16)
    found = integers.apply_scales(codes, zeros, scales, groups)
    inside = (codes > 0) & (codes < 255)
    assert ((found - weight).abs() <= 0.5001 * scales.float().T)[inside].all()


def test_scales_beyond_fp16_are_clamped_and_those_below_become_1():
    fmt = fmt_of("gptq4-channel")
    groups = torch.zeros(2, dtype=torch.int64)
    weight = torch.tensor([[1e9, 0.0], [1e-12, 0.0]])
    codes, _, scales = integers.round_to_nearest(fmt, weight, groups, torch.float16)
    assert scales.tolist() == [[65504.0, 1.0]]
    assert codes.tolist() == [[15, 8], [8, 8]]
