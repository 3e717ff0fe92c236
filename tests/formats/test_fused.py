"""Experts of which one tensor holds all: every layout, small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, parts, same_bits, write
from torch import Tensor

from fanfold.errors import ConfigError, FanfoldError, MissingExpertsError, TensorError, UnsupportedError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize_expert, quantize
from fanfold.formats.files import CheckpointFiles
from fanfold.spec import ExpertWeights, WeightFormat

PREFIX = "model.layers.0.mlp.experts"
GRANITE = "model.layers.0.block_sparse_moe"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


GATE, UP, DOWN = (
    numbers(EXPERTS, *shape, seed=seed).to(torch.bfloat16)
    for seed, shape in enumerate([(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)])
)
GATE_UP = torch.cat((GATE, UP), dim=1)
INTERLEAVED = torch.stack((GATE, UP), dim=2).flatten(1, 2)
FUSED = {f"{PREFIX}.gate_up_proj": GATE_UP, f"{PREFIX}.down_proj": DOWN}


def read(folder: Path, tensors: dict[str, Tensor], quantization: Any = None, **model: Any) -> ExpertWeights:
    return Checkpoint(write(folder, tensors, quantization, **model)).read_experts(0)


def refusal(
    folder: Path, kind: type[FanfoldError], tensors: dict[str, Tensor], quantization: Any = None, **model: Any
) -> str:
    with pytest.raises(kind) as caught:
        read(folder, tensors, quantization, **model)
    with pytest.raises(kind):
        Checkpoint(folder).describe(0)
    return parts(caught.value)


def assert_dense(experts: ExpertWeights, gate: Tensor = GATE, up: Tensor = UP, down: Tensor = DOWN) -> None:
    assert same_bits(experts.gate_up.tensors["weight"], torch.stack((gate, up), dim=1))
    assert same_bits(experts.down.tensors["weight"], down.unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dot", ["", ".weight"])
def test_dense(tmp_path: Path, dtype: torch.dtype, dot: str):
    experts = read(tmp_path, {name + dot: tensor.to(dtype) for name, tensor in FUSED.items()})
    assert_dense(experts, GATE.to(dtype), UP.to(dtype), DOWN.to(dtype))
    assert experts.gate_up.format.name == {2: "bf16", 4: "fp32"}[dtype.itemsize].replace(
        "bf16", "fp16" if dtype == torch.float16 else "bf16"
    )
    assert experts.nbytes == sum(tensor.nbytes for tensor in FUSED.values()) * dtype.itemsize // 2


@pytest.mark.parametrize("model_type", ["llama4_text", "aria_text"])
def test_transposed(tmp_path: Path, model_type: str):
    tensors = {name: tensor.transpose(1, 2) for name, tensor in FUSED.items()}
    assert_dense(read(tmp_path, tensors, model_type=model_type))
    text = refusal(tmp_path, TensorError, tensors)
    assert "gate_up_proj: found shape [3, 96, 128], so H = 128; expected H = 96, stored (E, outputs, inputs)" in text
    assert "Another storage order is never guessed from shapes" in text
    text = refusal(tmp_path, TensorError, FUSED, model_type=model_type)
    assert "so H = 128; expected H = 96, stored (E, inputs, outputs)" in text


def test_families_that_are_met_in_either_order(tmp_path: Path):
    turned = {name: tensor.transpose(1, 2) for name, tensor in FUSED.items()}
    for model_type in ("qwen3_vl_moe", "qwen3_vl_moe_text"):
        assert_dense(read(tmp_path, turned, model_type=model_type))
        assert_dense(read(tmp_path, FUSED, model_type=model_type))
        for hidden in (None, 80):
            text = refusal(tmp_path, TensorError, FUSED, model_type=model_type, hidden_size=hidden)
            assert f"gate_up_proj: found shape [3, 128, 96]; expected H = {hidden} on one of the last two axes" in text
        square = {
            f"{PREFIX}.gate_up_proj": numbers(EXPERTS, 128, 128),
            f"{PREFIX}.down_proj": numbers(EXPERTS, 128, 64),
        }
        text = refusal(tmp_path, TensorError, square, model_type=model_type, hidden_size=128)
        assert "found shape [3, 128, 128]; expected H = 128 on one of the last two axes and not on the other" in text


def test_of_two_orders_that_fit_the_family_decides(tmp_path: Path):
    """H = 2 I: both shapes are alike."""
    square = numbers(EXPERTS, 128, 128)
    down = numbers(EXPERTS, 128, 64)
    tensors = {f"{PREFIX}.gate_up_proj": square, f"{PREFIX}.down_proj": down}
    plain = read(tmp_path, tensors, hidden_size=128, moe_intermediate_size=64)
    assert torch.equal(plain.gate_up.tensors["weight"][1, 1], square[1, 64:])
    tensors[f"{PREFIX}.down_proj"] = down.transpose(1, 2)
    turned = read(tmp_path, tensors, hidden_size=128, moe_intermediate_size=64, model_type="llama4_text")
    assert torch.equal(turned.gate_up.tensors["weight"][1, 1], square[1, :, 64:].T)


def test_gpt_oss_dense_interleaved_with_biases(tmp_path: Path):
    tensors = {
        f"{PREFIX}.gate_up_proj": INTERLEAVED.transpose(1, 2),
        f"{PREFIX}.gate_up_proj_bias": numbers(EXPERTS, 2 * INTERMEDIATE, seed=4).to(torch.bfloat16),
        f"{PREFIX}.down_proj": DOWN.transpose(1, 2),
        f"{PREFIX}.down_proj_bias": numbers(EXPERTS, HIDDEN, seed=5).to(torch.bfloat16),
    }
    experts = read(tmp_path, tensors, model_type="gpt_oss")
    assert_dense(experts)
    bias, down_bias = tensors[f"{PREFIX}.gate_up_proj_bias"], tensors[f"{PREFIX}.down_proj_bias"]
    assert experts.gate_up.bias is not None
    assert experts.down.bias is not None
    assert same_bits(experts.gate_up.bias, torch.stack((bias[:, 0::2], bias[:, 1::2]), dim=1))
    assert same_bits(experts.down.bias, down_bias.unsqueeze(1))


def test_granite(tmp_path: Path):
    tensors = {f"{GRANITE}.input_linear.weight": GATE_UP, f"{GRANITE}.output_linear.weight": DOWN}
    assert_dense(read(tmp_path, tensors, model_type="granitemoe", num_experts=None, num_local_experts=EXPERTS))


@pytest.mark.parametrize("per_expert", [False, True])
def test_nemotron_h_has_no_gate(tmp_path: Path, per_expert: bool):
    container = "backbone.layers.4.mixer.experts"
    tensors = {f"{container}.up_proj": UP, f"{container}.down_proj": DOWN}
    if per_expert:
        tensors = {
            f"{container}.{e}.{name}_proj.weight": tensor[e]
            for e in range(EXPERTS)
            for name, tensor in (("up", UP), ("down", DOWN))
        }
    checkpoint = Checkpoint(write(tmp_path, tensors, model_type="nemotron_h", mlp_hidden_act="relu2"))
    experts = checkpoint.read_experts(4)
    assert experts.gate_up.halves == 1
    assert not experts.shape.gated
    assert not checkpoint.layer(4).gated
    assert not checkpoint.config.activation.gated
    assert same_bits(experts.gate_up.tensors["weight"], UP.unsqueeze(1))
    assert checkpoint.describe(4)["gate_up"].halves == 1


def fp8_halves(block: tuple[int, int], n: int, k: int, seed: int) -> list[dict[str, Tensor]]:
    fmt = WeightFormat("fp8", 8, block=block)
    return [quantize(fmt, 0.1 * numbers(n, k, seed=seed + e)) for e in range(EXPERTS)]


def fp8_fused(block: tuple[int, int], n: int) -> dict[str, Tensor]:
    """gate_up quantised half by half, then put together; down."""
    gate, up = fp8_halves(block, n, HIDDEN, 0), fp8_halves(block, n, HIDDEN, 100)
    down = fp8_halves(block, HIDDEN, n, 200)
    tensors: dict[str, Tensor] = {}
    for field, suffix in (("weight", ""), ("scale", "_scale_inv")):
        both = [
            torch.cat((g[field].view(-1, g[field].shape[-1]), u[field].view(-1, u[field].shape[-1])))
            for g, u in zip(gate, up, strict=True)
        ]
        tensors[f"{PREFIX}.gate_up_proj{suffix}"] = torch.stack(both)
        tensors[f"{PREFIX}.down_proj{suffix}"] = torch.stack([d[field] for d in down])
    return tensors


@pytest.mark.parametrize(
    ("block", "n", "rows"),
    [((32, 32), 64, 4), ((16, 48), 64, 8), ((128, 128), 64, 2), ((48, 32), 72, 4), ((64, 64), 192, 6)],
)
def test_d16_fp8_blocks_of_each_half(tmp_path: Path, block: tuple[int, int], n: int, rows: int):
    tensors = fp8_fused(block, n)
    assert tensors[f"{PREFIX}.gate_up_proj_scale_inv"].shape[1] == rows
    together = -(-2 * n // block[0])
    if together == rows and n % block[0]:  # 72 rows in blocks of 48: which rows share the second scale?
        text = refusal(tmp_path, TensorError, tensors, {"quant_method": "fp8", "weight_block_size": list(block)})
        assert "gate_up_proj_scale_inv: found" in text
        return
    experts = read(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": list(block)})
    fmt = WeightFormat("fp8", 8, block=block)
    assert experts.gate_up.format == fmt
    for half, seed in ((0, 0), (1, 100)):
        for e, matrix in enumerate(fp8_halves(block, n, HIDDEN, seed)):
            assert same_bits(experts.gate_up.tensors["weight"][e, half], matrix["weight"])
            assert same_bits(experts.gate_up.tensors["scale"][e, half], matrix["scale"])


def test_d16_fp8_blocks_across_the_border_are_refused(tmp_path: Path):
    """I = 192 in blocks of 128: 3 rows of scales over both halves; I = 224: 4 rows either way."""
    for n, rows in ((192, 3), (224, 4)):
        tensors = fp8_fused((128, 128), n)
        scale = f"{PREFIX}.gate_up_proj_scale_inv"
        tensors[scale] = tensors[scale][:, :rows]
        text = refusal(tmp_path, TensorError, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
        assert f"{scale}: found {rows} rows of scales for gate and up of {n} rows each, blocks of 128 rows" in text
        assert "expected 4 rows of scales, from blocks that gate and up do not share" in text


def test_fp8_one_scale_a_half(tmp_path: Path):
    tensors = {
        f"{PREFIX}.gate_up_proj": (0.1 * GATE_UP).to(torch.float8_e4m3fn),
        f"{PREFIX}.gate_up_proj_scale_inv": numbers(EXPERTS, 2, 1).abs(),
        f"{PREFIX}.down_proj": DOWN.to(torch.float8_e4m3fn),
        f"{PREFIX}.down_proj_scale_inv": numbers(EXPERTS, 1, 1, seed=1).abs(),
    }
    experts = read(tmp_path, tensors, {"quant_method": "fp8"})
    assert experts.gate_up.format.name == "fp8-tensor"
    up = tensors[f"{PREFIX}.gate_up_proj"][2, INTERMEDIATE:].float() * tensors[f"{PREFIX}.gate_up_proj_scale_inv"][2, 1]
    assert torch.equal(dequantize_expert(experts.gate_up, 2, 1), up)


def test_fp8_of_families_with_orders_of_their_own_is_refused(tmp_path: Path):
    tensors = fp8_fused((32, 32), INTERMEDIATE)
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    for model_type in ("gpt_oss", "qwen3_vl_moe_text"):
        text = refusal(tmp_path, UnsupportedError, tensors, config, model_type=model_type)
        assert f"found fused FP8 weights of {model_type}" in text
        assert "Save the checkpoint with one tensor an expert." in text


def mxfp4_fused() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
    tensors: dict[str, Tensor] = {}
    for name, (n, k) in shapes.items():
        blocks = torch.randint(256, (EXPERTS, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, (EXPERTS, n, k // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{PREFIX}.{name}_blocks": blocks, f"{PREFIX}.{name}_scales": scales}
        tensors[f"{PREFIX}.{name}_bias"] = torch.randn(EXPERTS, n, generator=generator).to(torch.bfloat16)
    return tensors


def test_gpt_oss_mxfp4(tmp_path: Path):
    tensors = mxfp4_fused()
    experts = read(tmp_path, tensors, {"quant_method": "mxfp4"}, model_type="gpt_oss")
    blocks, scales = (tensors[f"{PREFIX}.gate_up_proj_{name}"] for name in ("blocks", "scales"))
    for half in (0, 1):
        assert same_bits(experts.gate_up.tensors["packed"][:, half], blocks[:, half::2].flatten(2))
        assert same_bits(experts.gate_up.tensors["scale"][:, half], scales[:, half::2])
    assert (experts.gate_up.n, experts.gate_up.k) == (INTERMEDIATE, HIDDEN)
    assert same_bits(experts.down.tensors["packed"][:, 0], tensors[f"{PREFIX}.down_proj_blocks"].flatten(2))


GPT_OSS = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(
    ("changes", "quantization", "kind", "text"),
    [
        ({"down_proj": None}, None, MissingExpertsError, "found no down; expected down of all experts, as gate_up is"),
        (
            {"gate_up_proj": None},
            None,
            MissingExpertsError,
            "found no gate_up; expected gate_up of all experts, as down",
        ),
        (
            {"gate_up_proj": GATE_UP[:2]},
            None,
            TensorError,
            "gate_up_proj: found shape [2, 128, 96]; expected three axes",
        ),
        ({"gate_up_proj": torch.cat((GATE_UP, GATE_UP[:1]))}, None, TensorError, "found shape [4, 128, 96]"),
        ({"gate_up_proj": GATE_UP[0]}, None, TensorError, "gate_up_proj: found shape [128, 96]"),
        ({"gate_up_proj": GATE_UP[:, 1:]}, None, TensorError, "found 127 rows of gate and up; expected an even number"),
        ({"gate_up_proj": GATE_UP[:, 2:]}, None, TensorError, "down's inputs (I): found 64; expected 63"),
        (
            {"down_proj": DOWN[:, 1:]},
            None,
            TensorError,
            "down_proj: found shape [3, 95, 64], so H = 95; expected H = 96",
        ),
        ({"gate_up_proj": GATE_UP.to(torch.int8)}, None, UnsupportedError, "found weight with no quantization config"),
        ({"gate_up_proj_scale": GATE_UP}, None, UnsupportedError, "found scale, weight with no quantization config"),
        ({"up_proj": UP}, None, TensorError, "found up projections; expected down, gate_up, as experts of qwen3_moe"),
        (
            {"0.gate_proj.weight": UP[0]},
            None,
            TensorError,
            "found the same experts in model.layers.0.mlp.experts.0.gate_proj.weight",
        ),
        (
            {"down_proj.weight": DOWN},
            None,
            TensorError,
            "found the same experts in model.layers.0.mlp.experts.down_proj",
        ),
        ({"gate_up_proj_bias": UP[0, :2, :3]}, None, TensorError, "gate_up_proj_bias: found bfloat16 [2, 3]; expected"),
        ({}, {"quant_method": "fp8"}, ConfigError, "found a plain weight (bf16); expected fp8-tensor tensors"),
        ({}, GPT_OSS, ConfigError, "found a plain weight (bf16); expected mxfp4 tensors"),
    ],
)
def test_broken(tmp_path: Path, changes: dict[str, Any], quantization: Any, kind: type[FanfoldError], text: str):
    tensors = {**FUSED, **{f"{PREFIX}.{name}": tensor for name, tensor in changes.items()}}
    found = refusal(tmp_path, kind, {n: t for n, t in tensors.items() if t is not None}, quantization)
    assert text in found
    assert PREFIX in found


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("gate_up_proj_blocks", lambda t: t.flatten(2), "found shape [3, 128, 48]; expected four axes"),
        ("gate_up_proj_blocks", lambda t: t.to(torch.int8), "weight_packed (or weight): found int8; expected uint8"),
        ("gate_up_proj_scales", lambda t: t[:2], "gate_up_proj_scales: found shape [2, 128, 3]; expected [3, ...]"),
        ("gate_up_proj_scales", lambda t: t[..., :2], "weight_scale: found shape [64, 2]; expected shape [64, 3]"),
        ("gate_up_proj_scales", lambda t: t[0, 0, 0], "gate_up_proj_scales: found shape []; expected [3, ...]"),
        ("down_proj_scales", lambda t: t[:, 0], "weight_scale: found shape [2]"),
        ("down_proj_bias", lambda t: t[:, 1:], "down_proj_bias: found bfloat16 [3, 95]; expected"),
        ("down_proj_bias", lambda t: t.to(torch.int32), "down_proj_bias: found int32 [3, 96]"),
    ],
)
def test_broken_mxfp4(tmp_path: Path, name: str, change: Any, text: str):
    tensors = mxfp4_fused()
    tensors[f"{PREFIX}.{name}"] = change(tensors[f"{PREFIX}.{name}"])
    found = refusal(tmp_path, TensorError, tensors, GPT_OSS, model_type="gpt_oss")
    assert text in found
    assert PREFIX in found


@pytest.mark.parametrize(("name", "fields"), [("scales", "blocks"), ("blocks", "scales")])
def test_half_of_mxfp4(tmp_path: Path, name: str, fields: str):
    tensors = mxfp4_fused()
    del tensors[f"{PREFIX}.down_proj_{name}"]
    text = refusal(tmp_path, UnsupportedError, tensors, GPT_OSS, model_type="gpt_oss")
    assert f"{PREFIX}: down: found {fields} with mxfp4; expected plain weights, MXFP4 blocks and scales" in text


def test_impossible_values(tmp_path: Path):
    def bad(tensors: dict[str, Tensor], name: str, value: float, quantization: Any = None, **model: Any) -> str:
        broken = {key: tensor.clone() for key, tensor in tensors.items()}
        target = broken[f"{PREFIX}.{name}"]
        (target.view(torch.uint8) if target.dtype == torch.float8_e4m3fn else target).flatten()[-1] = value
        with pytest.raises(TensorError) as caught:
            read(tmp_path, broken, quantization, **model)
        return parts(caught.value)

    assert "down_proj[2, 0].weight: found nan at [95, 63]" in bad(FUSED, "down_proj", float("nan"))
    assert "gate_up_proj[2, 1].weight: found inf" in bad(FUSED, "gate_up_proj", float("inf"))
    fp8, config = fp8_fused((32, 32), 64), {"quant_method": "fp8", "weight_block_size": [32, 32]}
    assert "down_proj[2, 0].weight: found nan" in bad(fp8, "down_proj", 0xFF, config)
    assert "gate_up_proj[2, 1]" in bad(fp8, "gate_up_proj_scale_inv", float("nan"), config)
    oss = {"quantization": GPT_OSS, "model_type": "gpt_oss"}
    assert "[2, 0].weight_scale: found 255 at [95, 1]" in bad(mxfp4_fused(), "down_proj_scales", 255, **oss)
    text = bad(mxfp4_fused(), "gate_up_proj_bias", float("nan"), **oss)
    assert "gate_up_proj_bias: found 1 values that are NaN or infinite" in text


def test_sizes_that_the_config_leaves_out(tmp_path: Path):
    experts = read(tmp_path, FUSED, hidden_size=None, num_experts=None)
    assert (experts.shape.num_experts, experts.shape.hidden) == (EXPERTS, HIDDEN)


def test_one_expert_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    fill = CheckpointFiles.read

    def watched(self: CheckpointFiles, name: str, row: int | None = None) -> Tensor:
        tensor = fill(self, name, row)
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    monkeypatch.setattr(CheckpointFiles, "read", watched)
    experts = read(tmp_path, mxfp4_fused(), GPT_OSS, model_type="gpt_oss")
    assert max(sizes) == 2 * INTERMEDIATE * HIDDEN // 2
    assert len(sizes) == EXPERTS * 6
    assert experts.nbytes == sum(sizes)
