"""Top-k in Triton against the reference: in the interpreter, on a GPU, and compiled for all archs."""

import pytest
import torch
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.errors import ArgumentError
from fanfold.routing.reference import route_topk as reference
from fanfold.routing.sizes import power_of_two
from fanfold.spec.router import SCORINGS, Router
from graphs import check_replays, dirty_memory

CASES = {
    "mixtral": (8, Router(2, renormalize=True), False),
    "qwen3": (128, Router(8, renormalize=True), False),
    "olmoe": (64, Router(8), False),
    "gpt-oss": (32, Router(4, "softmax_topk"), False),
    "deepseek-v2": (160, Router(6, n_group=8, topk_group=3, scaling=16.0), False),
    "deepseek-v3": (256, Router(8, "sigmoid", True, 8, 4, "top2_sum", 2.5), True),
    "glm4": (160, Router(8, "sigmoid", True, scaling=2.5), True),
    "softmax with a bias": (60, Router(6, "softmax", True), True),
    "top2 without a bias": (21, Router(4, "softmax", False, 3, 2, "top2_sum"), False),
    "one expert": (1, Router(1), False),
    "all experts": (5, Router(5, "sigmoid"), True),
    "512 experts": (512, Router(10, renormalize=True), False),
    "4096 experts": (4096, Router(8, "sigmoid", True), True),
    "no power of two": (1025, Router(3), False),
}
ALL_CASES = pytest.mark.parametrize(("experts", "router", "biased"), CASES.values(), ids=CASES)


def route(logits: Tensor, router: Router, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from fanfold.routing.topk import route_topk

    dirty_memory(logits.device.type)
    return route_topk(logits, router, bias)


def random_bias(experts: int, biased: bool, device: str) -> Tensor | None:
    return torch.randn(experts, device=device) if biased else None


def check(logits: Tensor, router: Router, bias: Tensor | None) -> None:
    """Ids as the reference's, but where scores lie as near as exp is exact; weights within 1e-5."""
    ids, weights = route(logits, router, bias)
    wanted_ids, wanted_weights = reference(logits, router, bias)
    same = (ids == wanted_ids).all(-1)
    if bias is None and router.group_score == "max":
        assert same.all()
    # One token in a thousand may have two experts whose scores differ in the last place alone.
    assert same.sum() >= len(same) - len(same) // 1000
    torch.testing.assert_close(weights[same], wanted_weights[same], rtol=1e-5, atol=1e-9, equal_nan=True)
    check_ids(ids, logits.shape[1])


def check_ids(ids: Tensor, experts: int) -> None:
    assert ids.min() >= 0
    assert ids.max() < experts
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()


@ALL_CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_logits(experts: int, router: Router, biased: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(9, experts, device=device)).to(dtype)
    check(logits, router, random_bias(experts, biased, device))


@ALL_CASES
def test_d8_odd_logits(experts: int, router: Router, biased: bool, device: str) -> None:
    torch.manual_seed(0)
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1.0], device=device)
    logits = values[torch.randint(0, 6, (12, experts), device=device)]
    for row, value in enumerate(values[:3]):
        logits[row] = value
    bias = random_bias(experts, biased, device)
    ids, weights = route(logits, router, bias)
    check_ids(ids, experts)
    if not biased:
        wanted_ids, wanted_weights = reference(logits, router)
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=0, equal_nan=True)
    elif bias is not None:
        bias[0] = torch.nan
        check_ids(route(logits, router, bias)[0], experts)


@ALL_CASES
def test_d12_ties_go_to_the_lowest_id(experts: int, router: Router, biased: bool, device: str) -> None:
    logits = torch.ones(2, experts, device=device)
    ids, _ = route(logits, router, torch.zeros(experts, device=device) if biased else None)
    assert ids.tolist() == [list(range(router.top_k))] * 2


