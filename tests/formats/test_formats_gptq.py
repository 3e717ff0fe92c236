from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of, int32, random_groups, random_weight, random_words, stream_values
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fanfold.errors import ArgumentError, TensorError, UnsupportedError
from fanfold.formats import codec, gptq
from fanfold.spec import WeightFormat

BITS = (2, 3, 4, 8)


def zeros_of(name: str, qzeros: Tensor, n: int, **options: str) -> list[list[int]]:
    fmt = fmt_of(name)
    return gptq.unpack_zeros(fmt, {"qzeros": qzeros, "scales": torch.ones(len(qzeros), n)}, n, 32, **options).tolist()


def test_codes_by_hand():
    qweight = torch.stack([int32(0x76543210, 0xFEDCBA98)])  # K = 8, N = 2
    found = gptq.unpack(fmt_of("gptq4-g8"), {"qweight": qweight}, 2, 8)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]


def test_dequantised_by_hand():
    tensors = {
        "qweight": torch.stack([int32(0x76543210), int32(0xFEDCBA98)]),  # K = 16, N = 1
        "scales": torch.tensor([[0.5], [2.0]], dtype=torch.float16),
    }
    found = gptq.dequantize(fmt_of("gptq4-g8"), tensors, 1, 16)
    assert found.tolist() == [[0.5 * (q - 8) for q in range(8)] + [2.0 * (q - 8) for q in range(8, 16)]]


def test_asymmetric_by_hand_in_both_versions():
    codes = torch.full((8, 8), 9, dtype=torch.uint8)
    zeros = torch.arange(1, 9, dtype=torch.int32).reshape(1, 8)
    for name, word in (("gptq4-g8-asym-v1", 0x76543210), ("gptq4-g8-asym-v2", 0x87654321)):
        fmt = fmt_of(name)
        qzeros = gptq.pack_zeros(fmt, zeros)
        assert torch.equal(qzeros, int32(word).reshape(1, 1))
        tensors = {**gptq.pack(fmt, codes), "qzeros": qzeros, "scales": torch.ones(1, 8, dtype=torch.float16)}
        found = gptq.dequantize(fmt, tensors, 8, 8)
        assert found.tolist() == [[9.0 - zero] * 8 for zero in range(1, 9)]


@pytest.mark.parametrize(("bits", "word"), [(2, 0x55555555), (4, 0x77777777), (8, 0x7F7F7F7F)], ids=["2", "4", "8"])
def test_the_words_of_symmetric_zeros_in_v1(bits: int, word: int):
    n = 32 // bits
    zeros = torch.full((1, n), 1 << (bits - 1), dtype=torch.int32)
    assert torch.equal(gptq.pack_zeros(fmt_of(f"gptq{bits}-g32-asym-v1"), zeros), int32(word).reshape(1, 1))
    assert zeros_of(f"gptq{bits}-g32-asym-v1", int32(word).reshape(1, 1), n) == zeros.tolist()


def test_three_bit_zeros_that_span_two_words():
    # 4 is stored as 3 = 0b011 in all 32 fields; fields 10 and 21 lie in two words each.
    words = int32(0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D).reshape(1, 3)
    assert zeros_of("gptq3-g32-asym-v1", words, 32) == [[4] * 32]
    assert torch.equal(gptq.pack_zeros(fmt_of("gptq3-g32-asym-v1"), torch.full((1, 32), 4)), words)


def test_three_bit_zero_of_0_is_stored_as_7_and_borrows_from_nobody():
    zeros = torch.full((1, 32), 5)
    zeros[0, [0, 10, 21, 31]] = 0
    words = gptq.pack_zeros(fmt_of("gptq3-g32-asym-v1"), zeros)
    assert stream_values(words[0], 3, 32) == [7 if zero == 0 else 4 for zero in zeros[0].tolist()]
    assert zeros_of("gptq3-g32-asym-v1", words, 32) == zeros.tolist()


