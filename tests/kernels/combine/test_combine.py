"""The weighted sum in Triton against the reference, bit for bit: in the interpreter, on a GPU, compiled."""

import pytest
import torch
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.kernels.combine.reference import combine as reference
from graphs import check_replays, dirty_memory

ON_GPU_TOO = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]


def call(y2: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    from fanfold.kernels.combine.combine import combine

    dirty_memory(y2.device.type)
    return combine(y2, ids, weights, experts)


def batch(tokens: int, top_k: int, hidden: int, experts: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """y2, ids and weights; rows of ids out of range hold NaN, and so do their weights."""
    ids = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32, device=device)
    y2 = torch.randn(tokens * top_k, hidden, device=device).to(dtype)
    weights = torch.randn(tokens, top_k, device=device)
    absent = (ids < 0) | (ids >= experts)
    y2[absent.flatten()] = torch.nan
    weights[absent] = torch.nan
    return [y2, ids, weights]


def check(y2: Tensor, ids: Tensor, weights: Tensor, experts: int) -> None:
    found = call(y2, ids, weights, experts)
    assert found.dtype == y2.dtype
    assert torch.equal(found, reference(y2, ids, weights, experts))


@pytest.mark.parametrize("dtype", ON_GPU_TOO, ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 8, 300), (5, 1, 2), (9, 3, 1025), (65, 2, 257)])
def test_a18_c15_random_rows(dtype: torch.dtype, tokens: int, top_k: int, hidden: int, device: str) -> None:
    """Slots of no expert add nothing, whatever their rows and weights hold."""
    torch.manual_seed(0)
    check(*batch(tokens, top_k, hidden, 5, dtype, device), 5)


def test_ids_of_both_widths_and_weights_of_other_dtypes(device: str) -> None:
    y2, ids, weights = batch(4, 3, 40, 5, torch.float16, device)
    check(y2, ids.long(), weights.half(), 5)
    ids = ids.long()
    ids[0] = torch.tensor([2**32 + 1, 2**40, -(2**40)])  # in range once narrowed
    y2[:3] = torch.nan
    check(y2, ids, weights, 5)


def test_the_order_of_the_slots_decides(device: str) -> None:
    y2 = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]], device=device)
    ids = torch.zeros(1, 3, dtype=torch.int32, device=device)
    assert call(y2, ids, torch.ones(1, 3, device=device), 1).item() == 0.0  # the 1 is lost in the first sum
    assert call(y2[[0, 2, 1]], ids, torch.ones(1, 3, device=device), 1).item() == 1.0


@pytest.mark.parametrize("dtype", ON_GPU_TOO, ids=str)
def test_parts_are_added_in_order_and_rounded_first(dtype: torch.dtype, device: str) -> None:
    from fanfold.kernels.combine.combine import combine

    torch.manual_seed(0)
    _, ids, weights = batch(5, 3, 300, 4, dtype, device)
    parts = torch.randn(3, 15, 300, device=device)
    parts[:, 0] = torch.tensor([2.0**24, 1.0, -(2.0**24)], device=device)[:, None]  # the 1 is lost in the first sum
    y2 = ((parts[0] + parts[1]) + parts[2]).to(dtype)
    found = combine(parts, ids, weights, 4, dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found, reference(y2, ids, weights, 4))


def test_rows_may_be_strided(device: str) -> None:
    y2, ids, weights = batch(4, 2, 90, 5, torch.float32, device)
    for part in (y2[:, 3:70], y2[:, ::2]):
        check(part, ids, weights, 5)
    check(y2[:4], ids.T.contiguous().T[:2], weights.T.contiguous().T[:2], 5)


def test_d10_no_tokens_and_no_experts(device: str) -> None:
    y2, ids, weights = batch(0, 2, 64, 5, torch.float16, device)
    assert call(y2, ids, weights, 5).shape == (0, 64)
    check(*batch(3, 2, 64, 0, torch.float16, device), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 22])
@pytest.mark.parametrize("hidden", [2048, 2880, 7168])
def test_many_tokens(top_k: int, hidden: int) -> None:
    torch.manual_seed(0)
    check(*batch(4096, top_k, hidden, 128, torch.bfloat16, "cuda"), 128)


@pytest.mark.gpu
def test_d4_more_than_2_to_31_elements() -> None:
    tokens, top_k, hidden = 65536, 10, 4096
    assert tokens * top_k * hidden > 2**31
    y2 = torch.zeros(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
    y2[-top_k:] = torch.randn(top_k, hidden, device="cuda").bfloat16()
    ids = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    weights = torch.rand(tokens, top_k, device="cuda")
    out = call(y2, ids, weights, 1)
    assert torch.equal(out[-1:], reference(y2[-top_k:], ids[-1:], weights[-1:], 1))
    assert (out[:-1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 100])
def test_replays(tokens: int) -> None:
    from fanfold.kernels.combine.combine import combine

    batches = [batch(tokens, 8, 2048, 128, torch.bfloat16, "cuda") for _ in range(3)]
    check_replays(lambda y2, ids, weights: [combine(y2, ids, weights, 128)], batches)


@ALL_ARCHS
def test_compiles(arch: str) -> None:
    for top_k, tokens in ((1, 1), (8, 1), (8, 4096), (22, 4096)):
        compile_case(top_k, tokens, arch, "bf16", "bf16")
    if arch == "sm_90":
        for parts in (2, 4):  # of its own product
            compile_case(8, 1, arch, "fp32", "bf16", parts)
        for dtype in ("fp16", "fp32"):
            compile_case(8, 4096, arch, dtype, dtype)


def compile_case(top_k: int, tokens: int, arch: str, dtype: str, out: str, parts: int = 1) -> None:
    from fanfold.kernels.combine.combine import combine_kernel
    from fanfold.kernels.combine.config import columns

    block = columns(tokens)
    types = {"y2_ptr": f"*{dtype}", "ids_ptr": "*i64", "weights_ptr": "*fp32", "out_ptr": f"*{out}"}
    types |= dict.fromkeys(["H", "E", "stride", "stride_part"], "i32")
    constants = {"TOP_K": top_k, "PARTS": parts, "BLOCK": block}
    case = f"top_k {top_k}, {tokens} tokens, {dtype}" + (f" in {parts} parts" if parts > 1 else "")
    check_fits(compile_kernel(combine_kernel, types, constants, arch, block // 128, case, enable_fp_fusion=False), arch)
