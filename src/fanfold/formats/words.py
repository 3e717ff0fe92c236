"""Streams of b-bit values in int32 words: dense, the first value in the lowest bits.

Value i lies at bits [b*i, b*i + b) of the stream, word w holds bits [32*w, 32*w + 32). With 2, 4 and 8 bits
no value spans two words; with 3 bits, 32 values fill 3 words and values 10 and 21 span two. Eight values of
b bits are always b whole bytes, which is how both directions go here (the lowest byte of a word comes first
in memory).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from fanfold.errors import ArgumentError


def words_for(count: int, bits: int) -> int:
    """Number of int32 words that hold `count` values."""
    return -(-count * bits // 32)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The values of a stream.

    Args:
        words: int32 [..., W], W = ceil(count * bits / 32).
        bits: bits a value, 1 to 8.
        count: values in the stream; what the last word holds beyond them is dropped.

    Returns:
        uint8 [..., count].
    """
    octets = words.contiguous().view(torch.uint8)
    lead = octets.shape[:-1]
    octets = zero_pad(octets, (0, -octets.shape[-1] % bits)).reshape(*lead, -1, bits).to(torch.int64)
    # The parts of a chunk have disjoint bits, so that their sum is their bitwise or.
    chunks = (octets << (8 * torch.arange(bits, device=words.device))).sum(-1, keepdim=True)
    values = (chunks >> (bits * torch.arange(8, device=words.device))) & ((1 << bits) - 1)
    return values.to(torch.uint8).reshape(*lead, -1)[..., :count]


def pack_words(values: Tensor, bits: int) -> Tensor:
    """The stream of the values; inverse of `unpack_words`.

    Args:
        values: integers [..., count] in [0, 2^bits).
        bits: bits a value, 1 to 8.

    Returns:
        int32 [..., ceil(count * bits / 32)]; bits behind the last value are 0.

    Raises:
        ArgumentError: a value does not fit in `bits` bits.
    """
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >> bits):
        raise ArgumentError(
            "values to pack",
            found=f"{int(values.min())} to {int(values.max())}",
            expected=f"0 to {(1 << bits) - 1}, {bits} bits",
            next_step="Clamp the codes before packing.",
        )
    *lead, count = values.shape
    octads = zero_pad(values.to(torch.int64), (0, -count % 8)).reshape(*lead, -1, 8)
    chunks = (octads << (bits * torch.arange(8, device=values.device))).sum(-1, keepdim=True)
    octets = (chunks >> (8 * torch.arange(bits, device=values.device))) & 0xFF
    octets = octets.to(torch.uint8).reshape(*lead, -1)
    # Whole octads may end before or behind the last word.
    octets = zero_pad(octets, (0, 4 * words_for(count, bits) - octets.shape[-1]))
    return octets.contiguous().view(torch.int32)
