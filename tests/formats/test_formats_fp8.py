from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of, random_weight
from hypothesis import given
from hypothesis import strategies as st

from fanfold.errors import TensorError, UnsupportedError
from fanfold.formats import codec, fp8
from fanfold.spec import WeightFormat


def test_blocks_by_hand_partial_in_both_directions():
    fmt = fmt_of("fp8-block2x3")
    weight = torch.full((3, 5), 1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    found = codec.dequantize(fmt, {"weight": weight, "scale": scale}, 3, 5)
    assert found.tolist() == [
        [1.5, 1.5, 1.5, 3.0, 3.0],
        [1.5, 1.5, 1.5, 3.0, 3.0],
        [6.0, 6.0, 6.0, 12.0, 12.0],
    ]


def test_a_scale_a_row_and_a_scale_a_matrix_by_hand():
    weight = torch.tensor([[1.0, -2.0], [448.0, 0.5]]).to(torch.float8_e4m3fn)
    rows = {"weight": weight, "scale": torch.tensor([[2.0], [0.25]], dtype=torch.bfloat16)}
    assert codec.dequantize(fmt_of("fp8-channel"), rows, 2, 2).tolist() == [[2.0, -4.0], [112.0, 0.125]]
    whole = {"weight": weight, "scale": torch.tensor(0.5)}
    assert codec.dequantize(fmt_of("fp8-tensor"), whole, 2, 2).tolist() == [[0.5, -1.0], [224.0, 0.25]]


def test_every_e4m3_byte():
    data = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8).reshape(2, 127)
    tensors = {"weight": data.view(torch.float8_e4m3fn), "scale": torch.tensor(1.0)}
    codec.check_values(fmt_of("fp8-tensor"), tensors, "expert")
    found = codec.dequantize(fmt_of("fp8-tensor"), tensors, 2, 127).flatten().tolist()
    for byte, value in zip(data.flatten().tolist(), found, strict=True):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        assert value == (-size if byte >> 7 else size)


@pytest.mark.parametrize("intermediate", [192, 320, 704, 80])
def test_d16_blocks_of_128_at_sizes_they_do_not_divide(intermediate: int):
    fmt = fmt_of("fp8-block128x128")
    for n, k in ((intermediate, 256), (256, intermediate)):
        weight = random_weight(n, k)
        tensors = codec.quantize(fmt, weight)
        codec.check_matrix(fmt, tensors, n, k, "expert")
        assert tensors["scale"].shape == (-(-n // 128), -(-k // 128))
        found = codec.dequantize(fmt, tensors, n, k)
        assert (found - weight).norm() / weight.norm() < 0.04
        exact = tensors["weight"][n - 1, k - 1].float() * tensors["scale"][-1, -1]
        assert found[n - 1, k - 1] == exact


@given(
    n=st.integers(1, 20),
    k=st.integers(1, 20),
    rows=st.sampled_from([-1, 1, 3, 8]),
    columns=st.sampled_from([-1, 1, 5, 16]),
)
def test_any_block_scales_each_weight_once(n: int, k: int, rows: int, columns: int):
    fmt = WeightFormat("fp8", 8, block=(rows, columns))
    height, width = n if rows == -1 else rows, k if columns == -1 else columns
    field = fp8.shapes(fmt, n, k)["scale"]
    size = -(-n // height), -(-k // width)
    scale = torch.arange(1.0, size[0] * size[1] + 1).reshape(field.shape)
    tensors = {"weight": torch.ones(n, k).to(torch.float8_e4m3fn), "scale": scale}
    found = codec.dequantize(fmt, tensors, n, k).tolist()
    assert found == [[float(i // height * size[1] + j // width + 1) for j in range(k)] for i in range(n)]


def test_the_spellings_of_scales_that_writers_use():
    weight = random_weight(256, 384)
    for name, shape in (("fp8-tensor", (1,)), ("fp8-channel", (256,)), ("fp8-block128x128", (2, 1, 3, 1))):
        fmt = fmt_of(name)
        tensors = codec.quantize(fmt, weight)
        other = {**tensors, "scale": tensors["scale"].reshape(shape)}
        assert torch.equal(codec.dequantize(fmt, other, 256, 384), codec.dequantize(fmt, tensors, 256, 384))


def test_scales_of_other_blocks_are_refused():
    tensors = codec.quantize(fmt_of("fp8-block32x48"), random_weight(64, 96))
    with pytest.raises(TensorError, match=r"up\.weight_scale_inv \(or weight_scale\): found shape \[2, 2\]"):
        codec.check_matrix(fmt_of("fp8-block64x48"), tensors, 64, 96, "up")
    transposed = {**tensors, "scale": torch.ones(3, 2)}
    with pytest.raises(TensorError, match=r"found shape \[3, 2\]; expected shape \[2, 3\]"):
        codec.check_matrix(fmt_of("fp8-block32x32"), transposed, 64, 96, "up")


def test_quantised_weights_use_the_whole_range_and_zero_blocks_stay_zero():
    weight = random_weight(8, 64)
    tensors = codec.quantize(fmt_of("fp8-channel"), weight)
    size = tensors["weight"].float().abs().amax(1)
    assert size.tolist() == [448.0] * 4 + [0.0] + [448.0] * 3
    assert tensors["scale"][4].item() == 1.0
    assert torch.equal(codec.dequantize(fmt_of("fp8-channel"), tensors, 8, 64)[4], torch.zeros(64))
    tiny = codec.quantize(fmt_of("fp8-tensor"), torch.tensor([[1e-45, 0.0]]))  # amax / 448 is 0 in fp32
    codec.check_values(fmt_of("fp8-tensor"), tiny, "expert")


@pytest.mark.parametrize("block", [None, (0, 128), (128, -2)])
def test_a_block_that_is_none_is_refused(block: tuple[int, int] | None):
    with pytest.raises(UnsupportedError, match="fp8 block"):
        fp8.shapes(WeightFormat("fp8", 8, block=block), 8, 8)
