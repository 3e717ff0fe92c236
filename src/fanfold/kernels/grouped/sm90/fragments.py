"""The order of 4-bit weights in memory that the matrix unit of Hopper takes from registers, and its inverse.

A tile of 64 (n) x 64 (k) weights is 2048 bytes: 128 threads of 4 words. Thread 32*warp + 4*row + c, word w, nibble p
hold

    n = 16*warp + 8*((p >> 1) & 1) + row,   k = 16*w + 8*(p & 1) + 2*c + (p >> 2),

the left operand of wgmma m64k16 (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"): unpacking moves nothing
between threads. Rows of gate and up alternate in eights, so that one thread holds both and an activation needs no
exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64
"""Rows and columns of a tile."""
WORDS = TILE * TILE // 8
"""int32 words of a tile."""
EIGHT = 8
"""Rows of gate, then as many of up."""


def interleave(halves: Tensor) -> Tensor:
    """[E, P, N, ...] -> [E, P*N, ...]: eight rows of gate, then the same eight of up; one half stays as it is.

    Args:
        halves: N a multiple of 8 where P is 2.
    """
    experts, p, n, *rest = halves.shape
    if p == 1:
        return halves[:, 0]
    return halves.reshape(experts, p, n // EIGHT, EIGHT, *rest).transpose(1, 2).reshape(experts, p * n, *rest)


def separate(rows: Tensor, halves: int) -> Tensor:
    """[E, P*N, ...] -> [E, P, N, ...], the inverse of `interleave`."""
    experts, count, *rest = rows.shape
    eights = rows.reshape(experts, -1, halves, EIGHT, *rest).transpose(1, 2)
    return eights.reshape(experts, halves, count // halves, *rest)


def to_fragments(codes: Tensor) -> Tensor:
    """Codes uint8 [..., N, K] in [0, 16) -> int32 [..., N/64, K/64, 512]; N and K are multiples of 64."""
    *lead, n, k = codes.shape
    # n = slab, warp, row8, row; k = tile, word, k8, c, j
    t = codes.reshape(-1, n // TILE, 4, 2, 8, k // TILE, 4, 2, 4, 2)
    # -> slab, tile, warp, row, c, word, (j, row8, k8): nibble = 4*j + 2*row8 + k8
    t = t.permute(0, 1, 5, 2, 4, 8, 6, 9, 3, 7).reshape(*lead, n // TILE, k // TILE, 4 * WORDS, 2)
    return (t[..., 0] | (t[..., 1] << 4)).view(torch.int32)


def from_fragments(words: Tensor) -> Tensor:
    """int32 [..., N/64, K/64, 512] -> codes uint8 [..., N, K], the inverse of `to_fragments`."""
    *lead, slabs, tiles, _ = words.shape
    octets = words.contiguous().view(torch.uint8)
    t = torch.stack((octets & 15, octets >> 4), -1).reshape(-1, slabs, tiles, 4, 8, 4, 4, 2, 2, 2)
    return t.permute(0, 1, 3, 8, 4, 2, 6, 9, 5, 7).reshape(*lead, slabs * TILE, tiles * TILE)


# Where a 16-bit half of a word holds code p, from sign to lowest bit. A mask of bits 15 and 8..6 makes bf16 of
# code * 2^-126 from it: of code 0 as it is, of 1 after a shift left by 4, of 2 after a rotation of the word by 6 to the
# right, which brings its sign from the other half; code 3 has the bits left over: 9, 1 and 0 come to 15, 7 and 6 by a
# shift left by 6, and 10 to 8 by one right by 2.
PLACES = ((15, 8, 7, 6), (11, 4, 3, 2), (5, 14, 13, 12), (9, 10, 1, 0))
CROSSING = (2, 5)  # the sign of code 2, in bit 5 of the other half


def e2m1_words(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 [..., N, K] -> int32 [..., N/64, K/64, 512]: the order of `to_fragments`, bits in `PLACES`."""
    fragments = to_fragments(codes)
    words = torch.zeros_like(fragments)
    for half in (0, 16):
        for p, places in enumerate(PLACES):
            code = fragments >> (half + 4 * p)
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                to = (half ^ 16 if (p, place) == CROSSING else half) + place
                words |= ((code >> bit) & 1) << to
    return words


def e2m1_codes(words: Tensor) -> Tensor:
    """int32 [..., N/64, K/64, 512] -> E2M1 codes uint8 [..., N, K], the inverse of `e2m1_words`."""
    fragments = torch.zeros_like(words)
    for half in (0, 16):
        for p, places in enumerate(PLACES):
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                at = (half ^ 16 if (p, place) == CROSSING else half) + place
                fragments |= ((words >> at) & 1) << (half + 4 * p + bit)
    return from_fragments(fragments)
