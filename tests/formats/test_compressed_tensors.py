"""Against compressed-tensors' own compressors, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from format_cases import fmt_of, random_weight
from torch import Tensor

from fanfold.formats import codec
from fanfold.spec import WeightFormat

INTEGERS = [
    f"packed{bits}-{group}{asym}" for bits in (2, 3, 4, 8) for group in ("g32", "channel") for asym in ("", "-asym")
]


def compressor(name: str) -> Any:
    return BaseCompressor.get_value_from_registry(name)


def integer_scheme(fmt: WeightFormat) -> QuantizationScheme:
    grouped = fmt.group_size != -1
    weights = QuantizationArgs(
        num_bits=fmt.bits,
        type="int",
        strategy="group" if grouped else "channel",
        group_size=fmt.group_size if grouped else None,
        symmetric=fmt.symmetric,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def float_scheme(bits: int, strategy: str, **options: Any) -> QuantizationScheme:
    weights = QuantizationArgs(num_bits=bits, type="float", strategy=strategy, **options)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def by_suffix(fmt: WeightFormat, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under compressed-tensors' names."""
    fields = codec.codec(fmt.kind).FIELDS
    return {("weight_scale" if key == "scale" else fields[key][0]): tensor for key, tensor in tensors.items()}


def by_name(fmt: WeightFormat, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under canonical names."""
    names = {suffix: key for key, suffixes in codec.codec(fmt.kind).FIELDS.items() for suffix in suffixes}
    if fmt.kind in ("nvfp4", "mxfp4"):
        names.pop("weight")
    return {names[suffix]: tensor for suffix, tensor in state.items() if suffix in names}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (13, 96), (80, 352)])
def test_its_pack_quantized_is_read_alike(name: str, n: int, k: int):
    fmt = fmt_of(name)
    scheme = integer_scheme(fmt)
    weight = random_weight(n, k)
    blocks = weight.reshape(n, fmt.groups(k), -1)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    written = compressor("pack-quantized").compress(state, scheme)
    tensors = by_name(fmt, written)
    codec.check_matrix(fmt, tensors, n, k, "expert")
    expected = compressor("pack-quantized").decompress(written, scheme)["weight"]
    assert expected.dtype == torch.float32
    assert torch.equal(codec.dequantize(fmt, tensors, n, k), expected)
    codes = codec.unpack(fmt, tensors, n, k)
    assert torch.equal(codec.CODED["packed"].pack(fmt, codes)["packed"], written["weight_packed"])


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (13, 96), (80, 352)])
def test_it_reads_our_pack_quantized_alike(name: str, n: int, k: int):
    fmt = fmt_of(name)
    tensors = codec.quantize(fmt, random_weight(n, k))
    tensors["scale"] = tensors["scale"].float()  # it computes in the dtype of the scales
    state = {**by_suffix(fmt, tensors), "weight_shape": torch.tensor([n, k])}
    expected = compressor("pack-quantized").decompress(state, integer_scheme(fmt))["weight"]
    assert torch.equal(codec.dequantize(fmt, tensors, n, k), expected)


@pytest.mark.parametrize("k", [64, 352, 80])
def test_its_nvfp4_is_read_alike_and_ours_is_written_alike(k: int):
    fmt = fmt_of("nvfp4-divisor")
    scheme = float_scheme(4, "tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    weight = random_weight(16, k)
    weight[0, 0] = 2.625  # amax, so that the global scale is 1024 and dividing by it is exact in either order
    weight = weight.clamp(-2.625, 2.625)
    global_scale = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.reshape(16, -1, 16)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    written = compressor("nvfp4-pack-quantized").compress(state, scheme)
    tensors = by_name(fmt, written)
    codec.check_matrix(fmt, tensors, 16, k, "expert")
    expected = compressor("nvfp4-pack-quantized").decompress(written, scheme)["weight"]
    # it computes in bf16, which holds every E2M1 value times an E4M3 scale, by 1024 too
    assert torch.equal(codec.dequantize(fmt, tensors, 16, k), expected.float())

    ours = codec.quantize(fmt, weight)
    assert float(ours["global_scale"]) == float(global_scale) == 1024.0
    live = weight.reshape(16, -1, 16).abs().amax(-1) > 0  # where all is 0 it stores a small scale instead of 0
    assert torch.equal(ours["scale"].float()[live], written["weight_scale"].float()[live])
    assert torch.equal(ours["packed"], written["weight_packed"])


def test_mxfp4_is_read_alike():
    fmt = fmt_of("mxfp4")
    scheme = float_scheme(4, "group", group_size=32, scale_dtype=torch.uint8)
    tensors = codec.quantize(fmt, random_weight(16, 352))
    expected = compressor("mxfp4-pack-quantized").decompress(by_suffix(fmt, tensors), scheme)["weight"]
    assert torch.equal(codec.dequantize(fmt, tensors, 16, 352), expected.float())

    state = {"weight": random_weight(16, 352, 1), "weight_scale": torch.full((16, 11), 2.0**-6)}
    written = compressor("mxfp4-pack-quantized").compress(state, scheme)
    expected = compressor("mxfp4-pack-quantized").decompress(written, scheme)["weight"]
    assert torch.equal(codec.dequantize(fmt, by_name(fmt, written), 16, 352), expected.float())


@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        ("fp8-tensor", "tensor", {}),
        ("fp8-channel", "channel", {}),
        ("fp8-block32x48", "block", {"block_structure": [32, 48]}),
        ("fp8-block128x128", "block", {"block_structure": [128, 128]}),
    ],
)
@pytest.mark.parametrize(("n", "k"), [(64, 96), (192, 320), (80, 352)])
def test_float_quantized_is_read_and_written_alike(name: str, strategy: str, options: dict[str, Any], n: int, k: int):
    fmt = fmt_of(name)
    scheme = float_scheme(8, strategy, **options)
    weight = random_weight(n, k)
    ours = codec.quantize(fmt, weight)
    scale = ours["scale"].reshape(1) if strategy == "tensor" else ours["scale"]
    written = compressor("float-quantized").compress({"weight": weight, "weight_scale": scale}, scheme)
    assert torch.equal(written["weight"].float(), ours["weight"].float())
    tensors = by_name(fmt, written)
    codec.check_matrix(fmt, tensors, n, k, "expert")
    expected = compressor("float-quantized").decompress(written, scheme)["weight"]
    assert torch.equal(codec.dequantize(fmt, tensors, n, k), expected)
