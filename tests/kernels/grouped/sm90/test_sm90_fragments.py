"""Fragment order: the formula of the matrix unit's operand, every place of a tile, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fanfold.formats import e2m1
from fanfold.kernels.grouped.sm90.fragments import (
    e2m1_codes,
    e2m1_words,
    from_fragments,
    interleave,
    separate,
    to_fragments,
)
from fanfold.kernels.grouped.sm90.scale_bytes import LARGEST_E4M3, LARGEST_E8M0, from_e4m3, from_e8m0


def random_codes(n: int, k: int) -> Tensor:
    return torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(n + k), dtype=torch.uint8)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 192), (192, 64)])
def test_there_and_back(n: int, k: int) -> None:
    codes = torch.stack((random_codes(n, k), random_codes(n, k).flip(0)))
    assert torch.equal(from_fragments(to_fragments(codes)), codes)
    assert torch.equal(to_fragments(codes)[1], to_fragments(codes[1]))
    assert torch.equal(e2m1_codes(e2m1_words(codes)), codes)


def test_every_place_of_a_tile_is_that_of_the_formula() -> None:
    """One tile of four holds ones; thread 32*warp + 4*row + c, word w, nibble p hold n and k as documented."""
    places = set()
    for n in range(64):
        for k in range(64):
            warp, row8, row = n // 16, n % 16 // 8, n % 8
            word, k8, c, j = k // 16, k % 16 // 8, k % 8 // 2, k % 2
            places.add((n, k, (32 * warp + 4 * row + c) * 4 + word, 4 * j + 2 * row8 + k8))
    codes = random_codes(128, 128)
    tile = to_fragments(codes)[1, 1]
    for n, k, word, nibble in places:
        assert (int(tile[word]) >> (4 * nibble)) & 15 == codes[64 + n, 64 + k]
    assert len({(word, nibble) for _, _, word, nibble in places}) == 4096


def test_gate_and_up_alternate_in_eights() -> None:
    halves = torch.arange(3 * 2 * 32).reshape(3, 2, 32)
    rows = interleave(halves)
    assert rows[0, :24].tolist() == [*range(8), *range(32, 40), *range(8, 16)]
    assert rows[1, :8].tolist() == [*range(64, 72)]
    assert torch.equal(separate(rows, 2), halves)
    down = torch.arange(2 * 32).reshape(2, 1, 32)
    assert torch.equal(separate(interleave(down), 1), down)


def test_masks_of_the_kernel_read_e2m1_words_as_bf16() -> None:
    """The shifts and masks of the kernel's decoder, on every code in every place: value * 2^-126."""
    codes = random_codes(64, 64)
    words, fragments = e2m1_words(codes), to_fragments(codes)
    rotated = ((words >> 6) & 0x03FFFFFF) | (words << 26)
    pairs = [
        words & _signed(0x81C081C0),
        (words << 4) & _signed(0x81C081C0),
        rotated & _signed(0x81C081C0),
        ((words << 6) & _signed(0x80C080C0)) | ((words >> 2) & 0x01000100),
    ]
    for p, pair in enumerate(pairs):
        for half in (0, 16):
            found = ((pair >> half) & 0xFFFF).to(torch.uint16).view(torch.bfloat16).float() * 2.0**126
            expected = e2m1.decode(((fragments >> (half + 4 * p)) & 15).to(torch.uint8))
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # -0 too


def _signed(word: int) -> int:
    return word - (1 << 32)


def test_scale_bytes_are_bf16_of_the_scale_after_a_shift() -> None:
    stored = torch.arange(1, LARGEST_E4M3 + 1).to(torch.uint8)
    made = (from_e4m3(stored).int() << 4) | 0x7000
    found = made.to(torch.uint16).view(torch.bfloat16).double() * 2.0**-118
    assert torch.equal(found, stored.view(torch.float8_e4m3fn).double())
    stored = torch.arange(LARGEST_E8M0 + 1).to(torch.uint8)
    found = (from_e8m0(stored).int() << 7).to(torch.uint16).view(torch.bfloat16).double() * 2.0**-118
    assert torch.equal(found, 2.0 ** (stored.double() - 127))
