"""Products of packed rows and experts that lie apart: against fp64, rows that are left alone, bits that agree."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_launch
from fanfold.kernels.nvfp4 import launch, pack, reference
from fanfold.kernels.nvfp4.experts import Experts
from fanfold.kernels.nvfp4.experts import product as reference_product
from fanfold.kernels.nvfp4.run import constant, run
from graphs import check_replays, same_bits
from samples import numbers, relative_error

ALPHAS = (1e-3, 0.4, 70.0, 1.5)  # far from each other
OFFSETS = [1, 36, 36, 37, 40]  # one expert with more rows than a tile, one without, one with one


@dataclass
class Case:
    x: Tensor
    ids: Tensor
    experts: Experts
    device: str

    def run(
        self,
        input_scales: list[float] | None = None,
        offsets: list[int] | Tensor | None = None,
        dtype: torch.dtype = torch.float16,
        kernels: bool = True,
        n: int | None = None,
    ) -> Tensor:
        """[40, N] of the group order, 9 where nothing was written."""
        packed = next(tensor for tensor in self.experts.packed if tensor is not None)
        out = torch.full((len(self.ids), n or packed.shape[0]), 9.0, dtype=dtype, device=self.device)
        steps = (pack.pack_rows, launch.product) if kernels else (reference.pack_rows, reference_product)
        offsets = OFFSETS if offsets is None else offsets
        run(*steps, self.x.to(dtype), self.ids, offsets, [self.experts], input_scales, [out])
        return out


def case(device: str, n: int = 40, k: int = 80, swizzled: bool = True, missing: int | None = None) -> Case:
    ids = torch.randint(0, 11, (40,), generator=torch.Generator().manual_seed(1)).int()
    codes: list[Tensor | None] = []
    scales: list[Tensor | None] = []
    for expert in range(4):
        packed, rows = reference.pack_rows(numbers(n, k, seed=expert) * 5)
        codes.append(None if expert == missing else packed.to(device))
        order = reference.swizzle(rows) if swizzled else rows.T.contiguous()
        scales.append(None if expert == missing else order.to(device))
    return Case(
        numbers(11, k, seed=9).to(device), ids.to(device), Experts("up", codes, scales, ALPHAS, swizzled), device
    )


def exact(given: Case, gs: list[float] | None, expert: int) -> Tensor:
    """fp64 of the packed numbers of one expert's rows."""
    start, end = OFFSETS[expert], OFFSETS[expert + 1]
    n, k = len(given.experts.packed[expert]), given.x.shape[1]
    matrix = given.experts.matrix(expert, n, k)
    assert matrix is not None
    rows = given.x.cpu()[given.ids.cpu()[start:end].long()]
    scale = None if gs is None else torch.full((end - start,), gs[expert])
    a = reference.unpack_rows(*reference.pack_rows(rows, scale)).double()
    w = reference.unpack_rows(*(part.cpu() for part in matrix)).double()
    return a @ w.T * ALPHAS[expert] * (1.0 if gs is None else gs[expert])


GS = [[0.01, 0.01, 0.01, 0.01], [0.004, 0.1, 0.002, 0.009], None]


@pytest.mark.parametrize("gs", GS, ids=["alike", "unlike", "one-level"])
def test_against_fp64_with_another_alpha_for_every_expert(gs: list[float] | None, device: str) -> None:
    given = case(device, n=70, k=144) if gs is None else case(device)  # two tiles of outputs, two steps
    out = given.run(gs, dtype=torch.float32)
    assert (out[0] == 9).all()  # before the first offset
    for expert in (0, 2, 3):
        found = out[OFFSETS[expert] : OFFSETS[expert + 1]].cpu()
        wanted = exact(given, gs, expert)
        assert relative_error(found, wanted) < 1e-5
        assert abs(float(found.double().norm() / wanted.norm()) - 1) < 1e-5
    if gs == GS[0]:
        assert relative_error(given.run(gs), given.run(gs, kernels=False)) < 5e-4


def test_experts_elsewhere_and_rows_of_none_are_not_written(device: str) -> None:
    given = case(device, missing=2)
    out = given.run(offsets=[1, 30, 30, 37, 38])
    assert (out[0] == 9).all()
    assert (out[30:37] == 9).all()
    assert (out[38:] == 9).all()
    assert not (out[1:30] == 9).any()


def test_offsets_on_the_device_and_both_orders_of_scales(device: str) -> None:
    given, transposed = case(device), case(device, swizzled=False)
    wanted = given.run()
    assert same_bits(given.run(offsets=torch.tensor(OFFSETS, dtype=torch.int32, device=device)), wanted)
    assert same_bits(transposed.run(), wanted)


def test_a_row_has_the_bits_of_its_expert_alone(device: str) -> None:
    given = case(device)
    wanted = given.run(GS[1])
    for expert in (2, 3):
        alone = Experts("up", *([part[expert]] for part in (given.experts.packed, given.experts.scales)),
                        [ALPHAS[expert]], True)  # fmt: skip
        ids = given.ids[OFFSETS[expert] : OFFSETS[expert + 1]]
        found = Case(given.x, ids, alone, device).run(GS[1][expert : expert + 1], [0, len(ids)])
        assert same_bits(found, wanted[OFFSETS[expert] : OFFSETS[expert + 1]])


