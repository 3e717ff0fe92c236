"""A directory as layers of experts, packed Linears, and the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import random_weight
from small_checkpoints import (
    CONTAINER,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    config_of,
    edit_json,
    expert_tensors,
    matrix_tensors,
    parts,
    same_bits,
    shard,
    write,
    write_format,
)
from torch import Tensor

from fanfold.errors import FanfoldError, MissingExpertsError, TensorError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize_expert
from fanfold.formats.files import CheckpointFiles
from fanfold.spec import WeightFormat

PREFIX = CONTAINER.format(layer=0)
BF16 = WeightFormat.parse("bf16")
GPTQ = WeightFormat.parse("gptq4-g32-v1")
SPELLINGS = {
    "qwen": ("model.layers.{layer}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("model.layers.{layer}.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "mixtral by llmcompressor": (
        "model.layers.{layer}.block_sparse_moe.experts",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "in a larger model": ("model.language_model.layers.{layer}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def refusal(folder: Path, kind: type[FanfoldError], tensors: dict[str, Tensor], quantization: Any = None) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint(write(folder, tensors, quantization)).read_experts(0)
    return parts(caught.value)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["bf16", "gptq4-g32-v1", "nvfp4-divisor"])
def test_every_spelling_gives_the_same_experts(tmp_path: Path, spelling: str, name: str):
    fmt = WeightFormat.parse(name)
    container, projections = SPELLINGS[spelling]
    sizes = dict(zip(projections, [(INTERMEDIATE, HIDDEN)] * 2 + [(HIDDEN, INTERMEDIATE)], strict=True))
    tensors = expert_tensors(fmt, names=sizes, container=container)
    checkpoint = Checkpoint(write(tmp_path, tensors, config_of(fmt)))
    experts = checkpoint.read_experts(0)
    assert checkpoint.layer(0).container == container.format(layer=0)
    plain = Checkpoint(write(tmp_path / "plain", expert_tensors(fmt), config_of(fmt))).read_experts(0)
    for ours, theirs in ((experts.gate_up, plain.gate_up), (experts.down, plain.down)):
        assert ours.format == theirs.format
        assert all(same_bits(ours.tensors[field], tensor) for field, tensor in theirs.tensors.items())


def test_layers_and_the_rest(tmp_path: Path):
    tensors = {**expert_tensors(GPTQ, layer=10), **expert_tensors(GPTQ, layer=2)}
    tensors |= matrix_tensors(GPTQ, "model.layers.2.self_attn.q_proj", 64, HIDDEN)
    tensors |= matrix_tensors(GPTQ, "model.layers.2.mlp.shared_experts.up_proj", 64, HIDDEN)
    plain = {
        "model.layers.2.self_attn.q_proj.bias": torch.zeros(64),
        "model.layers.2.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN),
        "model.layers.2.mlp.gate.e_score_correction_bias": torch.zeros(EXPERTS),
        "model.layers.2.input_layernorm.weight": torch.zeros(HIDDEN),
        "lm_head.weight": torch.zeros(8, HIDDEN),
    }
    checkpoint = Checkpoint(write(tmp_path, {**tensors, **plain}, config_of(GPTQ)))
    assert list(checkpoint.layers) == [2, 10]
    assert set(checkpoint.packed) == {"model.layers.2.self_attn.q_proj", "model.layers.2.mlp.shared_experts.up_proj"}
    assert set(checkpoint.plain) == set(plain)
    assert checkpoint.draft == []
    assert checkpoint.linear("model.layers.2.self_attn.q_proj").bias == "model.layers.2.self_attn.q_proj.bias"
    dense = checkpoint.read_linear("model.layers.2.self_attn.q_proj", torch.bfloat16)
    assert dense.dtype == torch.bfloat16
    assert float((dense.float() - random_weight(64, HIDDEN)).abs().max()) < 0.1
    assert checkpoint.expert_bytes() == sum(t.nbytes for name, t in tensors.items() if ".experts." in name)
    with pytest.raises(MissingExpertsError) as caught:
        checkpoint.read_experts(3)
    assert "layer 3: found experts in layers 2, 10; expected experts in that layer" in parts(caught.value)


def test_a_checkpoint_without_experts(tmp_path: Path):
    checkpoint = Checkpoint(write(tmp_path, {"lm_head.weight": torch.zeros(2, 2)}))
    assert (checkpoint.layers, checkpoint.packed, checkpoint.expert_bytes()) == ({}, {}, 0)
    with pytest.raises(MissingExpertsError, match=r"layer 0: found experts in layers \(none\)"):
        checkpoint.describe(0)


@pytest.mark.parametrize("prefix", ["mtp", "model.mtp"])
def test_layers_that_predict_further_tokens_are_no_experts_of_layer_0(tmp_path: Path, prefix: str):
    draft = expert_tensors(BF16, container=prefix + ".layers.{layer}.mlp.experts")
    draft[f"{prefix}.fc.weight"] = torch.zeros(2, 2)
    checkpoint = Checkpoint(write(tmp_path, {**expert_tensors(BF16), **draft}))
    assert set(checkpoint.draft) == set(draft)
    assert (checkpoint.plain, checkpoint.packed) == ([], {})
    assert same_bits(
        checkpoint.read_experts(0).gate_up.tensors["weight"][1, 0], expert_tensors(BF16)[f"{PREFIX}.1.gate_proj.weight"]
    )


def test_a_module_is_packed_where_its_weight_is_no_plain_number(tmp_path: Path):
    codes = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    tensors = {**expert_tensors(BF16), "a.weight": codes, "b.weight": torch.zeros(4, 4), "c.qzeros": codes}
    checkpoint = Checkpoint(write(tmp_path, tensors))
    assert (set(checkpoint.packed), checkpoint.plain) == ({"a", "c"}, ["b.weight"])
    with pytest.raises(FanfoldError, match=r"a: found weight \(float8_e4m3fn\); expected a plain weight"):
        checkpoint.linear("a")


@pytest.mark.parametrize("name", ["gptq4-g32-v1-actorder", "nvfp4", "fp8-block32x32", "packed4-g32-asym", "bf16"])
def test_describe_agrees_with_what_is_read(tmp_path: Path, name: str):
    folder, _ = write_format(tmp_path, name)
    checkpoint = Checkpoint(folder)
    described, experts = checkpoint.describe(0), checkpoint.read_experts(0)
    for key, projection in (("gate_up", experts.gate_up), ("down", experts.down)):
        info = described[key]
        assert info.format == projection.format
        assert (info.num_experts, info.halves) == (projection.num_experts, projection.halves)
        assert (info.n, info.k) == (projection.n, projection.k)


def test_nothing_of_a_tensor_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, tensors = write_format(tmp_path, "gptq4-g32-v1-actorder")
    names: list[str] = []
    read = CheckpointFiles.read

    def watched(self: CheckpointFiles, name: str, row: int | None = None) -> Tensor:
        names.append(name)
        return read(self, name, row)

    monkeypatch.setattr(CheckpointFiles, "read", watched)
    checkpoint = Checkpoint(folder)
    checkpoint.expert_bytes()
    assert names == []
    checkpoint.describe(0)
    assert names == [f"{PREFIX}.0.gate_proj.g_idx", f"{PREFIX}.0.down_proj.g_idx"]
    names.clear()
    checkpoint.read_experts(0)
    assert sorted(names) == sorted(tensors)  # each once


@pytest.mark.parametrize("shards", [2, 5])
@pytest.mark.parametrize("name", ["gptq4-g32-asym-v2-actorder", "nvfp4-divisor"])
def test_shards_give_the_same_experts(tmp_path: Path, name: str, shards: int):
    folder, _ = write_format(tmp_path, name)
    whole = Checkpoint(folder).read_experts(0)
    shard(folder, shards)
    checkpoint = Checkpoint(folder)
    assert len({info.file for info in checkpoint.files.infos.values()}) == shards
    split = checkpoint.read_experts(0)
    for ours, theirs in ((split.gate_up, whole.gate_up), (split.down, whole.down)):
        assert all(same_bits(ours.tensors[field], tensor) for field, tensor in theirs.tensors.items())


def test_a_tensor_of_the_experts_that_is_not_known(tmp_path: Path):
    for name in (f"{PREFIX}.0.gate_proj.lora_A.weight", f"{PREFIX}.expert_bias", f"{PREFIX}.0.gate_up_proj.weight"):
        text = refusal(tmp_path, TensorError, {**expert_tensors(BF16), name: torch.zeros(1)})
        assert f"{tmp_path}: {name}: found a tensor among the experts whose name is not known" in text
        assert "nothing is ignored silently" in text


def test_two_sets_of_experts_in_one_layer(tmp_path: Path):
    other = expert_tensors(BF16, container="model.layers.{layer}.block_sparse_moe.experts")
    text = refusal(tmp_path, TensorError, {**expert_tensors(BF16), **other})
    assert "found the same experts in model.layers.0." in text
    assert "expected one set of experts a layer" in text


def test_two_spellings_of_one_matrix(tmp_path: Path):
    tensors = expert_tensors(BF16)
    for twin in (f"{PREFIX}.1.w1.weight", f"{PREFIX}.01.gate_proj.weight"):
        text = refusal(tmp_path, TensorError, {**tensors, twin: tensors[f"{PREFIX}.1.gate_proj.weight"]})
        assert twin in text
        assert f"{PREFIX}.1.gate_proj.weight" in text


def test_experts_without_gates_in_a_family_that_has_them(tmp_path: Path):
    """All gates lost must not pass for experts that have none, and the reverse."""
    tensors = expert_tensors(BF16)
    lost = {name: tensor for name, tensor in tensors.items() if "gate_proj" not in name}
    assert "found no 0.gate, 1.gate, 2.gate" in refusal(tmp_path, MissingExpertsError, lost)
    folder = write(tmp_path, tensors, model_type="nemotron_h", mlp_hidden_act="relu2")
    with pytest.raises(TensorError) as caught:
        Checkpoint(folder).read_experts(0)
    assert "found gate projections; expected down, up, as experts of nemotron_h have" in parts(caught.value)


@pytest.mark.parametrize(
    ("hidden", "what"),
    [(HIDDEN + 32, "gate_up's inputs (H): found 96; expected 128"), (64, "(H): found 96; expected 64")],
)
def test_hidden_size_of_another_model(tmp_path: Path, hidden: int, what: str):
    folder, _ = write_format(tmp_path, "gptq4-g32-v1", hidden_size=hidden)
    for call in (Checkpoint(folder).read_experts, Checkpoint(folder).describe):
        with pytest.raises(TensorError) as caught:
            call(0)
        assert what in parts(caught.value)
        assert PREFIX in str(caught.value)


def test_gate_up_and_down_of_unlike_sizes(tmp_path: Path):
    sizes = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, 32)}
    text = refusal(tmp_path, TensorError, expert_tensors(BF16, names=sizes))
    assert "down's inputs (I): found 32; expected 64" in text
    sizes["down_proj"] = (32, INTERMEDIATE)
    folder = write(tmp_path, expert_tensors(BF16, names=sizes), hidden_size=None)
    with pytest.raises(TensorError, match=r"down's outputs \(H\): found 32; expected 96"):
        Checkpoint(folder).describe(0)


def test_bits_of_another_checkpoint(tmp_path: Path):
    """4-bit words read as 8-bit ones would be half as many."""
    folder, _ = write_format(tmp_path, "gptq4-g32-v1")
    edit_json(folder / "config.json", quantization_config={**(config_of(GPTQ) or {}), "bits": 8})
    with pytest.raises(TensorError) as caught:
        Checkpoint(folder).read_experts(0)
    assert "0.gate_proj.scales: found shape [3, 64]; expected shape [2, 64] for gptq8-g32-v1" in parts(caught.value)
    assert "none of them is ever inferred from shapes" in str(caught.value)


def test_b1_c4_conventions_of_two_tools_give_equal_weights(tmp_path: Path):
    v1, v2 = WeightFormat.parse("gptq4-g32-asym-v1"), WeightFormat.parse("gptq4-g32-asym-v2")
    stacks = [
        Checkpoint(write(tmp_path / fmt.name, expert_tensors(fmt), config_of(fmt))).read_experts(0) for fmt in (v1, v2)
    ]
    assert not torch.equal(stacks[0].gate_up.tensors["qzeros"], stacks[1].gate_up.tensors["qzeros"])
    for e in range(EXPERTS):
        assert torch.equal(dequantize_expert(stacks[0].gate_up, e, 1), dequantize_expert(stacks[1].gate_up, e, 1))
    # A power of two as the global scale, whose reciprocal is exact.
    multiplier, divisor = WeightFormat.parse("nvfp4"), WeightFormat.parse("nvfp4-divisor")
    tensors = expert_tensors(multiplier)
    suffixes = {"weight": "weight_packed", "weight_scale": "weight_scale", "weight_scale_2": "weight_global_scale"}
    twins: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_scale_2":
            tensors[name] = torch.tensor(2.0**-9)
            tensor = torch.tensor([2.0**9])
        twins[f"{module}.{suffixes[suffix]}"] = tensor
    one = Checkpoint(write(tmp_path / "m", tensors, config_of(multiplier))).read_experts(0)
    two = Checkpoint(write(tmp_path / "d", twins, config_of(divisor))).read_experts(0)
    for e in range(EXPERTS):
        assert torch.equal(dequantize_expert(one.down, e, 0), dequantize_expert(two.down, e, 0))


ATTENTION = "model.layers.0.self_attn.q_proj"
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
MIXED: dict[str, tuple[str, str, str | None, dict[str, Any]]] = {
    "modelopt, the MLPs alone": (
        "nvfp4",
        "bf16",
        None,
        {"quant_method": "modelopt", "quant_algo": "nvfp4", "exclude_modules": ["*self_attn*", "lm_head"]},
    ),
    "modelopt, mixed": (
        "nvfp4",
        "fp8-tensor",
        "weight_scale",
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                ATTENTION: {"quant_algo": "FP8"},
                **{
                    f"{PREFIX}.{e}.{p}_proj": {"quant_algo": "NVFP4", "group_size": 16}
                    for e in range(EXPERTS)
                    for p in ("gate", "up", "down")
                },
            },
        },
    ),
    "compressed-tensors, mixed": (
        "nvfp4-divisor",
        "fp8-channel",
        "weight_scale",
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {"targets": ["re:.*self_attn.*"], "format": "float-quantized", "weights": CHANNEL},
                "group_1": {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": NVFP4},
            },
        },
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_attention_of_another_format_than_the_experts(tmp_path: Path, case: str):
    name, attention, scale, config = MIXED[case]
    experts, other = WeightFormat.parse(name), WeightFormat.parse(attention)
    linear = matrix_tensors(other, ATTENTION, 64, HIDDEN)
    if scale is not None:
        linear = {key.replace("weight_scale_inv", scale): tensor for key, tensor in linear.items()}
    tensors = {**expert_tensors(experts), **linear}
    checkpoint = Checkpoint(write(tmp_path, tensors, config))
    assert checkpoint.read_experts(0).gate_up.format == experts
    if other.dense:
        assert checkpoint.plain == [f"{ATTENTION}.weight"]
    else:
        assert checkpoint.linear(ATTENTION).format == other
        error = checkpoint.read_linear(ATTENTION, torch.float32) - random_weight(64, HIDDEN)
        assert float(error.abs().max()) < 0.05


MEASURE = """
import resource, sys
from fanfold.formats.checkpoint import Checkpoint
checkpoint = Checkpoint(sys.argv[1])
checkpoint.read_experts(0)  # whatever torch allocates once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
experts = checkpoint.read_experts(1)
peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
sys.stdout.write(f"{peak} {experts.nbytes} {checkpoint.expert_bytes()}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux alone")
def test_peak_memory_is_the_stack_and_one_matrix(tmp_path: Path):
    """One small layer, then one of 48 MB in four shards: the process grows by no more than that and a few matrices."""
    n, k, experts = 1024, 1024, 8
    sizes = {"gate_proj": (n, k), "up_proj": (n, k), "down_proj": (k, n)}
    tensors = {
        f"{CONTAINER.format(layer=layer)}.{e}.{name}.weight": torch.zeros(rows, columns, dtype=torch.bfloat16)
        for layer, count in ((0, 1), (1, experts))
        for e in range(count)
        for name, (rows, columns) in sizes.items()
    }
    folder = write(tmp_path, tensors, num_experts=None, hidden_size=k)
    shard(folder, 4)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    peak, stack, on_disk = map(int, result.stdout.split())
    matrix = n * k * 2
    assert stack == experts * 3 * matrix
    assert on_disk == stack + 3 * matrix
    # Checks of values need a few copies of one matrix.
    assert peak <= stack + 8 * matrix
