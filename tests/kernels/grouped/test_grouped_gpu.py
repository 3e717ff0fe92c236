"""The grouped product on a GPU: awkward and large sizes, skewed routings, graphs, every small float."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grouped_jobs import Job, check_close, exact, job_of, plain, projection
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.routing.plan import plan_sort
from fanfold.spec import Activation, ProjectionWeights, WeightFormat
from fanfold.spec.launch import LaunchConfig
from graphs import check_replays, dirty_memory, same_bits
from samples import relative_error

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
FORMATS = [
    "bf16",
    "gptq4-g32",
    "gptq4-g64-asym-v1",
    "awq4-g32-asym",
    "packed8-channel",
    "nvfp4",
    "mxfp4",
    "fp8-block128x128",
]


def config_of(weights: ProjectionWeights, dtype: torch.dtype, rows: int, fused: bool = False) -> LaunchConfig:
    from fanfold.kernels.common.device import arch_of
    from fanfold.kernels.grouped.configs import config_for

    arch = arch_of(torch.device("cuda"))
    return config_for(weights.format, weights.k, dtype, arch, rows, weights.num_experts, fused)


def job_with(weights: ProjectionWeights, x: Tensor, ids: Tensor) -> Job:
    return job_of(x, ids, weights.num_experts, config_of(weights, x.dtype, ids.numel()).block_t)


def check(weights: ProjectionWeights, job: Job) -> None:
    """gate_up (or down's shapes, with one half) of a few experts against fp64; nothing poisoned is left."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    dirty_memory("cuda")
    y1 = grouped_gate_up(
        job.x,
        weights,
        job.work,
        job.route.sorted_rows,
        job.route.top_k,
        config_of(weights, job.x.dtype, job.ids.numel()),
    )
    assert not y1[: job.rows].isnan().any()
    x = job.x[job.tokens[: job.rows]]
    for half in range(weights.halves):
        found = y1[: job.rows, half * weights.n : (half + 1) * weights.n]
        check_close(found, exact(weights, x, job.route, half), plain(weights, x, job.route, half))


def tokens_of(count: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, k, generator=generator, device="cuda").to(dtype)


def routing(tokens: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator, device="cuda").topk(top_k).indices.int()


@DTYPES
@pytest.mark.parametrize("size", [2880, 704, 1408, 1856, 352])
@pytest.mark.parametrize("name", FORMATS)
def test_awkward_sizes(name: str, size: int, dtype: torch.dtype) -> None:
    for n, k in ((size, 512), (256, size)):
        weights = projection(name, 3, 2, n, k, "cuda")
        for tokens in (1, 40, 700):
            check(weights, job_with(weights, tokens_of(tokens, k, dtype), routing(tokens, 2, 3)))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 256, 1024, 4096, 16384])
@pytest.mark.parametrize("name", ["bf16", "gptq4-g128", "nvfp4", "fp8-block128x128"])
def test_numbers_of_tokens(name: str, tokens: int, dtype: torch.dtype) -> None:
    weights = projection(name, 8, 2, 256, 256, "cuda")
    check(weights, job_with(weights, tokens_of(tokens, 256, dtype), routing(tokens, 2, 8)))


@pytest.mark.parametrize("name", ["gptq4-g32", "nvfp4"])
def test_c15_512_experts_most_without_rows(name: str) -> None:
    weights = projection(name, 512, 1, 64, 64, "cuda")
    for tokens in (3, 600):
        check(weights, job_with(weights, tokens_of(tokens, 64, torch.bfloat16), routing(tokens, 8, 512)))


@pytest.mark.parametrize("name", FORMATS)
def test_all_tokens_to_one_expert(name: str) -> None:
    weights = projection(name, 6, 2, 128, 256, "cuda")
    for tokens in (5, 1000):
        check(
            weights, job_with(weights, tokens_of(tokens, 256, torch.bfloat16), torch.full((tokens, 1), 4).int().cuda())
        )


