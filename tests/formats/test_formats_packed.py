from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of, int32, random_groups, random_weight, random_words, stream_values
from hypothesis import given
from hypothesis import strategies as st

from fanfold.errors import TensorError, UnsupportedError
from fanfold.formats import codec, packed
from fanfold.spec import WeightFormat

BITS = (2, 3, 4, 8)


def test_dequantised_by_hand():
    tensors = {
        "packed": int32(0xFEDCBA98, 0x7).reshape(1, 2),  # N = 1, K = 9: codes 8..15, 7
        "scale": torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16),  # the last group is one k
    }
    found = codec.dequantize(fmt_of("packed4-g8"), tensors, 1, 9)
    assert found.tolist() == [[0.5 * j for j in range(8)] + [-2.0]]


def test_zero_points_are_packed_along_n():
    fmt = fmt_of("packed4-g8-asym")
    zeros = torch.arange(20, dtype=torch.int32).reshape(2, 10) % 16  # G = 2, N = 10
    words = packed.pack_zeros(fmt, zeros)
    assert words.shape == (2, 2)
    assert torch.equal(words[:, 0], int32(0x76543210, 0x98))
    assert torch.equal(words[:, 1], int32(0x10FEDCBA, 0x32))
    tensors = {"zero_point": words, "scale": torch.ones(10, 2)}
    assert torch.equal(packed.unpack_zeros(fmt, tensors, 10, 16), zeros)


@given(
    bits=st.sampled_from(BITS),
    n=st.integers(1, 40),
    k=st.integers(1, 100),
    group=st.sampled_from([-1, 16, 32]),
    asymmetric=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_words_of_any_size(bits: int, n: int, k: int, group: int, asymmetric: bool, act_order: bool, seed: int):
    fmt = WeightFormat("packed", bits, group, symmetric=not asymmetric, act_order=act_order)
    groups, size = fmt.groups(k), k if group == -1 else group
    scale = torch.rand(n, groups, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    tensors = {"packed": random_words(n, -(-k * bits // 32), seed=seed), "scale": scale}
    if asymmetric:
        tensors["zero_point"] = random_words(-(-n * bits // 32), groups, seed=seed + 1)
    g_idx = random_groups(fmt, k, seed)
    if g_idx is not None:
        tensors["g_idx"] = g_idx
    found = codec.dequantize(fmt, tensors, n, k)
    row = seed % n
    codes = stream_values(tensors["packed"][row], bits, k)
    for i in (0, k // 2, k - 1):
        g = i // size if g_idx is None else int(g_idx[i])
        zero = stream_values(tensors["zero_point"][:, g], bits, n)[row] if asymmetric else 1 << (bits - 1)
        exact = float(scale[row, g]) * (codes[i] - zero)
        assert float(found[row, i]) == float(torch.tensor(exact, dtype=torch.float32))


@pytest.mark.parametrize("bits", BITS)
def test_b16_asymmetric_round_trip_at_sizes_that_fill_no_words(bits: int):
    fmt = fmt_of(f"packed{bits}-g32-asym")
    weight = random_weight(13, 75).abs()
    tensors = codec.quantize(fmt, weight)
    codec.check_matrix(fmt, tensors, 13, 75, "expert")
    step = tensors["scale"].float().repeat_interleave(32, 1)[:, :75]
    # half a step, and what the largest code moves when its scale is rounded to the 8 bits of bf16
    bound = 0.51 + (1 << bits) / 512
    assert ((codec.dequantize(fmt, tensors, 13, 75) - weight).abs() <= bound * step).all()


def test_b3_symmetric_files_ignore_zero_points():
    fmt = fmt_of("packed4-g32")
    tensors = codec.quantize(fmt, random_weight(16, 64))
    noise = {**tensors, "zero_point": random_words(2, 2)}
    assert torch.equal(codec.dequantize(fmt, noise, 16, 64), codec.dequantize(fmt, tensors, 16, 64))


def test_one_scale_a_row_may_lack_its_axis():
    fmt = fmt_of("packed8-channel")
    tensors = codec.quantize(fmt, random_weight(16, 64))
    flat = {**tensors, "scale": tensors["scale"].flatten()}
    assert torch.equal(codec.dequantize(fmt, flat, 16, 64), codec.dequantize(fmt, tensors, 16, 64))


def test_b14_too_many_scales_a_row_are_refused():
    tensors = codec.quantize(fmt_of("packed4-g32"), random_weight(16, 128))
    message = r"up\.weight_scale: found shape \[16, 4\]; expected shape \[16, 2\]"
    with pytest.raises(TensorError, match=message):
        codec.check_matrix(fmt_of("packed4-g64"), tensors, 16, 128, "up")
    with pytest.raises(TensorError, match=r"expected shape \[16, 1\]"):
        codec.check_matrix(fmt_of("packed4-channel"), tensors, 16, 128, "up")


def test_empty_matrices_are_refused():
    with pytest.raises(UnsupportedError, match="K = 0"):
        packed.shapes(fmt_of("packed4-g32"), 8, 0)