def test_c2_input_scales_that_are_missing_or_not_finite_are_made_of_the_rows() -> None:
    given = case("cpu")
    rows = given.ids.long()[OFFSETS[2] : OFFSETS[4]]
    dynamic = float(given.x.half().float()[rows].abs().max() / torch.tensor(2688.0))
    wanted = given.run([0.004, 0.01, dynamic, dynamic], kernels=False)
    for bad in (0.0, torch.inf, torch.nan, -1.0, 1e-50, 1e39):
        out = given.run([0.004, 0.01, bad, bad], kernels=False)
        assert out.isfinite().all()
        assert same_bits(out, wanted)
    # Experts that live elsewhere have no say.
    fewer = case("cpu", missing=0).run([0.0, 0.01, 0.0, 0.0], kernels=False)
    assert same_bits(fewer[36:], wanted[36:])
    assert not same_bits(given.run([0.0, 0.01, 0.0, 0.0], kernels=False)[36:], wanted[36:])


def test_c2_on_the_device(device: str) -> None:
    given, host, gs = case(device), case("cpu"), [0.004, 0.01, 0.0, torch.nan]
    out = given.run(gs).cpu()
    assert out.isfinite().all()
    assert relative_error(out, host.run(gs, kernels=False)) < 5e-4


def test_dynamic_scales_of_zeros_and_infinities_are_1() -> None:
    given = case("cpu")
    for value in (0.0, torch.inf, torch.nan):
        given.x.fill_(value)
        assert same_bits(given.run([0.0] * 4, kernels=False), given.run([1.0] * 4, kernels=False))


def test_c11_small_global_scales_keep_fp16_finite(device: str) -> None:
    given = case(device, n=8, k=512)
    given.x.fill_(6.0)
    for tensor in given.experts.packed:
        assert tensor is not None
        tensor.fill_(0x77)
    experts = Experts("up", given.experts.packed[3:], given.experts.scales[3:], [1e-3], True)
    out = Case(given.x, given.ids[:4], experts, device).run(offsets=[0, 4])
    assert out.isfinite().all()
    assert float(out.min()) > 10


def test_c12_one_output_k_of_16_and_ids_outside(device: str) -> None:
    given = case(device, n=1, k=16)
    given.ids[[3, 4]] = torch.tensor([-1, 11], dtype=torch.int32, device=device)
    out = given.run(dtype=torch.float32)
    assert (out[3:5] == 0).all()
    assert relative_error(out[37:].cpu(), exact(given, None, 3)) < 1e-6
    assert out[5:36].abs().min() > 0


def test_nan_reaches_the_outputs_of_its_row(device: str) -> None:
    given = case(device)
    given.x[3, 5] = torch.nan
    out = given.run()
    at = (given.ids == 3) & (torch.arange(40, device=device) >= 1)
    assert at.any()
    assert out[at].isnan().all()
    assert out[~at].isfinite().all()


@pytest.mark.gpu
def test_bf16_and_a_graph_for_any_routing() -> None:
    given = case("cuda", n=256, k=512)
    offsets = [
        torch.tensor(o, dtype=torch.int32, device="cuda") for o in (OFFSETS, [0, 0, 40, 40, 40], [3, 9, 9, 9, 9])
    ]

    def call(at: Tensor) -> list[Tensor]:
        return [given.run(gs, at, torch.bfloat16) for gs in (None, GS[0], GS[1], [0.0] * 4)]

    check_replays(call, [[at] for at in offsets])
    host = Case(given.x.cpu(), given.ids.cpu(), case("cpu", n=256, k=512).experts, "cpu")
    for gs in (None, GS[0], GS[1]):
        wanted = host.run(gs, dtype=torch.bfloat16, kernels=False)
        assert relative_error(given.run(gs, dtype=torch.bfloat16).cpu(), wanted) < 4e-3


def test_numbers_of_the_host_on_a_cpu() -> None:
    assert constant((1.5, 0.0), torch.float32, torch.device("cpu")).tolist() == [1.5, 0.0]


@ALL_ARCHS
@pytest.mark.parametrize("swizzled", [True, False])
def test_it_compiles(swizzled: bool, arch: str) -> None:
    given = case("cpu", n=64, k=64, swizzled=swizzled)
    packed, scales = reference.pack_rows(given.x)
    out, offsets = torch.zeros(40, 64, dtype=torch.bfloat16), torch.tensor(OFFSETS, dtype=torch.int32)
    arguments = launch.launch_arguments(
        packed, scales, given.ids, offsets, given.experts, torch.ones(4), out, int(arch[3:])
    )
    from fanfold.kernels.nvfp4.product import experts_product

    resources = compile_launch(experts_product, arguments, arch, "swizzled scales" if swizzled else "scales [K/16, N]")
    check_fits(resources, arch)
    assert resources.has_product("OMMA") == (int(arch[3:]) >= launch.BLOCK_SCALED)  # codes and scales as they are
    assert resources.has_product("HMMA.16816") == (int(arch[3:]) < launch.BLOCK_SCALED)
    assert not resources.has_product("HGMMA")  # no operand is in flight while registers change
