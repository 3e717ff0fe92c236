"""Faults of other systems that show in a whole expert layer. The ids are those of the project's list of faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fanfold import Experts
from fanfold.formats import codec
from fanfold.formats.stack import stack
from fanfold.layers.reference import LayerPairs, layer
from fanfold.spec import ExpertWeights, LoraPair, WeightFormat
from fanfold.spec.weights import ProjectionWeights
from samples import (
    SILU,
    dense,
    numbers,
    random_experts,
    random_pairs,
    random_projection,
    random_routing,
    relative_error,
)

E, H, INNER, T, K = 6, 64, 32, 19, 2


def given(tokens: int = T, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(tokens, H, dtype=dtype), *random_routing(tokens, K, E)


def slots(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).repeat(T)[:T]


def dequantised(weights: ExpertWeights) -> ExpertWeights:
    up, down = dense(weights)
    fmt = WeightFormat.parse("fp32")
    shape = weights.shape
    return ExpertWeights(
        ProjectionWeights(fmt, shape.intermediate, shape.hidden, {"weight": up}),
        ProjectionWeights(fmt, shape.hidden, shape.intermediate, {"weight": down[:, None]}),
    )


def assert_runs_as_dequantised(weights: ExpertWeights, dtype: torch.dtype = torch.float32) -> None:
    x, ids, scores = given(dtype=dtype)
    found = layer(x, ids, scores, weights, SILU)
    assert torch.equal(found, layer(x, ids, scores, dequantised(weights), SILU))
    assert found.float().std() > 0


def test_a1_ids_left_in_a_buffer_do_not_matter() -> None:
    weights = random_experts("gptq4-g32", E, H, INNER)
    pairs, buffer, (x, ids, scores) = random_pairs(weights, 1), slots(0), given()
    base = layer(x, ids, scores, weights, SILU)
    assert not torch.isclose(layer(x, ids, scores, weights, SILU, pairs, buffer), base).all(-1).any()
    buffer.fill_(-1)
    assert torch.equal(layer(x, ids, scores, weights, SILU, pairs, buffer), base)


def test_a2_loaded_adapters_that_nobody_uses_change_nothing() -> None:
    experts = Experts(random_experts("gptq4-g32", E, H, INNER), SILU, dtype=torch.bfloat16)
    batch = given(dtype=torch.bfloat16)
    base = experts(*batch)
    experts.pairs = {name: dict(of) for name, of in random_pairs(experts.weights, 4, dtype=torch.bfloat16).items()}
    assert torch.equal(experts(*batch), base)
    assert torch.equal(experts(*batch, adapter_ids=slots(-1)), base)


@pytest.mark.parametrize("capacity", [1, 4])
def test_a3_a4_all_slots_and_the_base_in_one_batch(capacity: int) -> None:
    weights = random_experts("bf16", E, H, INNER)
    pairs, (x, ids, scores) = random_pairs(weights, capacity), given()
    mixed = slots(*range(-1, capacity))
    found = layer(x, ids, scores, weights, SILU, pairs, mixed)
    base = layer(x, ids, scores, weights, SILU)
    assert torch.equal(found[mixed < 0], base[mixed < 0])
    assert not torch.isclose(found, base).all(-1)[mixed >= 0].any()
    for slot in range(capacity):
        alone = layer(x, ids, scores, weights, SILU, pairs, slots(slot))
        assert torch.equal(found[mixed == slot], alone[mixed == slot])


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block32x32"])
def test_a8_a9_deltas_of_an_fp8_base_read_unquantised_bf16_activations(name: str) -> None:
    """As on the same weights kept dense, for x far from FP8's range."""
    weights = random_experts(name, E, H, INNER)
    pairs = random_pairs(weights, 1, dtype=torch.bfloat16)
    x, ids, scores = given(dtype=torch.bfloat16)
    far = 300 * x
    same = dequantised(weights)
    found = layer(far, ids, scores, weights, SILU, pairs, slots(0))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, layer(far, ids, scores, same, SILU, pairs, slots(0)))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 12, 16, 24, 48, 64, 100, 128, 256, 320, 512])
