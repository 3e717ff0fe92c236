from __future__ import annotations

import pytest
import torch
from format_cases import NAMES, fmt_of, random_groups, random_weight
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fanfold.errors import ArgumentError, FanfoldError, TensorError, UnsupportedError
from fanfold.formats import codec
from fanfold.spec import ProjectionWeights, WeightFormat
from fanfold.spec.weight_format import DENSE_KINDS, INTEGER_BITS

# relative error of rounding normal weights to nearest; 2-bit codes are that coarse
ERROR = {2: 0.8, 3: 0.3, 4: 0.16, 8: 0.04, 16: 0.01, 32: 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_quantised_matrices_are_what_shapes_says_and_near_the_weights(name: str):
    fmt = fmt_of(name)
    weight = random_weight(96, 352)  # K = 352: a short last group of 32 in 64 and of 96 in 128
    tensors = codec.quantize(fmt, weight, random_groups(fmt, 352))
    wanted = codec.shapes(fmt, 96, 352)
    assert {key for key, field in wanted.items() if field.required} <= set(tensors) <= set(wanted)
    for key, tensor in tensors.items():
        assert tuple(tensor.shape) == wanted[key].shape
        assert tensor.dtype in wanted[key].dtypes
        assert tensor.is_contiguous()
    codec.check_values(fmt, tensors, "expert")
    found = codec.dequantize(fmt, tensors, 96, 352)
    assert found.dtype == torch.float32
    assert found.shape == (96, 352)
    assert (found - weight).norm() / weight.norm() <= ERROR[fmt.bits]


@pytest.mark.parametrize("name", [name for name in NAMES if fmt_of(name).kind in codec.CODED])
def test_codes_are_bytes_and_pack_back(name: str):
    fmt = fmt_of(name)
    tensors = codec.quantize(fmt, random_weight(32, 160), random_groups(fmt, 160))
    codes = codec.unpack(fmt, tensors, 32, 160)
    assert codes.dtype == torch.uint8
    assert codes.shape == (32, 160)
    assert int(codes.max()) < 1 << fmt.bits
    for key, words in codec.CODED[fmt.kind].pack(fmt, codes).items():
        assert torch.equal(words, tensors[key])


@pytest.mark.parametrize("name", [name for name in NAMES if fmt_of(name).kind in INTEGER_BITS])
def test_zero_points_pack_back(name: str):
    fmt = fmt_of(name)
    tensors = codec.quantize(fmt, random_weight(32, 160), random_groups(fmt, 160))
    module = codec.INTEGER[fmt.kind]
    zeros = module.unpack_zeros(fmt, tensors, 32, 160)
    assert zeros.dtype == torch.int32
    assert zeros.shape == (fmt.groups(160), 32)
    stored = tensors.get("zero_point" if fmt.kind == "packed" else "qzeros")
    if stored is not None:
        assert torch.equal(module.pack_zeros(fmt, zeros), stored)
    if fmt.symmetric:
        assert zeros.unique().tolist() == [1 << (fmt.bits - 1)]


def test_every_kind_has_a_codec():
    assert set(codec.CODECS) == {*DENSE_KINDS, *INTEGER_BITS, "nvfp4", "mxfp4", "fp8"}
    for kind in codec.CODECS:
        assert codec.codec(kind).FIELDS


@pytest.mark.parametrize("name", ["bf16", "fp8-tensor"])
def test_formats_without_codes_refuse_to_unpack(name: str):
    tensors = codec.quantize(fmt_of(name), random_weight(8, 32))
    with pytest.raises(UnsupportedError, match="expected one of gptq, awq, packed, nvfp4, mxfp4"):
        codec.unpack(fmt_of(name), tensors, 8, 32)


def test_what_can_not_be_quantised_is_refused():
    with pytest.raises(ArgumentError, match="found values that are not finite"):
        codec.quantize(fmt_of("bf16"), torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ArgumentError, match="bfloat16"):
        codec.quantize(fmt_of("bf16"), torch.ones(2, 2, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match=r"\[4\]"):
        codec.quantize(fmt_of("bf16"), torch.ones(4))
    with pytest.raises(ArgumentError, match="expected None, as the format has no act-order"):
        codec.quantize(fmt_of("gptq4-g32"), random_weight(8, 32), torch.zeros(32, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="g_idx: found none"):
        codec.quantize(fmt_of("packed4-g32-actorder"), random_weight(8, 32))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named_not_a_key_error(name: str):
    fmt = fmt_of(name)
    tensors = codec.quantize(fmt, random_weight(32, 128), random_groups(fmt, 128))
    required = [key for key, field in codec.shapes(fmt, 32, 128).items() if field.required]
    for key in required:
        less = {other: tensor for other, tensor in tensors.items() if other != key}
        with pytest.raises(TensorError, match="no such tensor"):
            codec.dequantize(fmt, less, 32, 128)


def test_an_expert_and_half_of_a_projection():
    fmt = fmt_of("gptq4-g32")
    weights = [[random_weight(16, 64, 10 * e + p) for p in (0, 1)] for e in (0, 1, 2)]
    rows = [[codec.quantize(fmt, w) for w in row] for row in weights]
    tensors = {key: torch.stack([torch.stack([m[key] for m in row]) for row in rows]) for key in rows[0][0]}
    projection = ProjectionWeights(fmt, 16, 64, tensors)
    for e in (0, 1, 2):
        for p in (0, 1):
            found = codec.dequantize_expert(projection, e, p)
            assert torch.equal(found, codec.dequantize(fmt, rows[e][p], 16, 64))
            assert (found - weights[e][p]).norm() < (found - weights[e - 1][p]).norm()


def plain_groups(fmt: WeightFormat, k: int) -> Tensor:
    return torch.arange(k, dtype=torch.int32) // (k if fmt.group_size == -1 else fmt.group_size)


def random_field(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator, sound: bool) -> Tensor:
    """Random bytes; `sound` takes out what no scale or weight may be."""
    octets = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if sound and dtype == torch.float8_e4m3fn:
        octets[(octets & 0x7F) == 0x7F] = 1
    tensor = octets.view(dtype).squeeze(-1)
    return tensor.nan_to_num(1, 1, 1).abs() if sound and dtype.itemsize > 1 and dtype.is_floating_point else tensor


@given(
    name=st.sampled_from(NAMES),
    n=st.integers(1, 4),
    k=st.integers(1, 5),
    seed=st.integers(0, 9999),
    sound=st.booleans(),
)
def test_random_bytes_give_numbers_or_one_of_our_errors(name: str, n: int, k: int, seed: int, sound: bool):
    fmt = fmt_of(name)
    n, k = (n * 32, k * 32) if sound else (n, k * 8)
    generator = torch.Generator().manual_seed(seed)
    try:
        wanted = codec.shapes(fmt, n, k)
        tensors = {key: random_field(f.dtypes[0], f.shape, generator, sound) for key, f in wanted.items()}
        g_idx = random_groups(fmt, k, seed)
        if "g_idx" in wanted and sound:
            tensors["g_idx"] = g_idx if g_idx is not None else plain_groups(fmt, k)
        if fmt.kind == "mxfp4" and sound:
            tensors["scale"].clamp_(max=254)
        codec.check_matrix(fmt, tensors, n, k, "expert")
        codec.check_values(fmt, tensors, "expert")
    except FanfoldError:
        assert not sound
        return
    found = codec.dequantize(fmt, tensors, n, k)
    assert found.shape == (n, k)
    assert not found.isnan().any()
