"""The README's table of formats, made from the code that reads the quantisers' configs."""

from collections.abc import Mapping
from typing import Any

from fanfold.formats.codec import CODECS
from fanfold.formats.config_fields import Fields
from fanfold.formats.modelopt_scheme import ALGORITHMS
from fanfold.formats.quantization import METHODS
from fanfold.spec.weight_format import INTEGER_BITS, WeightFormat


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {"format": layout, "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}


_INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "group"}
_FP8 = {"num_bits": 8, "type": "float"}

# One small config for every way of saying it: quant_method -> what users call it -> config.
CONFIGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gptq": {
        "checkpoint_format gptq (v1)": {"bits": 4, "group_size": 128},
        "gptq_v2": {"bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"},
    },
    "awq": {"gemm": {"bits": 4, "group_size": 128}},
    "compressed-tensors": {
        "pack-quantized": _compressed("pack-quantized", **_INTEGERS),
        "nvfp4-pack-quantized": _compressed("nvfp4-pack-quantized", group_size=16, **_FP4),
        "mxfp4-pack-quantized": _compressed("mxfp4-pack-quantized", group_size=32, **_FP4),
        "float-quantized tensor": _compressed("float-quantized", strategy="tensor", **_FP8),
        "channel": _compressed("float-quantized", strategy="channel", **_FP8),
        "block": _compressed("float-quantized", strategy="block", block_structure=[128, 128], **_FP8),
    },
    "modelopt": {algorithm: {"quant_algo": algorithm} for algorithm in [*ALGORITHMS, "FP8_PB_WO", "MIXED_PRECISION"]},
    "fp8": {"weight_block_size": {"weight_block_size": [128, 128]}, "per tensor": {}},
    "mxfp4": {"gpt-oss": {}},
}


def table() -> str:
    """Markdown: one row for each quant_method and kind of weights."""
    assert set(CONFIGS) == set(METHODS)
    lines = ["| `quant_method` | written as | stays packed as | bits |", "|---|---|---|---|"]
    kinds: set[str] = set()
    for method, variants in CONFIGS.items():
        by_kind: dict[str, list[str]] = {}
        bits: dict[str, str] = {}
        for variant, config in variants.items():
            for fmt in _formats(method, config):
                by_kind.setdefault(fmt.kind, [])
                if variant not in by_kind[fmt.kind]:
                    by_kind[fmt.kind].append(variant)
                bits[fmt.kind] = ", ".join(map(str, INTEGER_BITS.get(fmt.kind, (fmt.bits,))))
        kinds |= set(by_kind)
        lines += [f"| `{method}` | {', '.join(by_kind[kind])} | {kind} | {bits[kind]} |" for kind in by_kind]
    dense = [kind for kind in CODECS if kind not in kinds]
    lines.append(f"| none | plain weights, per expert or fused | {', '.join(dense)} | 16, 32 |")
    return "\n".join(lines)


def _formats(method: str, config: Mapping[str, Any]) -> list[WeightFormat]:
    """What the code makes of a config; of MIXED_PRECISION, with every algorithm on a module of its own."""
    if config.get("quant_algo") == "MIXED_PRECISION":
        layers = {name: {"quant_algo": name} for name in ALGORITHMS}
        scheme = METHODS[method](Fields("config", {**config, "quantized_layers": layers}))
        found = [scheme(name) for name in layers]
    else:
        found = [METHODS[method](Fields("config", config))("module")]
    return [fmt for fmt in found if fmt is not None]