def test_a10_a12_any_rank_beside_others(rank: int) -> None:
    weights = random_experts("bf16", E, H, INNER)
    one = random_pairs(weights, 1, ranks=(rank,))
    both: LayerPairs = {name: {**random_pairs(weights, 2)[name], **one[name]} for name in one}
    up, down = dense(weights)
    for e in range(E):
        for half, name in enumerate(("gate", "up")):
            up[e, half] += one[name][0, e].scale * one[name][0, e].b @ one[name][0, e].a
        down[e] += one["down"][0, e].scale * one["down"][0, e].b @ one["down"][0, e].a
    fmt = WeightFormat.parse("fp32")
    merged = ExpertWeights(
        ProjectionWeights(fmt, INNER, H, {"weight": up}), ProjectionWeights(fmt, H, INNER, {"weight": down[:, None]})
    )
    x, ids, scores = given()
    mixed = slots(0, 1)
    found = layer(x, ids, scores, weights, SILU, both, mixed)
    assert relative_error(found[mixed == 0], layer(x, ids, scores, merged, SILU)[mixed == 0]) <= 1e-6


def test_a15_a16_up_has_its_own_a_and_its_own_place() -> None:
    """A pair of gate alone and one of up alone, alike in all, give unlike results, each that of its merged half."""
    weights = random_experts("bf16", E, H, INNER)
    pair = random_pairs(weights, 1)["gate"][0, 0]
    x, scores = numbers(T, H), torch.ones(T, 1)
    ids = torch.zeros(T, 1).long()
    for half, name in enumerate(("gate", "up")):
        up, down = dense(weights)
        up[0, half] += pair.scale * pair.b @ pair.a
        fmt = WeightFormat.parse("fp32")
        merged = ExpertWeights(
            ProjectionWeights(fmt, INNER, H, {"weight": up}),
            ProjectionWeights(fmt, H, INNER, {"weight": down[:, None]}),
        )
        found = layer(x, ids, scores, weights, SILU, {name: {(0, 0): pair}}, slots(0))
        assert relative_error(found, layer(x, ids, scores, merged, SILU)) <= 1e-6


def test_a17_a18_b20_ids_of_another_rank_fold_nothing_in_any_slot() -> None:
    weights = random_experts("gptq4-g32", E, H, INNER)
    pairs, (x, ids, scores) = random_pairs(weights, 3), given()
    ids[::2, 0], ids[1::3, 1] = -1, E
    here = (ids >= 0) & (ids < E)
    found = layer(x, ids, scores, weights, SILU, pairs, slots(2, 1, -1, 0))
    elsewhere = torch.where(here, ids, 0)
    expected = layer(x, elsewhere, torch.where(here, scores, 0.0), weights, SILU, pairs, slots(2, 1, -1, 0))
    assert torch.equal(found, expected)


def test_a18_slots_outside_are_the_base() -> None:
    weights = random_experts("bf16", E, H, INNER)
    pairs, (x, ids, scores) = random_pairs(weights, 2), given()
    base = layer(x, ids, scores, weights, SILU)
    assert torch.equal(layer(x, ids, scores, weights, SILU, pairs, slots(2, -5, 2**31 - 1, -(2**31))), base)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a21_an_adapter_of_one_projection_of_one_expert(name: str) -> None:
    weights = random_experts("gptq4-g32", E, H, INNER)
    only: dict[str, dict[tuple[int, int], LoraPair]] = {name: {(0, 3): random_pairs(weights, 1)[name][0, 3]}}
    x, ids, scores = given()
    base, found = (layer(x, ids, scores, weights, SILU, only, it) for it in (None, slots(0)))
    touched = (ids == 3).any(-1)
    assert 0 < touched.sum() < T
    assert torch.equal(found[~touched], base[~touched])
    assert not torch.isclose(found[touched], base[touched]).all(-1).any()


def test_a30_fifty_runs_have_the_same_bits() -> None:
    weights = random_experts("nvfp4", E, H, INNER)
    pairs, (x, ids, scores) = random_pairs(weights, 2, dtype=torch.bfloat16), given(dtype=torch.bfloat16)
    first = layer(x, ids, scores, weights, SILU, pairs, slots(0, -1, 1))
    assert all(torch.equal(layer(x, ids, scores, weights, SILU, pairs, slots(0, -1, 1)), first) for _ in range(50))


