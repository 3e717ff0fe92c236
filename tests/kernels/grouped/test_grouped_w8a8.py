"""FP8 weights with activations in 8 bits: quantisation bit for bit, products against fp64 and integers exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grouped_jobs import exact, projection, random_job
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.errors import ArgumentError
from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.common.operands import RowScales
from fanfold.kernels.grouped.quantize import quantize_rows
from fanfold.kernels.grouped.reference import dequantize_rows
from fanfold.kernels.grouped.reference import quantize_rows as reference_of
from fanfold.spec import Activation, ProjectionWeights
from fanfold.spec.launch import LaunchConfig
from graphs import dirty_memory, same_bits
from samples import numbers, relative_error

K = 160  # the last block of inputs is short


def config_of(weights: ProjectionWeights, device: str) -> LaunchConfig:
    on_sum = "block" in str(weights.format)
    if device == "cpu":
        return LaunchConfig(32, 64, 16, 4, 2, on_sum)
    return LaunchConfig(64, 64 if "64x64" in str(weights.format) else 128, 16, 4, 3, on_sum)


def check_quantized(x: Tensor, group_size: int) -> None:
    found, scales = quantize_rows(x, group_size)
    wanted, wanted_scales = reference_of(x, group_size)
    on_cpu, scales_on_cpu = reference_of(x.cpu(), group_size)
    assert same_bits(wanted.cpu().view(torch.uint8), on_cpu.view(torch.uint8))
    assert same_bits(wanted_scales.cpu(), scales_on_cpu)
    assert isinstance(scales, RowScales)
    assert scales.ptr is not None
    assert same_bits(scales.ptr, wanted_scales)
    assert same_bits(found, wanted.view(torch.uint8))


@pytest.mark.parametrize("group_size", [32, 48, K])
def test_quantized_as_the_reference_bit_for_bit(group_size: int, device: str) -> None:
    x = numbers(5, K, dtype=torch.float16) * torch.tensor([1, 100, 0.01, 0, 1], dtype=torch.float16)[:, None]
    x[0, 40:] = 0  # whole groups of zeros
    x[4] = -0.0
    check_quantized(x.to(device), group_size)
    check_quantized(x.float().to(device)[:, :33], group_size)


def test_every_e4m3_number_and_what_lies_between(device: str) -> None:
    """All 127 sizes, the points halfway (ties) and their neighbours, with a scale of 1; then NaN."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(500.0))])
    x = torch.cat([near, -near, torch.tensor([448.0])])[None].to(device)
    check_quantized(x, x.shape[1])
    found, _ = quantize_rows(torch.tensor([[1.0, torch.nan, -2.0, 0.5]], device=device), 4)
    assert found[0, 1] & 0x7F == 0x7F


def test_zero_rows_have_a_scale_of_1(device: str) -> None:
    found, scales = quantize_rows(torch.zeros(2, 64, device=device), 32)
    assert torch.equal(found, torch.zeros(2, 64, dtype=torch.uint8, device=device))
    assert scales.ptr is not None
    assert torch.equal(scales.ptr, torch.ones(2, 2, device=device))
    assert quantize_rows(torch.zeros(0, 64, device=device), 32)[0].shape == (0, 64)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block64x64", "fp8-block128x128"])
