"""The packing kernel has the bits of the reference: rows of both rules, gathered or not, and weights."""

from __future__ import annotations

import re

import pytest
import torch
from nvfp4_cases import awkward_rows, code_edges, rows_of_scales, rows_with_scale
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.export.machine_code import disassembly
from fanfold.formats import nvfp4
from fanfold.kernels.nvfp4 import pack, reference, weights
from fanfold.spec import WeightFormat
from graphs import check_replays, same_bits
from samples import numbers

K = 80
EXTREME = (1e-11, 1e11, 3e-36, 1e36)
"""Global scales beyond which sizes are divided, one by one."""


def check(x: Tensor, gs: Tensor | None, device: str, ids: Tensor | None = None, ties: str | None = None) -> None:
    given = [None if tensor is None else tensor.to(device) for tensor in (gs, ids)]
    for found, wanted in zip(
        pack.pack_rows(x.to(device), *given, ties), reference.pack_rows(x, gs, ids, ties), strict=True
    ):
        assert same_bits(found.cpu(), wanted)


@pytest.mark.parametrize("levels", [1, 2])
def test_every_edge_of_codes_and_scales(levels: int, device: str) -> None:
    """One long row each, so that few programs have all groups."""
    codes, scales = rows_with_scale(code_edges()).view(1, -1), rows_of_scales().view(1, -1)
    one = None if levels == 1 else torch.ones(1)
    for ties in ("even", "zero"):
        check(codes, one, device, ties=ties)
    check(scales, one, device)
    if levels == 2:  # steps that are no power of two, a scale of 0, saturation
        for gs in (0.3, 1.7e-3, 1e4, 1e-9, *EXTREME):
            check(codes * gs, torch.full((1,), gs), device)
            check(codes, torch.full((1,), gs), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits(dtype: torch.dtype, device: str) -> None:
    """Among numbers like it, and among all others; NaN and infinity too."""
    numbers = torch.arange(2**16).to(torch.int16).view(dtype)
    mixed = numbers[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    finite = mixed[mixed.isfinite()]
    for x in (numbers, mixed, finite[: len(finite) // 16 * 16]):
        for ties in ("even", "zero"):
            check(x[None], None, device, ties=ties)
            check(x[None], torch.tensor([0.013]), device, ties=ties)
    check(mixed[None], torch.tensor([1e-12]), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_where_no_word_lies(dtype: torch.dtype, device: str) -> None:
    x = awkward_rows(K + 3).to(dtype)
    check(x[:, 1 : K + 1], None, device)
    check(x[:, 2 : K + 2], torch.ones(9), device)
    check(x.flatten()[1 : 1 + 8 * K].view(8, K), torch.ones(8), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_gathered_by_token(dtype: torch.dtype, device: str) -> None:
    x = awkward_rows(K).to(dtype)
    ids = torch.tensor([3, 0, 8, 8, 2, -1, 9], dtype=torch.int32)
    gs = torch.tensor([0.1, 1.0, 3.0, 1e-4, 2.0, 1.0, 1.0])
    check(x, gs, device, ids)
    check(x[:7], gs, device)
    check(x, None, device, ids)
    many = torch.arange(120, dtype=torch.int32) % 11 - 1  # 600 groups: three programs
    check(x, gs[many.long() % 7], device, many)
    wide = torch.cat([x, x], dim=1)
    check(wide[:, :K], None, device)  # rows lie apart
    check(x[:0], None, device)
    for k in (16, 112, 1040, 1168):  # programs of 64, 128 and 256 groups, the last one not full
        row = numbers(3, k, seed=k).half().to(dtype)
        check(row, None, device)
        check(row, gs[:3], device)


def test_nan_and_infinity(device: str) -> None:
    x = torch.ones(4, 32)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = torch.nan, torch.inf, -torch.inf, -torch.nan
    check(x, None, device)
    check(x, torch.ones(4), device)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2])
def test_bf16_and_replays(levels: int) -> None:
    gs = None if levels == 1 else numbers(512, seed=3).abs() / 100
    ids = torch.randint(0, 300, (512,), generator=torch.Generator().manual_seed(1)).int()
    batches = [numbers(300, 4096, seed=seed, dtype=torch.bfloat16) for seed in range(2)]
    for x in batches:
        check(x, gs, "cuda", ids)
    on = [None if tensor is None else tensor.cuda() for tensor in (gs, ids)]
    check_replays(lambda x: pack.pack_rows(x, *on), [[x.cuda()] for x in batches])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4, 48), (72, 208)])
def test_weights_have_the_bits_of_the_format(divisor: bool, transposed: bool, n: int, k: int, device: str) -> None:
    stack = numbers(3, n, k) * torch.tensor([1.0, 30.0, 1e-3])[:, None, None]
    stack[0, 2], stack[1, 0, :16], stack[0, 3, :5] = 0, -0.0, -1e-9
    stack = torch.cat([stack, torch.zeros(1, n, k)]).half()
    packed, scales, global_scales = weights.pack_weights(stack.to(device), divisor=divisor, transposed=transposed)
    fmt = WeightFormat.parse("nvfp4-divisor" if divisor else "nvfp4")
    for expert, weight in enumerate(stack):
        wanted = nvfp4.quantize(fmt, weight.float())
        assert same_bits(packed[expert].cpu(), wanted["packed"])
        assert same_bits((scales[expert].T if transposed else scales[expert]).contiguous().cpu(), wanted["scale"])
        assert global_scales[expert].cpu() == wanted["global_scale"]
    assert len(set(global_scales.tolist())) == 4


@ALL_ARCHS
def test_it_compiles(arch: str) -> None:
    """Activations with one and two levels of scales, by token and of other types, and weights."""
    cases = (
        *((1, False, False, kind) for kind in ("bfloat16", "float16", "float32")),
        *((2, True, False, "bfloat16"), (2, False, False, "bfloat16"), (2, False, True, "bfloat16")),
    )
    for levels, ids, transposed, kind in cases:
        types = {"x_ptr": "*i64" if kind == "float32" else "*i32", "q_ptr": "*i32", "s_ptr": "*u8"}
        types |= dict.fromkeys(("T", "groups", "stride_x"), "i32")
        rows, groups = pack.TILE if transposed else (1, 256)
        constants: dict[str, object] = {"KIND": kind, "TO_EVEN": levels == 2, "DIVIDE": transposed}
        constants |= {"TRANSPOSED": transposed, "NATIVE": int(arch[3:]) >= 89, "BLOCK_R": rows, "BLOCK_G": groups}
        constants |= {"DOWN": 48 if transposed else 1, "ACROSS": 0 if levels == 1 else 16}
        for name, given, kept in (
            ("ids_ptr", "*i32", ids),
            ("gs_ptr", "*fp32", levels == 2),
            ("rows", "i32", transposed),
        ):
            (types if kept else constants)[name] = given if kept else 1 if name == "rows" else None
        case = f"{levels} levels{', by id' if ids else ''}{', transposed' if transposed else ''}, {kind}"
        check_fits(compile_kernel(pack.pack_groups, types, constants, arch, 4, case), arch)


def test_numbers_become_e4m3_one_at_a_time() -> None:
    """Of two in one instruction ptxas 12.8 read the second byte early: half of all codes were wrong on an H200."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(("T", "groups", "stride_x"), "i32")
    types |= {"x_ptr": "*i32", "gs_ptr": "*fp32", "q_ptr": "*i32", "s_ptr": "*u8"}
    constants: dict[str, object] = {"KIND": "bfloat16", "TO_EVEN": True, "DIVIDE": False, "TRANSPOSED": False}
    constants |= {"NATIVE": True, "BLOCK_R": 1, "BLOCK_G": 128, "DOWN": 1, "ACROSS": 1, "rows": 1, "ids_ptr": None}
    names = pack.pack_groups.arg_names
    source = ASTSource(
        fn=pack.pack_groups,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    found = re.findall(r"F2FP\S*E4M3\S* R\d+, (\S+), \S+, (\S+) ;", disassembly(kernel.asm["cubin"]))
    assert len(found) >= 2
    assert set(found) == {("RZ", "RZ")}