def test_b7_rows_that_fill_no_block() -> None:
    """17 tokens, one expert each of 8, blocks of 16."""
    weights = random_experts("gptq4-g32", 8, H, INNER)
    x, ids = numbers(17, H), (torch.arange(17) % 8)[:, None]
    found = layer(x, ids, torch.ones(17, 1), weights, SILU)
    for token in range(17):
        assert torch.equal(found[token], layer(x[[token]], ids[[token]], torch.ones(1, 1), weights, SILU)[0])


@pytest.mark.parametrize(
    "name",
    [
        "gptq4-g32-asym-v1",  # B1, B16
        "gptq4-g32-asym-v2",
        "gptq4-channel-v1",  # B4
        "gptq8-channel-v1",  # B4, B17
        "gptq8-g32-v1",
        "gptq4-g64-v1",  # B11
        "gptq4-g64-v1-actorder",
        "packed8-channel",
        "awq4-g32-asym",
    ],
)
def test_b1_b4_b11_b16_b17_layers_run_as_their_dequantised_weights(name: str) -> None:
    assert_runs_as_dequantised(random_experts(name, E, H, 128))


def test_b3_zeros_of_symmetric_files_are_ignored() -> None:
    weights = random_experts("gptq4-g32-v1", E, H, INNER)
    x, ids, scores = given()
    base = layer(x, ids, scores, weights, SILU)
    fields = dict(weights.down.tensors)
    fields["qzeros"] = torch.full((E, 1, 1, H // 8), 0x1234567, dtype=torch.int32)
    changed = ExpertWeights(weights.gate_up, replace(weights.down, tensors=fields))
    assert torch.equal(layer(x, ids, scores, changed, SILU), base)


def test_b9_neighbouring_groups_with_scales_ten_times_apart() -> None:
    weights = random_experts("gptq4-g32-v1", E, 128, 64)
    scales = weights.gate_up.tensors["scales"]
    scales[:, :, 1::2] *= 10
    x, (ids, scores) = numbers(T, 128), random_routing(T, K, E)
    found = layer(x, ids, scores, weights, SILU)
    assert torch.equal(found, layer(x, ids, scores, dequantised(weights), SILU))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor"])
def test_c1_gate_and_up_of_unlike_global_scales(name: str) -> None:
    weights = random_experts(name, E, H, INNER)
    gate, up = weights.gate_up.tensors["global_scale"].unbind(1)
    assert (gate != up).any()
    assert_runs_as_dequantised(weights)
    # scaling up's global scale alone scales the output
    x, ids, scores = given()
    before = layer(x, ids, scores, weights, SILU)
    weights.gate_up.tensors["global_scale"][:, 1] *= 4 if name == "nvfp4" else 0.25
    assert torch.equal(layer(x, ids, scores, weights, SILU), 4 * before)


def test_c2_an_input_scale_of_zero_does_not_reach_a_weight_only_layer() -> None:
    weights = random_experts("nvfp4", E, H, INNER)
    fields = {**weights.down.tensors, "input_scale": torch.zeros(E, 1)}
    changed = ExpertWeights(weights.gate_up, replace(weights.down, tensors=fields))
    x, ids, scores = given()
    assert torch.equal(layer(x, ids, scores, changed, SILU), layer(x, ids, scores, weights, SILU))


def test_c4_both_conventions_of_the_global_scale() -> None:
    """A power of two, so that dividing by 1/s and multiplying by s are the same to the bit."""
    multiplied = random_experts("nvfp4", E, H, INNER)
    halves: list[ProjectionWeights] = []
    for projection in (multiplied.gate_up, multiplied.down):
        projection.tensors["global_scale"].fill_(2.0**-9)
        fields = {**projection.tensors, "global_scale": torch.full_like(projection.tensors["global_scale"], 2.0**9)}
        halves.append(ProjectionWeights(WeightFormat.parse("nvfp4-divisor"), projection.n, projection.k, fields))
    x, ids, scores = given()
    divided = layer(x, ids, scores, ExpertWeights(halves[0], halves[1]), SILU)
    assert torch.equal(divided, layer(x, ids, scores, multiplied, SILU))
    assert divided.std() > 0


@pytest.mark.parametrize("inner", [352, 160, 80])
@pytest.mark.parametrize("name", ["nvfp4", "fp8-block128x128", "gptq4-g16-v1"])
def test_c6_c8_halves_of_odd_sizes(name: str, inner: int) -> None:
    assert_runs_as_dequantised(random_experts(name, E, H, inner))


def test_c11_small_global_scales_in_fp16() -> None:
    """Codes times block scales beyond 65504, brought back by the global scale."""
    fmt = WeightFormat.parse("nvfp4")
    rows = [[codec.quantize(fmt, numbers(INNER, H, seed=e * 2 + p)) for p in range(2)] for e in range(E)]
    for row in rows:
        for matrix in row:
            matrix["scale"] = torch.full_like(matrix["scale"].float(), 448.0).to(torch.float8_e4m3fn)
            matrix["global_scale"].fill_(1e-5)
    weights = ExpertWeights(stack(fmt, rows, n=INNER, k=H), random_projection("nvfp4", E, 1, H, INNER))
    x, ids, scores = given(dtype=torch.float16)
    found = layer(100 * x, ids, scores, weights, SILU)
    assert bool(torch.isfinite(found).all())
    assert relative_error(found, layer(100 * x.float(), ids, scores, weights, SILU)) <= 2e-3


def test_c15_experts_without_rows_write_nothing() -> None:
    """256 experts, three tokens, memory full of NaN."""
    weights = random_experts("mxfp4", 256, 32, 32)
    ids = torch.tensor([[0, 255], [7, 8], [255, 0]])
    scores = torch.full((3, 2), 0.5)
    dirt = [torch.full((3 * 2, size), float("nan")) for size in (32, 64, 32)]
    del dirt
    found = layer(numbers(3, 32), ids, scores, weights, SILU)
    assert bool(torch.isfinite(found).all())
    swapped = layer(numbers(3, 32), ids.flip(1), scores, weights, SILU)
    torch.testing.assert_close(found, swapped)


@pytest.mark.parametrize("experts", [1023, 1024, 1025, 2048])
def test_d1_d3_more_than_1024_experts(experts: int) -> None:
    weights = random_experts("fp8-tensor", experts, 16, 16)
    ids = torch.tensor([[0, experts - 1], [experts // 2, 1]])
    x, scores = numbers(2, 16), torch.full((2, 2), 0.5)
    found = layer(x, ids, scores, weights, SILU)
    few = [0, 1, experts // 2, experts - 1]
    kept = ExpertWeights(
        *(replace(p, tensors={name: t[few] for name, t in p.tensors.items()}) for p in (weights.gate_up, weights.down))
    )
    assert torch.equal(found, layer(x, torch.tensor([[0, 3], [2, 1]]), scores, kept, SILU))


def test_d10_nothing_to_do_in_every_way() -> None:
    experts = Experts(random_experts("gptq4-g32", E, H, INNER), SILU, dtype=torch.float32)
    experts.put(0, {})
    x, ids, scores = given()
    assert experts(x[:0], ids[:0], scores[:0], slots(0)[:0]).shape == (0, H)
    assert torch.equal(experts(x, torch.full_like(ids, -1), scores, slots(0)), torch.zeros(T, H))
    assert torch.equal(experts(x, ids, scores, slots(0)), experts(x, ids, scores))


@pytest.mark.parametrize("inner", [192, 320, 704])
def test_d16_fp8_blocks_that_do_not_divide(inner: int) -> None:
    weights = random_experts("fp8-block128x128", 2, 192, inner)
    assert weights.gate_up.tensors["scale"].shape == (2, 2, -(-inner // 128), 2)
    x, (ids, scores) = numbers(5, 192), random_routing(5, 1, 2)
    assert torch.equal(layer(x, ids, scores, weights, SILU), layer(x, ids, scores, dequantised(weights), SILU))
