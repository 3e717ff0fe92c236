"""Small checkpoints of every layout, written with safetensors; each as the tool it is named after would write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from format_cases import random_groups, random_weight
from safetensors.torch import load_file, save_file
from torch import Tensor

from fanfold.errors import FanfoldError
from fanfold.formats.codec import codec, quantize
from fanfold.spec import WeightFormat

EXPERTS, HIDDEN, INTERMEDIATE = 3, 96, 64
CONTAINER = "model.layers.{layer}.mlp.experts"
PROJECTIONS = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
MODEL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_hidden_layers": 1,
}


def config_of(fmt: WeightFormat) -> dict[str, Any] | None:
    """quantization_config of a checkpoint whose experts all have that format."""
    if fmt.dense:
        return None
    if fmt.kind == "gptq":
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq_v2" if fmt.zero_point == "v2" else "gptq",
            "bits": fmt.bits,
            "group_size": fmt.group_size,
            "sym": fmt.symmetric,
            "desc_act": fmt.act_order,
        }
    if fmt.kind == "awq":
        sizes = {"bits": fmt.bits, "group_size": fmt.group_size, "zero_point": not fmt.symmetric}
        return {"quant_method": "awq", "version": "gemm", **sizes}
    if fmt.block == (1, -1):
        return compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True})
    if fmt.kind == "fp8":
        block = None if fmt.block == (-1, -1) else list(fmt.block or ())
        return {"quant_method": "fp8", "weight_block_size": block}
    if fmt.kind == "nvfp4" and not fmt.divisor:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    if fmt.kind == "packed":
        strategy = "channel" if fmt.group_size == -1 else "group"
        size = None if fmt.group_size == -1 else fmt.group_size
        weights: dict[str, Any] = {"num_bits": fmt.bits, "type": "int", "strategy": strategy, "group_size": size}
        weights |= {"symmetric": fmt.symmetric, "actorder": "group" if fmt.act_order else None}
        return compressed("pack-quantized", weights)
    size = 16 if fmt.kind == "nvfp4" else 32
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": size, "symmetric": True}
    return compressed(f"{fmt.kind}-pack-quantized", weights)


def compressed(layout: str, weights: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """A compressed-tensors config of one group."""
    group = {"format": layout, "targets": ["Linear"], "weights": dict(weights)}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **others,
    }


def suffix_of(fmt: WeightFormat, field: str) -> str:
    """What files call a field."""
    names = codec(fmt.kind).FIELDS[field]
    modelopt = fmt.kind == "nvfp4" and not fmt.divisor
    return names[-1] if modelopt and len(names) > 1 else names[0]


def matrix_tensors(
    fmt: WeightFormat, module: str, n: int, k: int, seed: int = 0, g_idx: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of one quantised matrix, as its file has them."""
    if fmt.act_order and g_idx is None:
        g_idx = random_groups(fmt, k, seed)
    packed = quantize(fmt, random_weight(n, k, seed), g_idx)
    tensors = {f"{module}.{suffix_of(fmt, field)}": tensor.contiguous() for field, tensor in packed.items()}
    if fmt.kind == "packed":
        tensors[f"{module}.weight_shape"] = torch.tensor([n, k])
    return tensors


def expert_tensors(
    fmt: WeightFormat,
    experts: int = EXPERTS,
    layer: int = 0,
    names: Mapping[str, tuple[int, int]] | None = None,
    container: str = CONTAINER,
) -> dict[str, Tensor]:
    """One Linear an expert. Gate and up of an expert share their order, those of unlike experts do not."""
    tensors: dict[str, Tensor] = {}
    for e in range(experts):
        for at, (name, (n, k)) in enumerate((names or PROJECTIONS).items()):
            g_idx = random_groups(fmt, k, seed=100 * layer + e + (1000 if k != HIDDEN else 0))
            module = f"{container.format(layer=layer)}.{e}.{name}"
            tensors |= matrix_tensors(fmt, module, n, k, seed=1000 * layer + 10 * e + at, g_idx=g_idx)
    return tensors


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    quantization: Mapping[str, Any] | None = None,
    side: Mapping[str, Mapping[str, Any]] | None = None,
    **model: Any,
) -> Path:
    """A checkpoint directory; `side` maps names of further JSON files to what they hold."""
    folder.mkdir(exist_ok=True, parents=True)
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(own, folder / "model.safetensors")
    config = {name: value for name, value in {**MODEL, **model}.items() if value is not None}
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    for name, fields in {"config.json": config, **(side or {})}.items():
        (folder / name).write_text(json.dumps(fields))
    return folder


def write_format(folder: Path, name: str, **model: Any) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of EXPERTS experts in the format of that name, and its tensors."""
    fmt = WeightFormat.parse(name)
    tensors = expert_tensors(fmt)
    return write(folder, tensors, config_of(fmt), **model), tensors


def edit_json(file: Path, **fields: Any) -> None:
    """Sets top-level fields; None removes them."""
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def shard(folder: Path, shards: int = 2, seed: int = 0) -> None:
    """Deals the tensors of model.safetensors out to shards with an index, like no writer would: at random."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = torch.randint(shards, (len(names),), generator=torch.Generator().manual_seed(seed)).tolist()
    places[:shards] = range(shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = [name for name, place in zip(names, places, strict=True) if place == number]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def parts(error: FanfoldError) -> str:
    """The message, each part of which says something."""
    assert all((error.what, error.found, error.expected, error.next_step))
    return str(error)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in shape, dtype and every bit; NaN equals NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )
