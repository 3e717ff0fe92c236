"""Checkpoints that transformers writes, and its own reading of packed ones, as oracles."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from small_checkpoints import edit_json, same_bits, write
from torch import Tensor, nn

from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize_expert, quantize
from fanfold.formats.names import expert_name
from fanfold.spec import WeightFormat
from fanfold.spec.weights import ProjectionWeights

GOLDEN = Path(__file__).parents[1] / "golden"
E, H, N = 4, 64, 48
SIZES = {
    "vocab_size": 64,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": N, "intermediate_size": 80}
FULL = {"layer_types": ["full_attention"] * 2}
GROUPS = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": E, **MOE},
    "qwen2_moe": {"num_experts": E, **MOE, "shared_expert_intermediate_size": 32},
    "qwen3_next": {"num_experts": E, **MOE, "shared_expert_intermediate_size": 32, **FULL},
    "qwen3_5_moe_text": {"num_experts": E, **MOE, "shared_expert_intermediate_size": 32, **FULL},
    "mixtral": {"num_local_experts": E, "intermediate_size": N},
    "minimax": {"num_local_experts": E, "intermediate_size": N, **FULL},
    "phimoe": {"num_local_experts": E, "intermediate_size": N},
    "olmoe": {"num_experts": E, "num_experts_per_tok": 2, "intermediate_size": N},
    "deepseek_v2": {"n_routed_experts": E, **MOE, **GROUPS, **LATENT, "n_shared_experts": 1},
    "deepseek_v3": {"n_routed_experts": E, **MOE, **GROUPS, **LATENT, "n_shared_experts": 1},
    "glm4_moe": {"n_routed_experts": E, **MOE, **GROUPS},
    "dots1": {"n_routed_experts": E, **MOE, **GROUPS, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": E, "moe_k": 2, "moe_intermediate_size": N, "intermediate_size": 80},
    "hunyuan_v1_moe": {"num_experts": E, "moe_topk": 2, "intermediate_size": N},
    "jamba": {
        "num_experts": E,
        "intermediate_size": N,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "granitemoe": {"num_local_experts": E, "num_experts_per_tok": 2, "intermediate_size": N},
    "gpt_oss": {"num_local_experts": E, "num_experts_per_tok": 2, "intermediate_size": N, **FULL},
    "llama4_text": {
        "num_local_experts": E,
        "intermediate_size": N,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 1,
    },
    "nemotron_h": {
        "n_routed_experts": E,
        **MOE,
        "layers_block_type": ["moe", "attention"],
        "n_group": 1,
        "topk_group": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
}


def quietly(call: Any, *args: Any, **options: Any) -> Any:
    """What transformers has to say of its own is no matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **options)


def made(model_type: str, **fields: Any) -> nn.Module:
    config = quietly(transformers.AutoConfig.for_model, model_type, **{**SIZES, **fields})
    torch.manual_seed(0)
    model = quietly(transformers.AutoModelForCausalLM.from_config, config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):  # zeros until trained
            nn.init.normal_(parameter)
    return model