@pytest.mark.parametrize("bits", BITS)
def test_b1_the_same_weights_stored_as_v1_and_as_v2(bits: int):
    weight = random_weight(32, 96)
    v1, v2 = fmt_of(f"gptq{bits}-g32-asym-v1"), fmt_of(f"gptq{bits}-g32-asym-v2")
    one, two = gptq.quantize(v1, weight), gptq.quantize(v2, weight)
    assert not torch.equal(one["qzeros"], two["qzeros"])
    assert torch.equal(one["qweight"], two["qweight"])
    assert torch.equal(gptq.dequantize(v1, one, 32, 96), gptq.dequantize(v2, two, 32, 96))


@pytest.mark.parametrize("bits", BITS)
def test_b3_symmetric_files_ignore_what_qzeros_holds(bits: int):
    fmt = fmt_of(f"gptq{bits}-g32")
    tensors = gptq.quantize(fmt, random_weight(32, 64))
    expected = codec.dequantize(fmt, tensors, 32, 64)
    noise = {**tensors, "qzeros": random_words(*tensors["qzeros"].shape)}
    assert torch.equal(codec.dequantize(fmt, noise, 32, 64), expected)
    del tensors["qzeros"]
    assert torch.equal(codec.dequantize(fmt, tensors, 32, 64), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_b4_group_size_minus_1_is_one_group(bits: int):
    fmt = fmt_of(f"gptq{bits}-channel")
    weight = random_weight(8, 352)
    tensors = codec.quantize(fmt, weight)
    assert tensors["scales"].shape == (1, 8)
    step = tensors["scales"].float().T
    assert ((codec.dequantize(fmt, tensors, 8, 352) - weight).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_b6_shapes_of_every_group_size_at_k_1344(group: int):
    fmt = fmt_of(f"gptq4-g{group}")
    groups = -(-1344 // group)  # 84, 42, 21, 11 with a short last one
    wanted = gptq.shapes(fmt, 16, 1344)
    assert wanted["qweight"].shape == (168, 16)
    assert wanted["scales"].shape == (groups, 16)
    assert wanted["qzeros"].shape == (groups, 2)
    tensors = codec.quantize(fmt, random_weight(16, 1344))
    codec.check_matrix(fmt, tensors, 16, 1344, "expert")
    found = codec.dequantize(fmt, tensors, 16, 1344)
    scale_of_last = tensors["scales"][groups - 1].float()
    q = gptq.unpack(fmt, tensors, 16, 1344)[:, -1]
    assert torch.equal(found[:, -1], scale_of_last * (q.float() - 8))


def test_b9_neighbouring_groups_with_scales_ten_times_apart():
    fmt = fmt_of("gptq4-g32")
    scales = torch.tensor([1.0, 10.0, 0.1, 100.0]).to(torch.float16).unsqueeze(1).expand(4, 8).contiguous()
    tensors = {"qweight": random_words(16, 8), "scales": scales}
    q = gptq.unpack(fmt, tensors, 8, 128).float()
    found = codec.dequantize(fmt, tensors, 8, 128)
    for group in range(4):
        at = slice(32 * group, 32 * group + 32)
        assert torch.equal(found[:, at], (q[:, at] - 8) * scales[group, 0].float())


def test_b11_group_size_64():
    fmt = fmt_of("gptq4-g64-asym-v1")
    weight = random_weight(16, 352)  # five groups and a half
    tensors = codec.quantize(fmt, weight)
    assert tensors["scales"].shape == (6, 16)
    step = tensors["scales"].float().T.repeat_interleave(64, 1)[:, :352]
    assert ((codec.dequantize(fmt, tensors, 16, 352) - weight).abs() <= 0.51 * step).all()


def test_b12_no_g_idx_where_there_is_no_act_order():
    fmt = fmt_of("gptq4-g32")
    tensors = codec.quantize(fmt, random_weight(8, 64))
    assert "g_idx" not in tensors
    trivial = {**tensors, "g_idx": (torch.arange(64) // 32).to(torch.int32)}
    assert torch.equal(codec.dequantize(fmt, tensors, 8, 64), codec.dequantize(fmt, trivial, 8, 64))


def test_b14_scales_with_too_many_rows_are_refused_never_read_as_another_group_size():
    fmt = fmt_of("gptq4-g128")
    tensors = codec.quantize(fmt_of("gptq4-g64"), random_weight(8, 256))
    with pytest.raises(TensorError, match=r"expert 3\.scales: found shape \[4, 8\]; expected shape \[2, 8\]"):
        codec.check_matrix(fmt, tensors, 8, 256, "expert 3")
    with pytest.raises(TensorError, match="scales"):
        codec.dequantize(fmt, tensors, 8, 256)


@pytest.mark.parametrize("bits", BITS)
def test_b16_asymmetric_experts(bits: int):
    fmt = fmt_of(f"gptq{bits}-g32-asym-v1")
    weight = random_weight(32, 64).abs() + 0.01  # all of one sign: zero points far from the middle
    tensors = codec.quantize(fmt, weight)
    assert gptq.unpack_zeros(fmt, tensors, 32, 64).unique().tolist() == [0]
    step = tensors["scales"].float().T.repeat_interleave(32, 1)
    assert ((codec.dequantize(fmt, tensors, 32, 64) - weight).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("name", ["gptq8-g128", "gptq8-channel", "gptq8-g128-asym-v1"])
def test_b17_eight_bits(name: str):
    fmt = fmt_of(name)
    weight = random_weight(8, 256)
    tensors = codec.quantize(fmt, weight)
    relative = (codec.dequantize(fmt, tensors, 8, 256) - weight).norm() / weight.norm()
    assert relative < 0.02  # 0.012 at 8 bits, 16 times as much at 4


@pytest.mark.parametrize(
    ("zeros", "word", "by_fields"),
    [
        # The low zero is 0: 0x50 - 0x11 borrows from the second field, 15 and 3 are stored.
        ([0, 5, 8, 8, 8, 8, 8, 8], 0x7777773F, [16, 4, 8, 8, 8, 8, 8, 8]),
        # The high zero is 0: the borrow leaves the word.
        ([8, 8, 8, 8, 8, 8, 8, 0], 0xF7777777, [8, 8, 8, 8, 8, 8, 8, 16]),
        ([0] * 8, 0xEEEEEEEF, [16, 15, 15, 15, 15, 15, 15, 15]),
    ],
)
def test_b25_stored_15_in_v1_is_a_borrow_undone_by_one_addition(zeros: list[int], word: int, by_fields: list[int]):
    name = "gptq4-g32-asym-v1"
    stored = gptq.pack_zeros(fmt_of(name), torch.tensor([zeros]))
    assert torch.equal(stored, int32(word).reshape(1, 1))
    assert zeros_of(name, stored, 8) == [zeros]
    assert zeros_of(name, stored, 8, v1="fields") == [by_fields]


@pytest.mark.parametrize(("bits", "largest"), [(2, 4), (3, 8), (4, 16), (8, 256)])
def test_b25_field_wise_option_gives_the_largest_stored_field_plus_1(bits: int, largest: int):
    ones = torch.full((1, bits), -1, dtype=torch.int32)  # 32 fields, all bits set
    assert zeros_of(f"gptq{bits}-g32-asym-v1", ones, 32, v1="fields") == [[largest] * 32]


@given(bits=st.sampled_from(BITS), version=st.sampled_from(["v1", "v2"]), seed=st.integers(0, 999))
def test_zeros_round_trip_whatever_they_are(bits: int, version: str, seed: int):
    name = f"gptq{bits}-g32-asym-{version}"
    generator = torch.Generator().manual_seed(seed)
    zeros = torch.randint(0, 1 << bits, (3, 64), generator=generator, dtype=torch.int32)
    assert zeros_of(name, gptq.pack_zeros(fmt_of(name), zeros), 64) == zeros.tolist()


@given(bits=st.sampled_from(BITS), seed=st.integers(0, 999))
def test_any_v1_words_are_zeros_and_pack_back_to_themselves(bits: int, seed: int):
    name = f"gptq{bits}-g32-asym-v1"
    words = random_words(2, 2 * bits, seed=seed)
    zeros = zeros_of(name, words, 64)
    assert {zero >> bits for row in zeros for zero in row} == {0}
    assert torch.equal(gptq.pack_zeros(fmt_of(name), torch.tensor(zeros)), words)


@given(
    bits=st.sampled_from(BITS),
    steps=st.integers(1, 4),
    n=st.integers(1, 20),
    group=st.sampled_from([-1, 1, 16, 24, 32, 128]),
    act_order=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_words_dequantise_to_scale_times_difference(
    bits: int, steps: int, n: int, group: int, act_order: bool, seed: int
):
    fmt = WeightFormat("gptq", bits, group, act_order=act_order)
    k = 32 * steps
    tensors = {
        "qweight": random_words(k * bits // 32, n, seed=seed),
        "scales": torch.rand(fmt.groups(k), n, generator=torch.Generator().manual_seed(seed)).to(torch.float16),
    }
    g_idx = random_groups(fmt, k, seed)
    if g_idx is not None:
        tensors["g_idx"] = g_idx
    found = codec.dequantize(fmt, tensors, n, k)
    size = k if group == -1 else group
    row = seed % n
    codes = stream_values(tensors["qweight"][:, row], bits, k)
    for i in (0, k // 2, k - 1):
        g = i // size if g_idx is None else int(g_idx[i])
        # scale * an integer below 2^8 is exact in double; one rounding to fp32
        exact = float(tensors["scales"][g, row]) * (codes[i] - (1 << (bits - 1)))
        assert float(found[row, i]) == float(torch.tensor(exact, dtype=torch.float32))


def test_act_order_differs_from_plain_groups():
    fmt = fmt_of("gptq4-g32-actorder")
    weight = random_weight(8, 96)
    weight[:, ::3] *= 50  # columns that belong together, but do not lie together
    g_idx = (torch.arange(96) % 3).to(torch.int32)
    ordered = codec.dequantize(fmt, codec.quantize(fmt, weight, g_idx), 8, 96)
    plain = fmt_of("gptq4-g32")
    unordered = codec.dequantize(plain, codec.quantize(plain, weight), 8, 96)
    error, plain_error = (ordered - weight).abs()[:, 1::3].sum(), (unordered - weight).abs()[:, 1::3].sum()
    assert error < plain_error / 4


def test_the_shapes_of_a_symmetric_matrix_whose_zeros_fill_no_words():
    assert "qzeros" not in gptq.shapes(fmt_of("gptq4-g32"), 12, 64)
    assert not gptq.shapes(fmt_of("gptq4-g32"), 16, 64)["qzeros"].required
    assert gptq.shapes(fmt_of("gptq4-g32-asym-v1"), 16, 64)["qzeros"].required


@pytest.mark.parametrize(
    ("name", "n", "k", "message"),
    [
        ("gptq4-g32", 8, 44, "K = 44; expected K a positive multiple of 8"),
        ("gptq3-g32", 8, 48, "K = 48; expected K a positive multiple of 32"),
        ("gptq2-g32", 8, 8, "K = 8; expected K a positive multiple of 16"),
        ("gptq8-g32", 8, 0, "K = 0; expected K a positive multiple of 4"),
        ("gptq4-g32-asym-v1", 12, 32, "N = 12; expected N a positive multiple of 8"),
        ("gptq4-g32", 0, 32, "N = 0"),
        ("gptq4-g32-asym", 8, 32, "neither v1 nor v2"),
    ],
)
def test_sizes_that_fill_no_words_are_refused(name: str, n: int, k: int, message: str):
    with pytest.raises(UnsupportedError, match=message):
        gptq.shapes(fmt_of(name), n, k)


def test_pack_refuses_what_it_could_not_read_back():
    fmt = fmt_of("gptq4-g32-asym-v1")
    with pytest.raises(UnsupportedError, match="K = 12"):
        gptq.pack(fmt, torch.zeros(8, 12, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="N = 4"):
        gptq.pack_zeros(fmt, torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="0 to 16"):
        gptq.pack_zeros(fmt, torch.tensor([[0, 16, 0, 0, 0, 0, 0, 0]]))
    with pytest.raises(ArgumentError, match="g_idx"):
        gptq.quantize(fmt_of("gptq4-g32-actorder"), random_weight(8, 64))