def test_d13_a_bias_moves_ids_and_never_weights(device: str) -> None:
    logits = torch.randn(4, 8, device=device)
    bias = torch.zeros(8, device=device)
    bias[5] = 100.0
    ids, weights = route(logits, Router(1, "sigmoid"), bias)
    assert ids.flatten().tolist() == [5] * 4
    torch.testing.assert_close(weights[:, 0], logits[:, 5].sigmoid(), rtol=2e-6, atol=0)


def test_d10_no_tokens(device: str) -> None:
    ids, weights = route(torch.empty(0, 16, device=device), Router(2))
    assert (ids.shape, ids.dtype) == ((0, 2), torch.int32)
    assert (weights.shape, weights.dtype) == ((0, 2), torch.float32)


def test_rows_may_be_strided(device: str) -> None:
    wide = torch.randn(7, 40, device=device)
    for logits in (wide[:, 3:19], wide[::2, :16], wide[:, ::4], wide.T[:32]):
        check(logits, Router(2), None)


def test_a_wrong_bias_is_refused(device: str) -> None:
    logits = torch.randn(2, 8, device=device)
    for bias in (torch.zeros(7, device=device), torch.zeros(8, device=device, dtype=torch.float16)):
        with pytest.raises(ArgumentError) as caught:
            route(logits, Router(2), bias)
        assert caught.value.what == "bias"
        assert "float32 [8]" in caught.value.expected


@pytest.mark.gpu
@ALL_CASES
def test_many_tokens(experts: int, router: Router, biased: bool) -> None:
    torch.manual_seed(0)
    check(2 * torch.randn(16384, experts, device="cuda"), router, random_bias(experts, biased, "cuda"))


@pytest.mark.gpu
def test_d4_logits_beyond_2_to_31_elements() -> None:
    logits = torch.zeros(2**19 + 3, 4096, device="cuda", dtype=torch.bfloat16)
    logits[-1, 77] = 1.0
    ids, _ = route(logits, Router(2))
    assert ids[-1].tolist() == [77, 0]
    assert ids[0].tolist() == [0, 1]


@pytest.mark.gpu
@ALL_CASES
def test_replays(experts: int, router: Router, biased: bool) -> None:
    from fanfold.routing.topk import route_topk

    bias = random_bias(experts, biased, "cuda")
    check_replays(
        lambda logits: route_topk(logits, router, bias), [[torch.randn(33, experts, device="cuda")] for _ in range(3)]
    )


@ALL_ARCHS
def test_compiles(arch: str) -> None:
    some = ["mixtral", "deepseek-v2", "deepseek-v3", "512 experts", "4096 experts"]
    for name in CASES if arch == "sm_90" else some:
        compile_case(name, arch)
    if arch == "sm_90":
        for dtype in ("fp16", "fp32"):
            compile_case("deepseek-v3", arch, dtype)


def compile_case(name: str, arch: str, dtype: str = "bf16") -> None:
    from fanfold.routing.topk import route_topk_kernel, topk_warps

    experts, router, biased = CASES[name]
    block_g, block_s = power_of_two(router.n_group), power_of_two(experts // router.n_group)
    types = {"logits_ptr": f"*{dtype}", "ids_ptr": "*i32", "weights_ptr": "*fp32", "stride": "i32", "scaling": "fp32"}
    constants = {
        "GROUPS": router.n_group,
        "GROUP_SIZE": experts // router.n_group,
        "TOPK_GROUP": router.topk_group,
        "TOP2_SUM": router.group_score == "top2_sum",
        "TOP_K": router.top_k,
        "SCORING": SCORINGS.index(router.scoring),
        "RENORMALIZE": router.renormalize,
        "HAS_BIAS": biased,
        "BLOCK_G": block_g,
        "BLOCK_S": block_s,
        "BLOCK_K": power_of_two(router.top_k),
    }
    (types if biased else constants)["bias_ptr"] = "*fp32" if biased else None
    warps = topk_warps(block_g * block_s)
    check_fits(compile_kernel(route_topk_kernel, types, constants, arch, warps, f"{name}, {dtype}"), arch)