def test_products_of_quantised_activations(name: str, device: str) -> None:
    """Against fp64 of the quantised activations: what is left is the rounding of the output (and 13-bit sums of 128
    products on Hopper). With the activations as they are the error is that of E4M3, some 2^-4 a number."""
    from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up
    from fanfold.kernels.grouped.rows import gather_down, gather_gate_up

    weights, down = projection(name, 2, 2, 32, K, device), projection(name, 2, 1, 32, K, device)
    config, dtype = config_of(weights, device), torch.float16
    job = random_job(3, 2, 2, K, config, dtype, device)
    at = job.route.sorted_rows[: job.rows].long()
    group = 64 if "64x64" in name else 128 if "128" in name else K
    dirty_memory(device)
    y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, config, w8a8=True)
    rounded = dequantize_rows(*reference_of(job.x, group), group)[job.tokens[: job.rows]]
    for half in range(2):
        found = y1[: job.rows, half * 32 : (half + 1) * 32]
        wanted = exact(weights, rounded, job.route, half)
        assert relative_error(found, wanted) < 1e-3
        assert abs(float(found.double().norm() / wanted.norm()) - 1) < 1e-3
        unrounded = exact(weights, job.x[job.tokens[: job.rows]], job.route, half)
        assert 1e-3 < relative_error(found, unrounded) < 6e-2
    assert same_bits(gather_gate_up(job.x, weights, job.ids, config, w8a8=True)[at], y1[: job.rows])

    h = numbers(6, K, seed=4, dtype=dtype).to(device)
    config = config_of(down, device)
    y2 = grouped_down(h, down, job.work, job.route.sorted_rows, config, w8a8=True)[: job.rows]
    rounded = dequantize_rows(*reference_of(h, group), group)[: job.rows]
    assert relative_error(y2, exact(down, rounded, job.route, 0)) < 1e-3
    rows = torch.zeros_like(h)
    rows[at] = h[: job.rows]
    assert same_bits(gather_down(rows, down, job.ids, config, w8a8=True)[at], y2)


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-block64x64"])
def test_integers_are_summed_exactly(name: str, device: str) -> None:
    """Small integers, amax 448 / 64 a group, so that scales are powers of two: sums are exact in any order."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection(name, 2, 2, 32, K, device)
    generator = torch.Generator().manual_seed(1)
    weights.tensors["scale"].fill_(0.5)
    whole = torch.randint(-3, 4, weights.tensors["weight"].shape, generator=generator).float()
    weights.tensors["weight"].copy_(whole.to(torch.float8_e4m3fn))
    config = config_of(weights, device)
    job = random_job(5, 2, 2, K, config, torch.float32 if device == "cpu" else torch.bfloat16, device)
    job.x.copy_(torch.randint(-3, 4, job.x.shape, generator=generator))
    job.x[:, ::32] = 7.0
    y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, config, w8a8=True)
    for half in range(2):
        wanted = exact(weights, job.x[job.tokens[: job.rows]], job.route, half).float().to(job.x.dtype)
        assert torch.equal(y1[: job.rows, half * 32 : (half + 1) * 32], wanted)


def test_fused_activation_and_bias(device: str) -> None:
    from fanfold.kernels.activation.reference import activate
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection("fp8-block64x64", 2, 2, 32, K, device)
    weights = replace(weights, bias=numbers(2, 2, 32, seed=5).to(device))
    config = config_of(weights, device)
    job = random_job(3, 2, 2, K, config, torch.float16, device)
    arguments = (job.x, weights, job.work, job.route.sorted_rows, 2, config)
    y1 = grouped_gate_up(*arguments, w8a8=True)[: job.rows]
    h = grouped_gate_up(*arguments, Activation("silu"), w8a8=True)[: job.rows]
    torch.testing.assert_close(h, activate(y1, Activation("silu")), rtol=2e-3, atol=1e-4)
    x = dequantize_rows(*reference_of(job.x, 64), 64)[job.tokens[: job.rows]]
    assert relative_error(y1[:, :32], exact(weights, x, job.route, 0)) < 1e-3
    assert not torch.equal(dequantize_expert(weights, 0, 0), dequantize_expert(weights, 1, 0))


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-block64x64"])
def test_gate_and_up_one_after_the_other(name: str, device: str) -> None:
    """Where sums are too large for registers; in tiles of 64 rows, whose tokens are the left operand."""
    from fanfold.kernels.activation.reference import activate
    from fanfold.kernels.grouped.launch import grouped_gate_up, launch_arguments

    weights = projection(name, 2, 2, 32, K, device)
    apart = LaunchConfig(128, 64, 64, 4, 2, "block" in name)
    together = replace(apart, num_warps=8)
    job = random_job(40, 2, 2, K, apart, torch.float16, device)
    slots, rows, scales = job.work, job.route.sorted_rows, RowScales(job.x, 1, 1, 64)
    for config in (apart, together):
        made = launch_arguments("", job.x.byte(), weights, slots, rows, config, job.x, 90, 2, x_scales=scales)
        assert made["APART"] == (config is apart and "block" in name)
    arguments = (job.x, weights, job.work, job.route.sorted_rows, 2)
    h = grouped_gate_up(*arguments, apart, Activation("silu"), w8a8=True)[: job.rows]
    assert same_bits(h, grouped_gate_up(*arguments, together, Activation("silu"), w8a8=True)[: job.rows])
    y1 = grouped_gate_up(*arguments, apart, w8a8=True)[: job.rows]
    torch.testing.assert_close(h, activate(y1, Activation("silu")), rtol=2e-3, atol=1e-4)
    x = dequantize_rows(*reference_of(job.x, 64 if "block" in name else K), 64 if "block" in name else K)
    assert relative_error(y1[:, 32:], exact(weights, x[job.tokens[: job.rows]], job.route, 1)) < 1e-3


@pytest.mark.parametrize("case", ["no fp8", "narrow blocks", "scales on the weights"])
def test_what_is_no_8_bit_product_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fanfold.kernels.grouped import launch

    monkeypatch.setattr(launch, "arch_of", lambda device: 0)
    monkeypatch.setattr(launch, "quantize_rows", lambda x, size: (x, RowScales(x, 1, 1, size)))
    names = {"no fp8": "gptq4-g32", "narrow blocks": "fp8-block32x48", "scales on the weights": "fp8-block64x64"}
    weights = projection(names[case], 2, 2, 32, 128, "cpu")
    config = LaunchConfig(32, 32, 16, 4, 2)
    job = random_job(4, 2, 2, 128, config, torch.float16, "cpu")
    message = {"scales on the weights": r"config: found scales on the weights.*scale_on_sum"}.get(
        case, f"found {names[case]}; expected fp8-tensor"
    )
    with pytest.raises(ArgumentError, match=message):
        launch.grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, config, w8a8=True)


@ALL_ARCHS
def test_quantisation_compiles(arch: str) -> None:
    from fanfold.kernels.grouped.quantize import quantize_groups

    pointers = {"x_ptr": "*bf16", "q_ptr": "*u8", "s_ptr": "*fp32"}
    types = {**pointers, "K": "i32", "groups": "i32", "group_size": "i32", "stride_x": "i32"}
    for groups, size, warps in ((1, 128, 4), (32, 128, 4), (1, 2048, 4), (1, 4096, 4), (1, 16384, 8)):
        constants = {"NATIVE": int(arch[3:]) >= 89, "GROUPS": groups, "BLOCK": size}
        case = f"{groups} groups of {size}"
        check_fits(compile_kernel(quantize_groups, types, constants, arch, warps, case), arch)
