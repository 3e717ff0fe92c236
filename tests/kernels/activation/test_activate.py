"""Activations in Triton against the reference: in the interpreter, on a GPU, and compiled for all archs."""

from itertools import product

import pytest
import torch
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.kernels.activation.reference import activate as reference
from fanfold.spec.activation import KINDS, Activation
from graphs import check_replays, dirty_memory

ALL_KINDS = pytest.mark.parametrize("activation", [Activation(kind) for kind in KINDS], ids=KINDS)
ON_GPU_TOO = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),  # int -> bf16 is wrong in the interpreter
]


def call(y1: Tensor, activation: Activation) -> Tensor:
    from fanfold.kernels.activation.activate import activate

    dirty_memory(y1.device.type)
    return activate(y1, activation)


def check(y1: Tensor, activation: Activation) -> None:
    found = call(y1, activation)
    wanted = reference(y1, activation)
    assert (found.dtype, found.shape) == (y1.dtype, wanted.shape)
    if activation.kind == "relu2":
        assert torch.equal(found, wanted)
        return
    gate, up = y1.float().chunk(2, -1)
    one_ulp = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[y1.dtype]
    smallest = {torch.float32: 1e-37, torch.float16: 2**-24, torch.bfloat16: 1e-37}[y1.dtype]
    allowed = one_ulp * wanted.float().abs() + smallest
    if activation.kind == "gelu_tanh":
        allowed += 2e-6 * (gate * up).abs()
    error = (found.float() - wanted.float()).abs()
    assert (error <= allowed).all(), (error / allowed).max()


@ALL_KINDS
@pytest.mark.parametrize("dtype", ON_GPU_TOO, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 77), (2, 1056), (5, 352)])
def test_random_values(activation: Activation, dtype: torch.dtype, rows: int, width: int, device: str) -> None:
    torch.manual_seed(0)
    halves = 2 if activation.gated else 1
    check((4 * torch.randn(rows, halves * width, device=device)).to(dtype), activation)


@ALL_KINDS
def test_large_values_saturate(activation: Activation, device: str) -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 20.0, -20.0, 6.99, 7.01, -7.01, 60.0, -60.0], device=device)
    gate, up = torch.meshgrid(values, values, indexing="ij")
    y1 = torch.stack([gate.flatten(), up.flatten()]).reshape(1, 200)
    check(y1 if activation.gated else y1[:, :100].contiguous(), activation)


@pytest.mark.parametrize(("alpha", "limit"), [(1.0, 2.0), (1.702, 7.0)])
def test_constants_are_the_activations_own(alpha: float, limit: float, device: str) -> None:
    check(4 * torch.randn(3, 80, device=device), Activation("clamped_swiglu", alpha, limit))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_a_nan_is_not_hidden(kind: str, device: str) -> None:
    y1 = torch.ones(1, 8, device=device)
    y1[0, 1] = torch.nan  # a gate
    y1[0, 6] = torch.nan  # an up
    assert call(y1, Activation(kind)).isnan().tolist() == [[False, True, True, False]]


def test_a_nan_is_not_hidden_without_a_gate(device: str) -> None:
    y1 = torch.tensor([[-1.0, torch.nan, 2.0]], device=device)
    assert call(y1, Activation("relu2")).isnan().tolist() == [[False, True, False]]


@ALL_KINDS
def test_rows_may_be_strided(activation: Activation, device: str) -> None:
    wide = torch.randn(6, 90, device=device)
    for y1 in (wide[:, 3:67], wide[::2, :64], wide[:, ::2][:, :44]):
        check(y1, activation)


@ALL_KINDS
def test_d10_no_rows(activation: Activation, device: str) -> None:
    assert call(torch.empty(0, 64, device=device), activation).shape == (0, 32 if activation.gated else 64)


@pytest.mark.gpu
@ALL_KINDS
@pytest.mark.parametrize("width", [704, 1408, 1856, 2880, 14336])
def test_many_rows(activation: Activation, width: int) -> None:
    torch.manual_seed(0)
    halves = 2 if activation.gated else 1
    check(4 * torch.randn(8192, halves * width, device="cuda", dtype=torch.bfloat16), activation)


@pytest.mark.gpu
def test_d4_more_than_2_to_31_elements() -> None:
    rows = 2**19 + 3
    y1 = torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16)
    y1[-1] = 3.0
    assert rows * 4096 > 2**31
    h = call(y1, Activation())
    assert torch.equal(h[-1], reference(y1[-1:], Activation())[0])
    assert (h[:-1] == 0).all()


@pytest.mark.gpu
@ALL_KINDS
def test_replays(activation: Activation) -> None:
    from fanfold.kernels.activation.activate import activate

    batches = [[torch.randn(17, 704, device="cuda", dtype=torch.bfloat16)] for _ in range(3)]
    check_replays(lambda y1: [activate(y1, activation)], batches)


@ALL_ARCHS
def test_compiles(arch: str) -> None:
    from fanfold.kernels.activation.activate import BLOCK, WARPS, activate_kernel

    for kind, dtype in product(KINDS, ("bf16", "fp16", "fp32") if arch == "sm_90" else ("bf16",)):
        types = {"y1_ptr": f"*{dtype}", "h_ptr": f"*{dtype}"} | dict.fromkeys(["I", "stride"], "i32")
        types |= {"alpha": "fp32", "limit": "fp32"}
        constants = {"KIND": kind, "BLOCK": BLOCK}
        check_fits(compile_kernel(activate_kernel, types, constants, arch, WARPS, f"{kind}, {dtype}"), arch)
