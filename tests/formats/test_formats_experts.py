"""Experts that are one Linear each: found, stacked, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import NAMES, random_groups
from small_checkpoints import (
    CONTAINER,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    config_of,
    expert_tensors,
    parts,
    same_bits,
    suffix_of,
    write,
)
from torch import Tensor

from fanfold.errors import FanfoldError, MissingExpertsError, TensorError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize, dequantize_expert
from fanfold.formats.experts import LayerTensors, find_experts
from fanfold.formats.files import CheckpointFiles
from fanfold.formats.matrix import Matrix, read_matrix
from fanfold.spec import WeightFormat
from fanfold.spec.weights import ProjectionWeights

PREFIX = CONTAINER.format(layer=0)
SHORT = [name.replace("g64", "g32") for name in NAMES if "48" not in name]
BF16 = WeightFormat.parse("bf16")
HALVES = ("gate_proj", "up_proj")


def gate_up(folder: Path, fmt: WeightFormat, tensors: dict[str, Tensor], **model: Any) -> ProjectionWeights:
    return Checkpoint(write(folder, tensors, config_of(fmt), **model)).read_experts(0).gate_up


def refusal(folder: Path, kind: type[FanfoldError], fmt: WeightFormat, tensors: dict[str, Tensor], **model: Any) -> str:
    with pytest.raises(kind) as caught:
        gate_up(folder, fmt, tensors, **model)
    return parts(caught.value)


@pytest.mark.parametrize("name", SHORT)
def test_stacks_hold_the_files_tensors_bit_for_bit(tmp_path: Path, name: str):
    fmt = WeightFormat.parse(name)
    tensors = expert_tensors(fmt)
    checkpoint = Checkpoint(write(tmp_path, tensors, config_of(fmt)))
    experts = checkpoint.read_experts(0)
    if fmt.kind == "gptq" and fmt.symmetric:
        fmt = replace(fmt, zero_point="v1")  # the label, of no matter here
    assert (experts.gate_up.format, experts.down.format) == (fmt, fmt)
    assert (experts.gate_up.n, experts.gate_up.k, experts.gate_up.halves) == (INTERMEDIATE, HIDDEN, 2)
    assert (experts.down.n, experts.down.k, experts.down.halves) == (HIDDEN, INTERMEDIATE, 1)
    for projection, halves in ((experts.gate_up, HALVES), (experts.down, ("down_proj",))):
        for e in range(EXPERTS):
            for p, half in enumerate(halves):
                module = f"{PREFIX}.{e}.{half}"
                matrix = projection.matrix(e, p)
                for field, tensor in matrix.items():
                    stored = tensors[f"{module}.{suffix_of(fmt, field)}"]
                    assert same_bits(tensor, stored.reshape(tensor.shape)), (module, field)
                whole = {field: tensors[f"{module}.{suffix_of(fmt, field)}"] for field in matrix}
                expected = dequantize(fmt, whole, projection.n, projection.k)
                assert torch.equal(dequantize_expert(projection, e, p), expected)
    assert experts.nbytes <= 1.02 * checkpoint.expert_bytes()


@pytest.mark.parametrize("name", ["gptq4-g32-v1-actorder", "packed4-g32-actorder"])
def test_act_order_differs_by_expert_and_gate_shares_it_with_up(tmp_path: Path, name: str):
    fmt = WeightFormat.parse(name)
    tensors = expert_tensors(fmt)
    projection = gate_up(tmp_path, fmt, tensors)
    g_idx = projection.tensors["g_idx"]
    assert (g_idx.shape, g_idx.dtype) == ((EXPERTS, 2, HIDDEN), torch.int32)
    assert torch.equal(g_idx[:, 0], g_idx[:, 1])
    assert not torch.equal(g_idx[0], g_idx[1])
    assert g_idx.untyped_storage().nbytes() == EXPERTS * HIDDEN * 4  # once, not twice
    for e in range(EXPERTS):
        assert torch.equal(g_idx[e, 0], tensors[f"{PREFIX}.{e}.gate_proj.{suffix_of(fmt, 'g_idx')}"])


def test_gate_and_up_of_unlike_orders_keep_both(tmp_path: Path):
    fmt = WeightFormat.parse("gptq4-g32-v1-actorder")
    tensors = expert_tensors(fmt)
    other = random_groups(fmt, HIDDEN, seed=77)
    assert other is not None
    tensors[f"{PREFIX}.1.up_proj.g_idx"] = other
    g_idx = gate_up(tmp_path, fmt, tensors).tensors["g_idx"]
    assert torch.equal(g_idx[1, 1], other)
    assert not torch.equal(g_idx[1, 0], other)
    assert g_idx.untyped_storage().nbytes() == EXPERTS * 2 * HIDDEN * 4


def test_an_expert_in_plain_order_among_ordered_ones(tmp_path: Path):
    ordered, plain = WeightFormat.parse("gptq4-g32-v1-actorder"), (torch.arange(HIDDEN) // 32).to(torch.int32)
    tensors = expert_tensors(ordered)
    for half in HALVES:
        tensors[f"{PREFIX}.2.{half}.g_idx"] = plain
    projection = gate_up(tmp_path, ordered, tensors)
    assert projection.format == ordered
    assert torch.equal(projection.tensors["g_idx"][2, 0], plain)
    assert not torch.equal(projection.tensors["g_idx"][0, 0], plain)


@pytest.mark.parametrize("name", ["gptq4-g32-v1", "gptq3-g32-v1", "packed4-g32", "awq4-g32"])
def test_b3_zeros_of_symmetric_weights_are_ignored(tmp_path: Path, name: str):
    fmt = WeightFormat.parse(name)
    tensors = expert_tensors(fmt)
    key = "weight_zero_point" if name.startswith("packed") else "qzeros"
    shapes: dict[str, tuple[int, int]] = {}
    for p, n, k in (("gate_proj", INTERMEDIATE, HIDDEN), ("up_proj", INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, 64)):
        groups, words = k // 32, n * fmt.bits // 32
        shapes[p] = (groups, words) if key == "qzeros" else (words, groups)
    expected = [dequantize_expert(gate_up(tmp_path, fmt, tensors), e, p) for e in range(EXPERTS) for p in (0, 1)]
    generator = torch.Generator().manual_seed(0)
    for e in range(EXPERTS):
        for p, shape in shapes.items():
            words = torch.randint(-(2**31), 2**31, shape, generator=generator)
            tensors[f"{PREFIX}.{e}.{p}.{key}"] = words.to(torch.int32)
    projection = gate_up(tmp_path, fmt, tensors)
    assert key not in projection.tensors
    assert "zero_point" not in projection.tensors
    found = [dequantize_expert(projection, e, p) for e in range(EXPERTS) for p in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor"])
def test_c1_gate_and_up_of_unlike_global_scales(tmp_path: Path, name: str):
    fmt = WeightFormat.parse(name)
    tensors = expert_tensors(fmt)
    key = suffix_of(fmt, "global_scale")
    for e in range(EXPERTS):
        tensors[f"{PREFIX}.{e}.up_proj.{key}"] = 4 * tensors[f"{PREFIX}.{e}.gate_proj.{key}"]
    projection = gate_up(tmp_path, fmt, tensors)
    scales = projection.tensors["global_scale"]
    assert scales.shape == (EXPERTS, 2)
    assert torch.equal(scales[:, 1], 4 * scales[:, 0])
    for e in range(EXPERTS):
        module = f"{PREFIX}.{e}.up_proj"
        whole = {field: tensors[f"{module}.{suffix_of(fmt, field)}"] for field in projection.tensors}
        assert torch.equal(dequantize_expert(projection, e, 1), dequantize(fmt, whole, INTERMEDIATE, HIDDEN))


def test_c2_an_expert_without_input_scale_has_0(tmp_path: Path):
    fmt = WeightFormat.parse("nvfp4")
    for missing in ((0, "gate_proj"), (1, "up_proj"), (2, "down_proj")):
        tensors = expert_tensors(fmt)
        for e in range(EXPERTS):
            for p in (*HALVES, "down_proj"):
                if (e, p) != missing:
                    tensors[f"{PREFIX}.{e}.{p}.input_scale"] = torch.tensor(0.5 + e)
        experts = Checkpoint(write(tmp_path, tensors, config_of(fmt))).read_experts(0)
        expected = torch.tensor([[0.5, 0.5], [1.5, 1.5], [2.5, 2.5]])
        down = expected[:, :1].clone()
        if missing[1] == "down_proj":
            down[2] = 0
        else:
            expected[missing[0], HALVES.index(missing[1])] = 0
        assert torch.equal(experts.gate_up.tensors["input_scale"], expected)
        assert torch.equal(experts.down.tensors["input_scale"], down)


def test_biases(tmp_path: Path):
    tensors = expert_tensors(BF16)
    for e in range(EXPERTS):
        for at, (p, n) in enumerate((("gate_proj", INTERMEDIATE), ("up_proj", INTERMEDIATE), ("down_proj", HIDDEN))):
            tensors[f"{PREFIX}.{e}.{p}.bias"] = torch.full((n,), 10.0 * e + at, dtype=torch.bfloat16)
    experts = Checkpoint(write(tmp_path, tensors)).read_experts(0)
    assert experts.gate_up.bias is not None
    assert experts.down.bias is not None
    assert experts.gate_up.bias.shape == (EXPERTS, 2, INTERMEDIATE)
    assert experts.gate_up.bias[2, 1].unique().tolist() == [21.0]
    assert experts.down.bias[1, 0].unique().tolist() == [12.0]

    up = f"{PREFIX}.1.up_proj.bias"
    text = refusal(tmp_path, MissingExpertsError, BF16, {name: t for name, t in tensors.items() if name != up})
    assert f"{up}: found no such tensor; expected a bias, as other experts of the layer have one" in text
    text = refusal(tmp_path, TensorError, BF16, {**tensors, up: tensors[up].float()})
    assert f"{up}: found float32; expected bfloat16, as {PREFIX}.0.gate_proj.bias has" in text
    text = refusal(tmp_path, TensorError, BF16, {**tensors, up: tensors[up] * float("nan")})
    assert f"{up}: found 64 values that are NaN or infinite; expected finite numbers" in text


def test_an_expert_is_missing(tmp_path: Path):
    tensors = {name: t for name, t in expert_tensors(BF16).items() if ".1." not in name}
    text = refusal(tmp_path, MissingExpertsError, BF16, tensors)
    assert f"{PREFIX}: found no 1.gate, 1.up; expected gate and up of all 3 experts" in text
    assert "Experts are never filled with random weights." in text


def test_many_experts_are_missing_at_once(tmp_path: Path):
    for count, more in ((64, 118), (10**12, 2 * 10**12 - 10)):
        text = refusal(tmp_path, MissingExpertsError, BF16, expert_tensors(BF16), num_experts=count)
        assert f"found no 3.gate, 3.up, 4.gate, 4.up and {more} more; expected gate and up of all {count}" in text


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_one_projection_of_an_expert_is_missing(tmp_path: Path, name: str):
    fmt = WeightFormat.parse("nvfp4")
    tensors = {key: t for key, t in expert_tensors(fmt).items() if f".2.{name}" not in key}
    text = refusal(tmp_path, MissingExpertsError, fmt, tensors)
    assert f"found no 2.{name.removesuffix('_proj')}; expected" in text


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_one_projection_of_all_experts_is_missing(tmp_path: Path, name: str):
    tensors = {key: t for key, t in expert_tensors(BF16).items() if name not in key}
    text = refusal(tmp_path, MissingExpertsError, BF16, tensors)
    short = name.removesuffix("_proj")
    assert f"found no 0.{short}, 1.{short}, 2.{short}; expected" in text


def test_one_expert_too_many(tmp_path: Path):
    text = refusal(tmp_path, TensorError, BF16, expert_tensors(BF16, experts=4))
    assert f"{PREFIX}.3: found an expert number of 3; expected numbers below 3, the experts that config.json" in text


def test_without_a_number_in_the_config_the_file_tells(tmp_path: Path):
    projection = gate_up(tmp_path, BF16, expert_tensors(BF16, experts=5), num_experts=None)
    assert projection.num_experts == 5
    tensors = {name: t for name, t in expert_tensors(BF16, experts=5).items() if ".3." not in name}
    assert "found no 3.gate, 3.up" in refusal(tmp_path, MissingExpertsError, BF16, tensors, num_experts=None)


def test_b14_experts_of_unlike_formats(tmp_path: Path):
    packed = WeightFormat.parse("gptq4-g32-v1")
    tensors = expert_tensors(packed)
    for name in ("gate_proj", "up_proj", "down_proj"):
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[f"{PREFIX}.1.{name}.{suffix}"]
        shape = (HIDDEN, INTERMEDIATE) if name == "down_proj" else (INTERMEDIATE, HIDDEN)
        tensors[f"{PREFIX}.1.{name}.weight"] = torch.zeros(shape, dtype=torch.float16)
    config = {**(config_of(packed) or {}), "dynamic": {r"-:.*experts\.1\.": {}}}
    with pytest.raises(TensorError) as caught:
        Checkpoint(write(tmp_path, tensors, config)).read_experts(0)
    text = parts(caught.value)
    assert f"{PREFIX}.1.gate_proj: found fp16 [64, 96]; expected gptq4-g32-v1 [64, 96], as {PREFIX}.0.gate_proj" in text


def test_b14_a_scale_of_other_groups_is_never_inferred(tmp_path: Path):
    fmt = WeightFormat.parse("gptq4-g32-v1")
    tensors = expert_tensors(fmt)
    tensors[f"{PREFIX}.1.up_proj.scales"] = tensors[f"{PREFIX}.1.up_proj.scales"].repeat_interleave(2, 0)
    text = refusal(tmp_path, TensorError, fmt, tensors)
    assert f"{PREFIX}.1.up_proj.scales: found shape [6, 64]; expected shape [3, 64] for gptq4-g32-v1" in text


def test_experts_of_unlike_sizes_and_dtypes(tmp_path: Path):
    tensors = expert_tensors(BF16)
    tensors[f"{PREFIX}.1.up_proj.weight"] = torch.zeros(16, HIDDEN, dtype=torch.bfloat16)
    assert "1.up_proj: found bf16 [16, 96]; expected bf16 [64, 96]" in refusal(tmp_path, TensorError, BF16, tensors)
    fmt = WeightFormat.parse("gptq4-g32-v1")
    tensors = expert_tensors(fmt)
    key = f"{PREFIX}.2.up_proj.scales"
    tensors[key] = tensors[key].to(torch.bfloat16)
    text = refusal(tmp_path, TensorError, fmt, tensors)
    assert f"{PREFIX}.2.up_proj: scales: found bfloat16; expected float16, as {PREFIX}.0.gate_proj has" in text


def test_b17_and_other_widths_by_projection(tmp_path: Path):
    """8-bit down beside 4-bit gate and up, as GPTQ's `dynamic` allows."""
    four, eight = WeightFormat.parse("gptq4-g32-v1"), WeightFormat.parse("gptq8-channel-v1")
    tensors = {name: t for name, t in expert_tensors(four).items() if "down_proj" not in name}
    tensors |= {name: t for name, t in expert_tensors(eight).items() if "down_proj" in name}
    config = {**(config_of(four) or {}), "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": -1}}}
    checkpoint = Checkpoint(write(tmp_path, tensors, config))
    experts = checkpoint.read_experts(0)
    assert (experts.gate_up.format, experts.down.format) == (four, eight)
    described = checkpoint.describe(0)
    assert (described["gate_up"].format, described["down"].format) == (four, eight)