def experts_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Layer -> the module of its experts."""
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "down_proj"):
            parts = name.split(".")
            found[int(parts[parts.index("layers") + 1])] = module
    return found


def halves_of(module: nn.Module, model_type: str) -> tuple[Tensor, Tensor]:
    """Its weights as [E, P, I, H] and [E, 1, H, I]."""
    tensors = dict(module.named_parameters())
    if "up_proj" in tensors:
        return tensors["up_proj"].detach().unsqueeze(1), tensors["down_proj"].detach().unsqueeze(1)
    gate_up, down = tensors["gate_up_proj"].detach(), tensors["down_proj"].detach()
    if model_type in ("gpt_oss", "llama4_text"):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if model_type == "gpt_oss":
        return torch.stack((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1), down.unsqueeze(1)
    return torch.stack(gate_up.chunk(2, dim=1), dim=1), down.unsqueeze(1)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_in_both_spellings(tmp_path: Path, model_type: str):
    model = made(model_type, **FAMILIES[model_type])
    modules = experts_modules(model)
    assert modules
    for original in (True, False):
        quietly(model.save_pretrained, tmp_path / str(original), save_original_format=original)
        checkpoint = Checkpoint(tmp_path / str(original))
        assert set(checkpoint.layers) == set(modules)
        assert checkpoint.config.num_experts == E
        for layer, module in modules.items():
            experts = checkpoint.read_experts(layer)
            gate_up, down = halves_of(module, model_type)
            assert same_bits(experts.gate_up.tensors["weight"], gate_up)
            assert same_bits(experts.down.tensors["weight"], down)
            assert (experts.shape.hidden, experts.shape.intermediate) == (H, N)
            assert experts.shape.gated == checkpoint.config.activation.gated == (model_type != "nemotron_h")
            for projection, name in ((experts.gate_up, "gate_up_proj_bias"), (experts.down, "down_proj_bias")):
                bias = getattr(module, name, None)
                assert (projection.bias is None) == (bias is None)
                if bias is not None and projection.bias is not None:
                    flat = projection.bias.transpose(1, 2).flatten(1) if model_type == "gpt_oss" else projection.bias
                    assert same_bits(flat, bias.detach())
        named = {name for tensors in checkpoint.layers.values() for name in tensors.names()}
        assert not any("shared" in name or ".gate." in name or "router" in name for name in named)
        assert {*named, *checkpoint.plain} == set(load_file(tmp_path / str(original) / "model.safetensors"))


@pytest.mark.parametrize("original", [True, False])
def test_qwen3_vl_moe(tmp_path: Path, original: bool):
    """In the order of transformers 5, and in that of the family's first checkpoints, which transformers reads too."""
    text = {**SIZES, "num_experts": E, **MOE, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": H}
    vision["deepstack_visual_indexes"] = [0]
    config = quietly(transformers.AutoConfig.for_model, "qwen3_vl_moe", text_config=text, vision_config=vision)
    model = quietly(transformers.AutoModelForImageTextToText.from_config, config, dtype=torch.bfloat16)
    quietly(model.save_pretrained, tmp_path / "new", save_original_format=original)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    turned = {name: t.transpose(1, 2) if ".experts." in name else t for name, t in tensors.items()}
    write(tmp_path / "old", turned)
    (tmp_path / "old" / "config.json").write_text((tmp_path / "new" / "config.json").read_text())
    reread = quietly(transformers.AutoModelForImageTextToText.from_pretrained, tmp_path / "old", dtype=torch.bfloat16)
    module = reread.get_submodule("model.language_model.layers.1.mlp.experts")
    gate_up, down = halves_of(module, "qwen3_vl_moe")
    for folder in (tmp_path / "new", tmp_path / "old"):
        checkpoint = Checkpoint(folder)
        assert checkpoint.layer(0).container == "model.language_model.layers.0.mlp.experts"
        experts = checkpoint.read_experts(1)
        assert same_bits(experts.gate_up.tensors["weight"], gate_up)
        assert same_bits(experts.down.tensors["weight"], down)


def dequantised(projection: ProjectionWeights) -> Tensor:
    """bf16 [E, P, N, K]."""
    return torch.stack(
        [
            torch.stack([dequantize_expert(projection, e, p) for p in range(projection.halves)])
            for e in range(projection.num_experts)
        ]
    ).to(torch.bfloat16)


@pytest.mark.parametrize("block", [[16, 16], None])
def test_fine_grained_fp8_as_transformers_dequantises_it(tmp_path: Path, block: list[int] | None):
    model = made("qwen3_moe", **FAMILIES["qwen3_moe"])
    quietly(model.save_pretrained, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    fmt = WeightFormat("fp8", 8, block=(-1, -1) if block is None else (block[0], block[1]))
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if expert_name(name) is None:
            packed[name] = tensor
            continue
        fields = quantize(fmt, tensor.float())
        packed |= {name: fields["weight"], f"{name}_scale_inv": fields["scale"]}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    config["modules_to_not_convert"] = ["lm_head", "self_attn", "mlp.gate"]
    folder = write(tmp_path / "fp8", packed, None)
    (folder / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    edit_json(folder / "config.json", quantization_config=config)
    experts = Checkpoint(folder).read_experts(1)
    assert experts.gate_up.format == fmt
    theirs = quietly(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.bfloat16)
    gate_up, down = halves_of(experts_modules(theirs)[1], "qwen3_moe")
    assert same_bits(dequantised(experts.gate_up), gate_up)
    assert same_bits(dequantised(experts.down), down)


@pytest.mark.parametrize("block", [(16, 32), (48, 64), (128, 128), (20, 28)])
def test_d16_partial_blocks_as_transformers_dequantises_them(tmp_path: Path, block: tuple[int, int]):
    """By its function that takes the block; its loading takes blocks from shapes, and partial ones for smaller ones."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    fmt = WeightFormat("fp8", 8, block=block)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for e in range(E):
        for name, shape in (("gate", (N, H)), ("up", (N, H)), ("down", (H, N))):
            module = f"model.layers.0.mlp.experts.{e}.{name}_proj"
            fields = quantize(fmt, torch.randn(shape, generator=generator))
            tensors |= {f"{module}.weight": fields["weight"], f"{module}.weight_scale_inv": fields["scale"]}
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    folder = write(tmp_path, tensors, config, hidden_size=H, moe_intermediate_size=N, num_experts=E)
    experts = Checkpoint(folder).read_experts(0)
    for e in range(E):
        for projection, half, name in (
            (experts.gate_up, 0, "gate"),
            (experts.gate_up, 1, "up"),
            (experts.down, 0, "down"),
        ):
            module = f"model.layers.0.mlp.experts.{e}.{name}_proj"
            weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"]
            expected = _dequantize_fp8_weight(weight, scale, list(block), torch.float32)
            assert torch.equal(dequantize_expert(projection, e, half), expected)


def test_fp8_blocks_fused_as_transformers_keeps_them(tmp_path: Path):
    """The names and the order of rows of its FP8 experts module, whose state is this checkpoint."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    config = transformers.AutoConfig.for_model("qwen3_moe", **{**SIZES, **FAMILIES["qwen3_moe"]})
    module = FP8Experts(config, block_size=(16, 32))
    fmt = WeightFormat("fp8", 8, block=(16, 32))
    generator = torch.Generator().manual_seed(0)
    plain = {
        name: torch.randn(E, *shape, generator=generator)
        for name, shape in (("gate", (N, H)), ("up", (N, H)), ("down", (H, N)))
    }
    packed = {name: [quantize(fmt, weight[e]) for e in range(E)] for name, weight in plain.items()}
    state: dict[str, Tensor] = {}
    for field, suffix in (("weight", ""), ("scale", "_scale_inv")):
        both = [torch.cat((packed["gate"][e][field], packed["up"][e][field])) for e in range(E)]
        state[f"gate_up_proj{suffix}"] = torch.stack(both)
        state[f"down_proj{suffix}"] = torch.stack([packed["down"][e][field] for e in range(E)])
    module.load_state_dict(state)  # of these shapes and dtypes
    tensors = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in module.state_dict().items()}
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    folder = write(tmp_path, tensors, quantization, hidden_size=H, moe_intermediate_size=N, num_experts=E)
    experts = Checkpoint(folder).read_experts(0)
    for e in range(E):
        for half, name in enumerate(("gate", "up")):
            assert same_bits(experts.gate_up.tensors["weight"][e, half], packed[name][e]["weight"])
            assert same_bits(experts.gate_up.tensors["scale"][e, half], packed[name][e]["scale"])
        assert same_bits(experts.down.tensors["scale"][e, 0], packed["down"][e]["scale"])


def test_gpt_oss_mxfp4_as_transformers_dequantises_it():
    folder = GOLDEN / "native_gptoss_mxfp4"
    theirs = quietly(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.bfloat16)
    checkpoint = Checkpoint(folder)
    for layer, module in experts_modules(theirs).items():
        gate_up, down = halves_of(module, "gpt_oss")
        experts = checkpoint.read_experts(layer)
        assert torch.equal(dequantised(experts.gate_up), gate_up)
        assert torch.equal(dequantised(experts.down), down)
