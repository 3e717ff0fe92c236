"""Streams of b-bit values in int32 words: dense, the first value in the lowest bits.

Value i lies at bits [b*i, b*i + b) of the stream, word w holds bits [32*w, 32*w + 32). With 2, 4 and 8 bits
no value spans two words; with 3 bits, 32 values fill 3 words and values 10 and 21 span two. Eight values of
b bits are always b whole bytes, a chunk, which is how both directions go here.
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
    octets = (words.unsqueeze(-1) >> (8 * torch.arange(4, device=words.device))) & 0xFF
    octets = octets.flatten(-2).to(torch.int64)
    octets = zero_pad(octets, (0, -octets.shape[-1] % bits))
    chunks = _join(octets, bits, 8)
    values = (chunks.unsqueeze(-1) >> (bits * torch.arange(8, device=words.device))) & ((1 << bits) - 1)
    return values.to(torch.uint8).flatten(-2)[..., :count]


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
    count = values.shape[-1]
    chunks = _join(zero_pad(values.to(torch.int64), (0, -count % 8)), 8, bits)
    octets = ((chunks.unsqueeze(-1) >> (8 * torch.arange(bits, device=values.device))) & 0xFF).flatten(-2)
    # Whole chunks may end before or behind the last word.
    octets = zero_pad(octets, (0, 4 * words_for(count, bits) - octets.shape[-1]))
    return _join(octets, 4, 8).to(torch.int32)


def _join(parts: Tensor, number: int, bits: int) -> Tensor:
    """Each `number` consecutive parts of `bits` bits as one int64, the first part lowest.

    The shifted parts have no bit in common, so that their sum is their bitwise or.
    """
    parts = parts.reshape(*parts.shape[:-1], parts.shape[-1] // number, number)
    return (parts << (bits * torch.arange(number, device=parts.device))).sum(-1)
