"""The grouped product against the reference: every format and option, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grouped_jobs import (
    FORMATS,
    K,
    N,
    check_close,
    check_gate_up,
    configs,
    exact,
    job_of,
    plain,
    projection,
    random_job,
)
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.activation.reference import activate
from fanfold.spec import Activation, WeightFormat
from fanfold.spec.adapters import Aside
from fanfold.spec.launch import LaunchConfig
from graphs import dirty_memory, same_bits
from samples import numbers

SMALL = LaunchConfig(32, 32, 16, 4, 2)
DTYPES = {"cpu": (torch.float16, torch.float32), "cuda": (torch.float16, torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("name", FORMATS)
def test_reads_every_weight(name: str, device: str) -> None:
    """x = the rows of the identity: y1 holds every weight, so it is that of the codec, rounded, bit for bit."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection(name, 2, 2, N, K, device)
    ids = torch.ones(K, 1, dtype=torch.int32, device=device)
    for dtype in DTYPES[device]:
        for config in configs(weights, dtype, device, block_t=128):
            job = job_of(torch.eye(K, dtype=dtype, device=device), ids, 2, config.block_t)
            y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 1, config)
            for half in range(2):
                found = y1[:, half * N : (half + 1) * N].T
                assert torch.equal(found, dequantize_expert(weights, 1, half).to(dtype)), (dtype, config, half)


@pytest.mark.parametrize(
    "name",
    [
        "bf16",
        "gptq2-g64-asym-v2",
        "gptq3-g32",
        "gptq4-g64-asym-v1",
        "gptq4-g64-actorder",
        "gptq8-channel-asym-v2",
        "awq4-g32-asym",
        "packed4-g17-asym",
        "nvfp4-divisor",
        "mxfp4",
        "fp8-channel",
        "fp8-block64x64",
    ],
)
def test_random_numbers(name: str, device: str) -> None:
    weights = projection(name, 3, 2, N, K, device)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    for config in configs(weights, dtype, device):
        check_gate_up(weights, random_job(11, 2, 3, K, config, dtype, device), config)


