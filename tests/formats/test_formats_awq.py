from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of, int32, random_weight, random_words
from hypothesis import given
from hypothesis import strategies as st

from fanfold.errors import TensorError, UnsupportedError
from fanfold.formats import awq, codec


def test_the_order_of_columns_by_hand():
    # Columns 0..7 of one k hold 0..7; nibbles from the lowest: columns 0 2 4 6 1 3 5 7.
    tensors = {"qweight": int32(0x75316420).reshape(1, 1)}
    fmt = fmt_of("awq4-g32")
    codes = torch.arange(8, dtype=torch.uint8).reshape(8, 1)  # N = 8, K = 1
    assert torch.equal(awq.unpack(fmt, tensors, 8, 1), codes)
    assert torch.equal(awq.pack(fmt, codes)["qweight"], tensors["qweight"])


def test_zeros_have_the_same_order_and_are_stored_as_they_are():
    fmt = fmt_of("awq4-g32-asym")
    tensors = {"qzeros": int32(0x75316420, 0xFDB9ECA8).reshape(1, 2), "scales": torch.ones(1, 16)}
    zeros = awq.unpack_zeros(fmt, tensors, 16, 32)
    assert zeros.tolist() == [list(range(16))]
    assert torch.equal(awq.pack_zeros(fmt, zeros), tensors["qzeros"])


def test_dequantised_by_hand():
    tensors = {
        "qweight": int32(0x75316420, 0xFDB9ECA8).reshape(2, 1),  # K = 2, N = 8
        "qzeros": int32(0x75316420).reshape(1, 1),
        "scales": torch.full((1, 8), 0.25, dtype=torch.bfloat16),
    }
    found = codec.dequantize(fmt_of("awq4-channel-asym"), tensors, 8, 2)
    assert found.tolist() == [[0.0, 0.25 * 8]] * 8


def test_b3_symmetric_files_ignore_what_qzeros_holds():
    fmt = fmt_of("awq4-g32")
    tensors = codec.quantize(fmt, random_weight(16, 64))
    expected = codec.dequantize(fmt, tensors, 16, 64)
    noise = {**tensors, "qzeros": random_words(*tensors["qzeros"].shape)}
    assert torch.equal(codec.dequantize(fmt, noise, 16, 64), expected)
    del tensors["qzeros"]
    assert torch.equal(codec.dequantize(fmt, tensors, 16, 64), expected)


@given(
    n=st.integers(1, 6),
    k=st.integers(1, 80),
    group=st.sampled_from([-1, 16, 32, 64]),
    seed=st.integers(0, 99),
)
def test_b16_random_words_of_asymmetric_files(n: int, k: int, group: int, seed: int):
    fmt = fmt_of("awq4-channel-asym" if group == -1 else f"awq4-g{group}-asym")
    groups = fmt.groups(k)
    tensors = {
        "qweight": random_words(k, n, seed=seed),
        "qzeros": random_words(groups, n, seed=seed + 1),
        "scales": torch.rand(groups, 8 * n, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16),
    }
    codes = awq.unpack(fmt, tensors, 8 * n, k)
    zeros = awq.unpack_zeros(fmt, tensors, 8 * n, k)
    assert torch.equal(awq.pack(fmt, codes)["qweight"], tensors["qweight"])
    assert torch.equal(awq.pack_zeros(fmt, zeros), tensors["qzeros"])
    found = codec.dequantize(fmt, tensors, 8 * n, k)
    for column in range(8 * n):
        nibble = [0, 4, 1, 5, 2, 6, 3, 7][column % 8]
        q = int(tensors["qweight"][k - 1, column // 8]) >> (4 * nibble) & 15
        z = int(tensors["qzeros"][groups - 1, column // 8]) >> (4 * nibble) & 15
        assert float(found[column, k - 1]) == float(tensors["scales"][groups - 1, column]) * (q - z)


def test_sizes_and_act_order_that_the_layout_lacks_are_refused():
    with pytest.raises(UnsupportedError, match="N = 12; expected N a positive multiple of 8"):
        awq.shapes(fmt_of("awq4-g32"), 12, 64)
    with pytest.raises(UnsupportedError, match="act-order"):
        awq.shapes(fmt_of("awq4-g32-actorder"), 16, 64)
    with pytest.raises(UnsupportedError, match="act-order"):
        codec.quantize(fmt_of("awq4-g32-actorder"), random_weight(16, 64), torch.zeros(64, dtype=torch.int32))


def test_b14_scales_with_too_many_rows_are_refused():
    tensors = codec.quantize(fmt_of("awq4-g32-asym"), random_weight(16, 128))
    with pytest.raises(TensorError, match=r"up\.scales: found shape \[4, 16\]; expected shape \[2, 16\]"):
        codec.check_matrix(fmt_of("awq4-g64-asym"), tensors, 16, 128, "up")
