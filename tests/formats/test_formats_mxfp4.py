from __future__ import annotations

import math

import pytest
import torch
from format_cases import fmt_of, random_weight
from hypothesis import given
from hypothesis import strategies as st

from fanfold.errors import UnsupportedError
from fanfold.formats import codec, mxfp4
from fanfold.spec import WeightFormat

FMT = fmt_of("mxfp4")


def test_every_e8m0_byte():
    found = mxfp4.decode_scale(torch.arange(256, dtype=torch.uint8)).tolist()
    assert found[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(found[255])


def test_dequantised_by_hand():
    tensors = {
        "packed": torch.tensor([[0x7A] * 16 + [0x01] * 16], dtype=torch.uint8),  # -1 6 ...; 0.5 0 ...
        "scale": torch.tensor([[130, 126]], dtype=torch.uint8),
    }
    assert codec.dequantize(FMT, tensors, 1, 64).tolist() == [[-8.0, 48.0] * 16 + [0.25, 0.0] * 16]


def test_quantised_by_hand():
    weight = torch.zeros(1, 96)
    weight[0, 0], weight[0, 1], weight[0, 2] = 7.9, -3.0, 0.1  # exponent floor(log2 7.9) - 2 = 0
    weight[0, 32], weight[0, 33] = 8.0, -1.0  # exponent 1
    tensors = codec.quantize(FMT, weight)
    assert tensors["scale"].tolist() == [[127, 128, 127]]
    codes = mxfp4.unpack(FMT, tensors, 1, 96).tolist()[0]
    assert codes[:3] == [7, 13, 0]
    assert codes[32:34] == [6, 9]
    assert set(codes[64:]) == {0}


@given(n=st.integers(1, 9), groups=st.integers(1, 4), seed=st.integers(0, 99))
def test_any_bytes_dequantise_and_pack_back(n: int, groups: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    k = 32 * groups
    tensors = {
        "packed": torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
        "scale": torch.randint(0, 253, (n, groups), generator=generator, dtype=torch.uint8),
    }
    codes = mxfp4.unpack(FMT, tensors, n, k)
    assert torch.equal(mxfp4.pack(FMT, codes)["packed"], tensors["packed"])
    found = codec.dequantize(FMT, tensors, n, k)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for i in (0, k // 2, k - 1):
        code = int(tensors["packed"][n - 1, i // 2]) >> (4 * (i % 2)) & 15
        size = values[code & 7] * 2.0 ** (int(tensors["scale"][n - 1, i // 32]) - 127)
        assert float(found[n - 1, i]) == (-size if code & 8 else size)


def test_quantising_dequantised_weights_changes_nothing():
    once = codec.quantize(FMT, random_weight(16, 352))
    dense = codec.dequantize(FMT, once, 16, 352)
    assert torch.equal(codec.dequantize(FMT, codec.quantize(FMT, dense), 16, 352), dense)


def test_the_smallest_and_the_largest_weights():
    for value in (1e-45, 1e-38, 3e38):
        tensors = codec.quantize(FMT, torch.full((1, 32), value))
        codec.check_values(FMT, tensors, "expert")
        assert torch.isfinite(codec.dequantize(FMT, tensors, 1, 32)).all()


def test_other_groups_and_odd_sizes_are_refused():
    with pytest.raises(UnsupportedError, match="K = 80; expected K a positive multiple of 32"):
        mxfp4.shapes(FMT, 8, 80)
    with pytest.raises(UnsupportedError, match="group_size 16"):
        mxfp4.shapes(WeightFormat("mxfp4", 4, 16), 8, 64)