def test_beside_the_stack_one_matrix_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every matrix that was read is gone before the next one is."""
    import weakref

    fmt = WeightFormat.parse("gptq4-g32-v1")
    files = CheckpointFiles(write(tmp_path, expert_tensors(fmt), config_of(fmt)))
    alive: list[weakref.ref[Tensor]] = []
    largest = 0

    def watched(files: CheckpointFiles, matrix: Matrix) -> tuple[WeightFormat, dict[str, Tensor]]:
        nonlocal largest
        largest = max(largest, sum(reference() is not None for reference in alive))
        found, tensors = read_matrix(files, matrix)
        alive.extend(weakref.ref(tensor) for tensor in tensors.values())
        return found, tensors

    layer = LayerTensors(PREFIX, 0)
    for name in files.infos:
        expert, projection, suffix = name.removeprefix(PREFIX + ".").split(".")
        key = (projection.removesuffix("_proj"), int(expert))
        layer.per_expert.setdefault(key, {})[suffix] = name
    found = find_experts(files, lambda module: fmt, layer, ("gate", "up"), EXPERTS)
    monkeypatch.setattr("fanfold.formats.experts.read_matrix", watched)
    found.read(files)
    assert len(alive) == EXPERTS * 2 * 3
    assert largest <= 3  # the fields of the matrix read last


def test_names_and_projections_of_a_layer():
    layer = LayerTensors("c", 0)
    layer.per_expert["up", 0] = {"weight": "c.0.up_proj.weight"}
    assert (layer.projections, layer.gated, list(layer.names())) == ({"up"}, False, ["c.0.up_proj.weight"])
    layer.per_expert["gate", 0] = {"weight": "c.0.gate_proj.weight"}
    assert layer.gated


@pytest.mark.parametrize(
    ("name", "n", "k"),
    [
        *[(f"gptq4-g{size}-v1", 64, 1344) for size in (16, 32, 64, 128)],  # b6, b9, b11: 1344 = 10.5 x 128
        ("gptq8-g128-asym-v2", 64, 1344),  # b16, b17
        ("packed4-g128-asym", 352, 160),  # b16
        ("awq4-g64-asym", 80, 352),
        *[("nvfp4", size, 96) for size in (80, 160, 352)],  # c6, c8
        ("mxfp4", 160, 96),
        ("fp8-block128x128", 320, 192),  # d16
        ("fp8-block128x128", 704, 96),
    ],
)
def test_b6_b11_b16_b17_c6_c8_d16_sizes_that_fill_no_tile(tmp_path: Path, name: str, n: int, k: int):
    """Nothing is padded, and a last group or block may be short."""
    fmt = WeightFormat.parse(name)
    sizes = {"gate_proj": (n, k), "up_proj": (n, k), "down_proj": (k, n)}
    tensors = expert_tensors(fmt, experts=2, names=sizes)
    checkpoint = Checkpoint(write(tmp_path, tensors, config_of(fmt), hidden_size=k, num_experts=2))
    experts = checkpoint.read_experts(0)
    assert (experts.gate_up.n, experts.gate_up.k, experts.down.n, experts.down.k) == (n, k, k, n)
    assert experts.nbytes <= 1.02 * checkpoint.expert_bytes()
    for e in range(2):
        for half, projection, p in (
            ("gate_proj", experts.gate_up, 0),
            ("up_proj", experts.gate_up, 1),
            ("down_proj", experts.down, 0),
        ):
            module = f"{PREFIX}.{e}.{half}"
            whole = {field: tensors[f"{module}.{suffix_of(fmt, field)}"] for field in projection.tensors}
            assert torch.equal(dequantize_expert(projection, e, p), dequantize(fmt, whole, *sizes[half]))