@DTYPES
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8-tensor"])
def test_every_code_with_every_scale(name: str, dtype: torch.dtype) -> None:
    """All E2M1 and E4M3 codes and scales whose product the dtype holds, read through the rows of the identity."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection(name, 1, 1, 256, 256, "cuda")
    ramp = torch.arange(256, device="cuda")
    if name == "fp8-tensor":
        codes = torch.where((ramp & 0x7F) == 0x7F, 0, ramp).to(torch.uint8).expand(256, 256)
        weights.tensors["weight"][0, 0] = codes.contiguous().view(torch.float8_e4m3fn)
    else:
        weights.tensors["packed"][0, 0] = (ramp[:128] * 2 + 1).to(torch.uint8)
        weights.tensors["packed"][0, 0, ::2] = (ramp[:128] * 2).to(torch.uint8)
        if name == "nvfp4":
            weights.tensors["scale"][0, 0] = ramp[:, None].remainder(127).to(torch.uint8).view(torch.float8_e4m3fn)
        else:
            weights.tensors["scale"][0, 0] = (ramp[:, None] % 20 + 117).to(torch.uint8)
    job = job_with(weights, torch.eye(256, dtype=dtype, device="cuda"), torch.zeros(256, 1).int().cuda())
    config = config_of(weights, dtype, 256)
    y = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 1, config)
    assert torch.equal(y.T, dequantize_expert(weights, 0, 0).to(dtype))


@pytest.mark.parametrize("name", ["bf16", "gptq4-g128", "gptq4-g64-asym-v1", "nvfp4", "fp8-block128x128"])
@pytest.mark.parametrize("tokens", [1, 50, 2000])
def test_a30_run_to_run_the_same_bits(name: str, tokens: int) -> None:
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection(name, 4, 2, 512, 1024, "cuda")
    job = job_with(weights, tokens_of(tokens, 1024, torch.bfloat16), routing(tokens, 2, 4))
    arguments = (job.x, weights, job.work, job.route.sorted_rows, 2, config_of(weights, torch.bfloat16, tokens * 2))
    first = grouped_gate_up(*arguments)
    for _ in range(50):
        assert same_bits(grouped_gate_up(*arguments), first)


@pytest.mark.parametrize("name", ["bf16", "gptq4-g128", "nvfp4"])
def test_batch_invariant_at_any_batch_size(name: str) -> None:
    from fanfold.kernels.common.device import arch_of
    from fanfold.kernels.grouped.configs import pinned_config
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection(name, 4, 2, 512, 1024, "cuda")
    config = pinned_config(WeightFormat.parse(name), 1024, torch.bfloat16, arch_of(torch.device("cuda")))
    x, ids = tokens_of(3000, 1024, torch.bfloat16), routing(3000, 2, 4)

    def rows_of(chosen: Tensor) -> Tensor:
        job = job_of(x[chosen], ids[chosen], 4, config.block_t)
        y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 2, config)
        return y1[job.route.positions.long()].view(len(chosen), -1)

    whole = rows_of(torch.arange(3000, device="cuda"))
    for size in (1, 2, 17, 65, 500, 2999):
        chosen = torch.randperm(3000, generator=torch.Generator().manual_seed(size))[:size].cuda()
        assert same_bits(rows_of(chosen), whole[chosen])


@pytest.mark.parametrize("name", ["bf16", "gptq4-g128", "nvfp4", "fp8-block128x128"])
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_replays_with_other_routings(name: str, tokens: int) -> None:
    """The plan and both projections in one graph; replays equal eager calls bit for bit."""
    from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up

    gate_up = projection(name, 16, 2, 128, 256, "cuda")
    down = projection(name, 16, 1, 256, 128, "cuda", seed=7)
    config = config_of(gate_up, torch.bfloat16, tokens * 4, fused=True)
    last = config_of(down, torch.bfloat16, tokens * 4)

    def call(x: Tensor, ids: Tensor) -> list[Tensor]:
        route, work = plan_sort(ids, 16, config.block_t)
        h = grouped_gate_up(x, gate_up, work, route.sorted_rows, 4, config, Activation("silu"))
        return [grouped_down(h, down, work, route.sorted_rows, last, scatter=True)]

    check_replays(call, [(tokens_of(tokens, 256, torch.bfloat16, s), routing(tokens, 4, 16, s)) for s in range(4)])


@pytest.mark.parametrize("size", [2880, 704, 352])
@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block128x128"])
def test_8_bit_activations(name: str, size: int) -> None:
    """Every tile of rows, against fp64 of the quantised activations; fused and unfused have the same bits."""
    from fanfold.kernels.activation.activate import activate
    from fanfold.kernels.common.device import arch_of
    from fanfold.kernels.grouped.configs import config_for
    from fanfold.kernels.grouped.launch import grouped_gate_up
    from fanfold.kernels.grouped.reference import dequantize_rows, quantize_rows

    weights = projection(name, 3, 2, 320, size, "cuda")
    group, arch = weights.format.activation_group(size), arch_of(torch.device("cuda"))
    for tokens in (1, 20, 90, 1000):
        x, ids = tokens_of(tokens, size, torch.bfloat16), routing(tokens, 2, 3)
        plain_config, fused_config = (
            config_for(weights.format, size, torch.bfloat16, arch, tokens * 2, 3, fused, w8a8=True)
            for fused in (False, True)
        )
        job = job_of(x, ids, 3, plain_config.block_t)
        arguments = (x, weights, job.work, job.route.sorted_rows, 2)
        dirty_memory("cuda")
        y1 = grouped_gate_up(*arguments, plain_config, w8a8=True)
        rounded = dequantize_rows(*quantize_rows(x, group), group)[job.tokens]
        for half in range(2):
            found, wanted = y1[:, half * 320 : (half + 1) * 320], exact(weights, rounded, job.route, half)
            assert relative_error(found, wanted) < 3e-3  # bf16 rounds by 1.7e-3
            assert abs(float(found.double().norm() / wanted.norm()) - 1) < 1e-3
        h = grouped_gate_up(*arguments, fused_config, Activation("silu"), w8a8=True)
        assert same_bits(h, activate(y1, Activation("silu")))


def test_smaller_tiles_have_the_same_bits() -> None:
    from fanfold.kernels.grouped.launch import grouped_gate_up

    weights = projection("bf16", 6, 2, 256, 1024, "cuda")
    x, ids = tokens_of(300, 1024, torch.bfloat16), routing(300, 2, 6)
    ids[:, 0] = torch.arange(300, device="cuda") // 150  # experts of 150 rows and of few
    config = config_of(weights, torch.bfloat16, 10**6)
    assert config.smallest_t == 32
    job = job_of(x, ids, 6, 128)
    found = [
        grouped_gate_up(x, weights, job.work, job.route.sorted_rows, 2, replace(config, smallest_t=smallest))
        for smallest in (None, 64, 32)
    ]
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_d6_weights_beyond_2_to_31_elements() -> None:
    """E = 512, 4096 x 1152: the last experts lie behind 2^31 elements."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    n, k = 4096, 1152
    weight = torch.zeros(512, 1, n, k, dtype=torch.bfloat16, device="cuda")
    for e in (0, 455, 511):
        weight[e, 0, :, 0] = e + 1
    weights = ProjectionWeights(WeightFormat.parse("bf16"), n, k, {"weight": weight})
    ids = torch.tensor([[0], [511], [455], [100]], device="cuda")
    job = job_with(weights, torch.ones(4, k, dtype=torch.bfloat16, device="cuda"), ids)
    y = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, 1, config_of(weights, torch.bfloat16, 4))
    assert torch.equal(y[:, 7], torch.tensor([1, 0, 456, 512], device="cuda").bfloat16())
    assert torch.equal(y[:, n - 1], y[:, 7])


def test_d4_rows_beyond_2_to_31_elements() -> None:
    """y1 [65536 * 10, 4096]: the last rows lie behind 2^31 elements; so do those of h."""
    from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up

    tokens, top_k, n, k = 65536, 10, 4096, 64
    weights = projection("bf16", 10, 1, n, k, "cuda")
    ids = torch.arange(10, device="cuda").expand(tokens, 10)
    job = job_with(weights, tokens_of(tokens, k, torch.bfloat16), ids)
    config = config_of(weights, torch.bfloat16, tokens * top_k)
    y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, top_k, config)
    last = job.x[-64:].double() @ dequantize_expert(weights, 9, 0).double().T
    torch.testing.assert_close(y1[-64:].double(), last, rtol=2e-2, atol=2e-2)
    down = projection("bf16", 10, 1, k, n, "cuda", seed=3)
    down_config = config_of(down, torch.bfloat16, tokens * top_k)
    y2 = grouped_down(y1, down, job.work, job.route.sorted_rows, down_config)
    last = y1[-64:].double() @ dequantize_expert(down, 9, 0).double().T
    torch.testing.assert_close(y2[-64:].double(), last, rtol=3e-2, atol=3e-2)