@pytest.mark.parametrize("name", ["fp16", "gptq4-g32", "gptq4-g64-asym-v1", "awq4-g32-asym", "fp8-block64x64"])
def test_integers_are_summed_exactly(name: str, device: str) -> None:
    """Integer weights and activations: sums are exact in any order, so the result is the rounded sum, bit for bit."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection(name, 2, 2, N, K, device)
    generator = torch.Generator().manual_seed(1)
    for key in ("scale", "scales"):
        if key in weights.tensors:
            weights.tensors[key].fill_(0.5)
    if "weight" in weights.tensors:
        whole = torch.randint(-8, 9, weights.tensors["weight"].shape, generator=generator).float()
        weights.tensors["weight"].copy_(whole.to(weights.tensors["weight"].dtype))
    for dtype in DTYPES[device]:
        for config in configs(weights, dtype, device):
            x = torch.randint(-4, 5, (12, K), generator=generator).to(dtype).to(device)
            job = job_of(x, torch.arange(24, device=device).view(12, 2) % 2, 2, config.block_t)
            y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, config)
            for half in range(2):
                wanted = exact(weights, x[job.tokens], job.route, half).to(torch.float32).to(dtype)
                assert torch.equal(y1[:, half * N : (half + 1) * N], wanted), (dtype, config)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("name", ["bf16", "gptq4-g64", "nvfp4"])
def test_down_in_sorted_order_or_scattered(name: str, scatter: bool, device: str) -> None:
    from fanfold.kernels.grouped.launch import grouped_down

    weights = projection(name, 5, 1, N, K, device)
    dtype = torch.float16
    config = configs(weights, dtype, device)[0]
    job = random_job(23, 3, 5, K, config, dtype, device)
    h = numbers(69, K, seed=9, dtype=dtype).to(device)
    dirty_memory(device)
    y2 = grouped_down(h, weights, job.work, job.route.sorted_rows, config, scatter=scatter)
    found = y2[job.route.sorted_rows.long()] if scatter else y2
    h = h[: job.rows]
    check_close(found[: job.rows], exact(weights, h, job.route, 0), plain(weights, h, job.route, 0))


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp4", "fp8-channel"])
def test_the_bias_of_each_expert_and_half(name: str, bias_dtype: torch.dtype, device: str) -> None:
    weights = projection(name, 5, 2, N, K, device)
    weights = replace(weights, bias=numbers(5, 2, N, seed=3, dtype=bias_dtype).to(device))
    config = configs(weights, torch.float16, device)[0]
    check_gate_up(weights, random_job(23, 3, 5, K, config, torch.float16, device), config)


def test_the_bias_is_added_before_the_one_rounding(device: str) -> None:
    """1 + 2^-11 is 1 in fp16; with a bias of 2^-11 more the sum is 1 + 2^-10."""
    from fanfold.kernels.grouped.launch import grouped_down

    weights = projection("fp32", 1, 1, 16, 16, device)
    weights.tensors["weight"].zero_()
    weights.tensors["weight"][..., 0] = 1.0
    weights.tensors["weight"][..., 1] = 2.0**-11
    weights = replace(weights, bias=torch.full((1, 1, 16), 2.0**-11, device=device))
    job = job_of(torch.ones(1, 16, dtype=torch.float16, device=device), torch.zeros(1, 1, device=device).int(), 1, 16)
    y2 = grouped_down(job.x, weights, job.work, job.route.sorted_rows, SMALL)
    assert torch.equal(y2, torch.full((1, 16), 1.0 + 2.0**-10, dtype=torch.float16, device=device))


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("bf16", "silu"), ("gptq4-g64-actorder", "relu2")])
def test_rows_with_an_adapter_are_set_aside(name: str, kind: str, planned: bool, device: str) -> None:
    """Their y1 has the bits of a launch without activation; other rows go into h, those of ids beyond the slots too."""
    from fanfold.kernels.grouped.act_order import sort_by_group
    from fanfold.kernels.grouped.launch import grouped_gate_up
    from fanfold.kernels.grouped.rows import gather_gate_up

    activation, top_k = Activation(kind), 2
    weights, order = projection(name, 3, 2 if activation.gated else 1, 40, K, device), None
    if weights.format.act_order:
        weights, order = sort_by_group(weights)
    tokens = 12 if planned else 5  # there each row has programs of its own
    job = random_job(tokens, top_k, 3, K, SMALL, torch.float16, device)
    rows = job.route.sorted_rows
    if not planned:
        rows = torch.arange(len(rows), device=device)
    end = job.rows if planned else len(rows)

    def launched(act: Activation | None, aside: Aside | None = None) -> Tensor:
        options = {"activation": act, "permutation": order, "aside": aside}
        if planned:
            return grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, top_k, SMALL, **options)[:end]
        return gather_gate_up(job.x, weights, job.ids.clamp(0, 2), SMALL, **options)

    y1, h = launched(None), launched(activation)
    for slots in ([-1, 4], [2, 3], [-1, 0, 2, 4]):
        adapters = torch.tensor(slots).int().repeat(tokens)[:tokens].contiguous().to(device)
        aside = Aside(torch.full((tokens * top_k, y1.shape[1]), 7.0, dtype=y1.dtype, device=device), adapters, 4, top_k)
        found = launched(activation, aside)
        adapted = ((adapters >= 0) & (adapters < 4))[rows[:end].long() // top_k]
        assert same_bits(aside.y1[:end][adapted], y1[adapted])
        assert (aside.y1[:end][~adapted] == 7).all()
        assert same_bits(found[~adapted], h[~adapted])


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("name", ["bf16", "gptq4-g32", "gptq8-g64", "nvfp4", "fp8-tensor"])
def test_fused_activation_has_the_bits_of_two_steps(kind: str, name: str, device: str) -> None:
    from fanfold.kernels.activation.activate import activate as activate_kernel
    from fanfold.kernels.common.device import arch_of
    from fanfold.kernels.grouped.configs import config_for
    from fanfold.kernels.grouped.launch import grouped_gate_up

    activation = Activation(kind)
    halves = 2 if activation.gated else 1
    weights = projection(name, 3, halves, 40, K, device)
    weights = replace(weights, bias=numbers(3, halves, weights.n, seed=5).to(device))
    dtype = torch.float16
    pairs = [(SMALL, SMALL)]  # numpy's products depend on the shapes, those of matrix units do not
    if device == "cuda":
        arch = arch_of(torch.device(device))
        pairs = [
            (
                config_for(weights.format, K, dtype, arch, mean, 1),
                config_for(weights.format, K, dtype, arch, mean, 1, True),
            )
            for mean in ((4, 20, 30, 3000) if kind == "silu" else (20,))  # each is compiled
        ]
    for plain_config, fused_config in pairs:
        job = random_job(23, 2, 3, K, plain_config, dtype, device)
        job.x.mul_(0.25)  # exp does not overflow
        arguments = (job.x, weights, job.work, job.route.sorted_rows, 2)
        y1 = grouped_gate_up(*arguments, plain_config)[: job.rows]
        h = grouped_gate_up(*arguments, fused_config, activation)[: job.rows]
        assert same_bits(h, activate_kernel(y1, activation))
        torch.testing.assert_close(h, activate(y1, activation), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bf16", "gptq4-g64-asym-v1", "nvfp4"])
def test_batch_invariant_config(name: str, device: str) -> None:
    """A row alone, in a small batch, in a large one and at another place: the same bits."""
    from fanfold.kernels.common.device import arch_of
    from fanfold.kernels.grouped.configs import pinned_config
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection(name, 3, 1, 32, K, device)
    config = pinned_config(WeightFormat.parse(name), K, torch.float16, arch_of(torch.device(device)))
    x = numbers(100, K, dtype=torch.float16).to(device)
    ids = torch.arange(100, device=device)[:, None] % 3

    def rows_of(chosen: list[int]) -> torch.Tensor:
        job = job_of(x[chosen], ids[chosen], 3, config.block_t)
        y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 1, config)
        return y1[job.route.positions.long()]

    whole = rows_of(list(range(100)))
    for chosen in ([7], [99, 7, 8], list(range(99, 20, -1))):
        assert same_bits(rows_of(chosen), whole[chosen])


@pytest.mark.interpreter
def test_other_tiles_of_rows() -> None:
    """block_t changes neither steps nor groups, so results agree to the order of sums inside a step."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection("gptq4-g32", 3, 2, 64, K, "cpu")
    found = []
    for block_t in (16, 32, 128):
        config = replace(SMALL, block_t=block_t, scale_on_sum=True)
        job = random_job(50, 2, 3, K, config, torch.float16, "cpu")
        found.append(grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, config)[: job.rows])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[0], found[2], rtol=1e-3, atol=1e-3)


