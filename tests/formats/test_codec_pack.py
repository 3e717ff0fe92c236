"""pack and unpack are inverse for every format that has codes."""

from __future__ import annotations

import pytest
import torch

from fanfold import reference
from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.spec import WeightFormat

CODED = [
    "gptq2-g32",
    "gptq3-g32",
    "gptq4-g32",
    "gptq8-g32",
    "awq4-g32",
    "packed3-g32",
    "packed4-channel",
    "nvfp4",
    "mxfp4",
]


@pytest.mark.parametrize("name", CODED)
def test_unpack_undoes_pack(name: str) -> None:
    fmt = WeightFormat.parse(name)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    tensors = reference.quantize(fmt, weight)
    codes = reference.unpack(fmt, tensors, 32, 64)
    assert codes.shape == (32, 64)
    assert len(codes.unique()) > 2
    for field, words in reference.pack(fmt, codes).items():
        assert torch.equal(words, tensors[field])


def test_gptq_packs_low_bits_first() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8)
    words = reference.pack(WeightFormat.parse("gptq4-channel"), codes)["qweight"]
    assert words.tolist() == [[0x87654321 - 2**32]]


def test_formats_without_codes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="pack: found fp8-tensor"):
        reference.pack(WeightFormat.parse("fp8-tensor"), torch.zeros(8, 8, dtype=torch.uint8))


def test_codes_out_of_range_are_refused() -> None:
    with pytest.raises(ArgumentError):
        reference.pack(WeightFormat.parse("gptq4-channel"), torch.full((8, 8), 16, dtype=torch.uint8))
