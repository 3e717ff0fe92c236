from __future__ import annotations

import pytest
import torch
from format_cases import int32, random_words, stream_values
from hypothesis import given
from hypothesis import strategies as st

from fanfold.errors import ArgumentError
from fanfold.formats.words import pack_words, unpack_words, words_for

BITS = (2, 3, 4, 8)


@pytest.mark.parametrize(
    ("bits", "values", "words"),
    [
        (2, [0, 1, 2, 3] * 4, [0xE4E4E4E4]),
        (4, [0, 1, 2, 3, 4, 5, 6, 7], [0x76543210]),
        (4, [15, 0, 0, 0, 0, 0, 0, 8], [0x8000000F]),
        (8, [1, 2, 3, 255], [0xFF030201]),
        # eight octal digits are three bytes, 88 C6 FA
        (3, [0, 1, 2, 3, 4, 5, 6, 7] * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
        # value 10 has its upper bit in word 1, value 21 its upper two in word 2
        (3, [0] * 10 + [4] + [0] * 10 + [6] + [0] * 10, [0, 1, 3]),
        # a partly filled last word
        (3, [7] * 11, [0xFFFFFFFF, 0x1]),
        (4, [9], [9]),
    ],
)
def test_words_by_hand(bits: int, values: list[int], words: list[int]):
    assert torch.equal(pack_words(torch.tensor(values), bits), int32(*words))
    assert unpack_words(int32(*words), bits, len(values)).tolist() == values


@given(bits=st.sampled_from(BITS), count=st.integers(1, 200), rows=st.integers(1, 3), seed=st.integers(0, 999))
def test_unpack_reads_any_words_as_one_stream(bits: int, count: int, rows: int, seed: int):
    words = random_words(rows, words_for(count, bits), seed=seed)
    found = unpack_words(words, bits, count)
    assert found.dtype == torch.uint8
    assert found.tolist() == [stream_values(row, bits, count) for row in words]


@given(bits=st.sampled_from(BITS), count=st.integers(1, 200), seed=st.integers(0, 999))
def test_pack_and_unpack_are_inverse(bits: int, count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << bits, (2, count), generator=generator, dtype=torch.uint8)
    words = pack_words(values, bits)
    assert words.shape == (2, -(-count * bits // 32))
    assert torch.equal(unpack_words(words, bits, count), values)


def test_unpack_reads_strided_words():
    words = random_words(6, 4)
    assert torch.equal(unpack_words(words.T, 3, 60), unpack_words(words.T.contiguous(), 3, 60))


@pytest.mark.parametrize("values", [[0, 16], [-1, 3]])
def test_pack_refuses_values_that_would_spill(values: list[int]):
    with pytest.raises(ArgumentError, match="expected 0 to 15, 4 bits"):
        pack_words(torch.tensor(values), 4)