def test_rows_may_lie_apart_and_positions_without_expert_are_left(device: str) -> None:
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection("fp16", 3, 2, 64, K, device)
    wide = numbers(9, 2 * K, dtype=torch.float16).to(device)
    ids = torch.full((9, 2), -1, dtype=torch.int32, device=device)
    ids[2, 1] = 1
    job = job_of(wide[:, K:], ids, 3, 16)
    y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, SMALL)
    alone = job_of(wide[2:3, K:].contiguous(), torch.tensor([[1, -1]], device=device), 3, 16)
    assert same_bits(y1[:1], grouped_gate_up(alone.x, weights, alone.work, alone.route.sorted_rows, 2, SMALL)[:1])


def test_d10_no_rows_no_experts(device: str) -> None:
    from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up

    weights = projection("gptq4-g32", 3, 2, 64, K, device)
    job = job_of(torch.empty(0, K, dtype=torch.float16, device=device), torch.empty(0, 2, device=device).int(), 3, 16)
    assert grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, SMALL).shape == (0, 128)
    down = projection("gptq4-g32", 3, 1, 64, K, device)
    away = job_of(torch.ones(5, K, device=device).half(), torch.full((5, 1), -1, device=device), 3, 16)
    assert grouped_down(away.x, down, away.work, away.route.sorted_rows, SMALL).shape == (5, 64)
