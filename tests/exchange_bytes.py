"""Bytes that exchanges move, from formulas: the tables of docs/distributed.md."""

from __future__ import annotations

from math import comb
from typing import NamedTuple


class Sizes(NamedTuple):
    """A layer's, and of its activations."""

    experts: int
    top_k: int
    hidden: int
    itemsize: int = 2


QWEN3 = Sizes(128, 8, 4096)
INTERMEDIATE = 1536
WEIGHT_BYTES = 3 * QWEN3.hidden * INTERMEDIATE * (4 + 16 / 128 + 4 / 128) / 8
"""Of an expert in GPTQ's 4 bits: words, and for groups of 128 a scale and a zero point."""
RANKS = (8, 16, 32, 64)
NODE, TOKENS = 8, 64
HBM, NVLINK, NETWORK, PEAK = 4.8e12, 450e9, 50e9, 989e12
"""Of an H200, a second: bytes of its memory, of its NVLink and of a network of 400 Gb/s, one direction; bf16 flops."""
EXCHANGES = ("all_reduce", "all_reduce, sums", "all_to_all", "all_to_all, sums", "all_to_all with a bound, sums")


def ranks_of_a_token(sizes: Sizes, ranks: int) -> float:
    """Ranks that have one of a token's experts or more, E / R of them on each rank and all choices alike likely."""
    without = comb(sizes.experts - sizes.experts // ranks, sizes.top_k) / comb(sizes.experts, sizes.top_k)
    return ranks * (1 - without)


def sent(exchange: str, sizes: Sizes, ranks: int) -> float:
    """Bytes that a rank sends to others for a token of its batch (all_reduce: of the batch of all), mean over tokens.

    All-reduce as rings do it: R - 1 of R parts of the result twice. A row that travels has its numbers beside it.
    """
    row, others, top_k = sizes.hidden * sizes.itemsize, (ranks - 1) / ranks, sizes.top_k
    beside = 4 * (2 * top_k + 1)
    return {
        "all_reduce": 2 * others * top_k * row,
        "all_reduce, sums": 2 * others * row,
        "all_to_all": others * top_k * (2 * row + 4 * 3),
        "all_to_all, sums": others * ranks_of_a_token(sizes, ranks) * (2 * row + beside),
        "all_to_all with a bound, sums": (ranks - 1) * (2 * row + beside),
    }[exchange]


def exchange_table() -> str:
    """Markdown: KiB a token and layer for each exchange."""
    rows = [f"| GPUs | {' | '.join(EXCHANGES)} |", "|---" * (len(EXCHANGES) + 1) + "|"]
    for ranks in RANKS:
        rows.append(f"| {ranks} | {' | '.join(f'{sent(name, QWEN3, ranks) / 1024:.0f}' for name in EXCHANGES)} |")
    return "\n".join(rows)


def time_table() -> str:
    """Markdown: microseconds of one layer in a decode step of TOKENS tokens a GPU."""
    names = ("GPUs", "weights a GPU", "reading them", "products", "exchange: NVLink", "exchange: network")
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    flops = TOKENS * QWEN3.top_k * 6 * QWEN3.hidden * INTERMEDIATE
    for ranks in RANKS:
        weights = WEIGHT_BYTES * QWEN3.experts / ranks
        moved = TOKENS * sent("all_to_all, sums", QWEN3, ranks)
        outside = (ranks - NODE) / (ranks - 1)
        times = (weights / HBM, flops / PEAK, moved * (1 - outside) / NVLINK, moved * outside / NETWORK)
        cells = " | ".join(f"{seconds * 1e6:.0f} us" for seconds in times)
        rows.append(f"| {ranks} | {weights / 1e6:.0f} MB | {cells} |")
    return "\n".join(rows)
