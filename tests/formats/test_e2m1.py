from __future__ import annotations

import math

import torch

from fanfold.formats.e2m1 import VALUES, decode, encode, pack_nibbles, unpack_nibbles


def test_all_sixteen_values():
    expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    found = decode(torch.arange(16, dtype=torch.uint8)).tolist()
    assert found == expected
    assert [math.copysign(1, value) for value in found] == [1.0] * 8 + [-1.0] * 8


def test_the_values_follow_from_sign_exponent_and_mantissa():
    for code, value in enumerate(VALUES):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        assert abs(value) == size


def test_every_value_encodes_to_its_own_code():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode(decode(codes)), codes)


def test_ties_go_to_the_even_code_and_large_values_saturate():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    above = torch.nextafter(ties, torch.tensor(math.inf))
    below = torch.nextafter(ties, torch.tensor(-math.inf))
    assert encode(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert encode(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert encode(torch.tensor([6.1, 1e30, -7.0])).tolist() == [7, 7, 15]


def test_negative_values_that_round_to_zero_keep_their_sign():
    assert encode(torch.tensor([-0.1, -0.0, 0.1])).tolist() == [8, 8, 0]


def test_encode_is_nearest_for_a_dense_sweep():
    values = torch.arange(-7, 7, 1 / 64)
    distance = (decode(encode(values)) - values).abs()
    nearest = (torch.tensor(VALUES).unsqueeze(1) - values).abs().amin(0)
    assert torch.equal(distance, nearest)


def test_the_low_nibble_is_the_even_k():
    assert unpack_nibbles(torch.tensor([[0x21, 0xF3]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 15]]
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    assert torch.equal(pack_nibbles(unpack_nibbles(every_byte)), every_byte)
