"""Writes a random layer, its adapters and batches as the hosts read them: `python make_layer.py LAYER [TOKENS]`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fanfold.kernels.lora.table import pad_pair
from fanfold.spec import ExpertWeights, LoraPair, ProjectionWeights, WeightFormat

BATCHES, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE, SLOTS, MAX_RANK = 3, 4, 8, 512, 256, 3, 16
PROJECTIONS = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
Pairs = dict[int, dict[tuple[str, int], LoraPair]]
"""Adapter slot -> (projection, expert) -> pair."""


def random_layer(seed: int) -> ExpertWeights:
    """Int4 experts in GPTQ's layout, groups of 128, without zero points."""
    g = torch.Generator().manual_seed(seed)

    def projection(halves: int, n: int, k: int) -> ProjectionWeights:
        codes = torch.randint(-(2**31), 2**31, (EXPERTS, halves, k // 8, n), generator=g, dtype=torch.int64)
        scales = torch.rand(EXPERTS, halves, k // 128, n, generator=g) * 0.02 + 0.01
        tensors = {"qweight": codes.int(), "scales": scales.half()}
        return ProjectionWeights(WeightFormat.parse("gptq4-g128"), n, k, tensors)

    return ExpertWeights(projection(2, INTERMEDIATE, HIDDEN), projection(1, HIDDEN, INTERMEDIATE))


def random_pairs(seed: int) -> Pairs:
    """Of unlike ranks and scales; some experts have none."""
    g = torch.Generator().manual_seed(seed)
    found: Pairs = {slot: {} for slot in range(SLOTS)}
    for slot in range(SLOTS):
        for name, (n, k) in PROJECTIONS.items():
            for expert in range(EXPERTS):
                rank = int(torch.randint(1, MAX_RANK + 1, (), generator=g))
                a = (torch.randn(rank, k, generator=g) / k**0.5).bfloat16()
                b = (torch.randn(n, rank, generator=g) / rank**0.5).bfloat16()
                scale = float(torch.rand((), generator=g) + 0.3)
                if float(torch.rand((), generator=g)) < 0.8:
                    found[slot][name, expert] = LoraPair(a, b, scale)
    return found


def random_batch(tokens: int, seed: int) -> dict[str, Tensor]:
    """One id of no expert (where there are tokens); adapters, the base, and an id that is no slot's."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]).int()
    adapters = torch.randint(-1, SLOTS + 1, (tokens,), generator=g, dtype=torch.int32)
    if tokens > 1:
        ids[0, 1] = -1
    else:
        adapters[0] = seed % SLOTS
    return {
        "hidden": torch.randn(tokens, HIDDEN, generator=g).bfloat16(),
        "topk_ids": ids,
        "topk_weights": torch.rand(tokens, TOP_K, generator=g),
        "adapter_ids": adapters,
    }


def raw(tensor: Tensor) -> bytes:
    """The values of a tensor, one behind the other."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def write_layer(folder: Path, tokens: int, seed: int = 0) -> tuple[ExpertWeights, Pairs, list[dict[str, Tensor]]]:
    """The files of a layer; what they hold."""
    weights, pairs = random_layer(seed), random_pairs(seed + 1)
    batches = [random_batch(tokens, seed + 2 + i) for i in range(BATCHES)]
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"batches": BATCHES, "tokens": tokens, "top_k": TOP_K, "experts": EXPERTS, "hidden": HIDDEN}
    sizes |= {"intermediate": INTERMEDIATE, "adapter_slots": SLOTS, "max_rank": MAX_RANK}
    (folder / "sizes.txt").write_text("".join(f"{name} {size}\n" for name, size in sizes.items()))
    for name, projection in (("gate_up", weights.gate_up), ("down", weights.down)):
        for key, tensor in projection.tensors.items():
            (folder / f"{name}_{key}.bin").write_bytes(raw(tensor))
    lines: list[str] = []
    with (folder / "pairs.bin").open("wb") as data:
        for slot, of_slot in pairs.items():
            for (name, expert), pair in of_slot.items():
                bits = int(np.float32(pair.scale).view(np.uint32))
                lines.append(f"{slot} {list(PROJECTIONS).index(name)} {expert} {pair.rank} {bits}\n")
                for part in pad_pair(pair, torch.bfloat16, "cpu"):
                    data.write(raw(part))
    (folder / "pairs.txt").write_text("".join(lines))
    for i, batch in enumerate(batches):
        for name, tensor in batch.items():
            (folder / f"{name}{i}.bin").write_bytes(raw(tensor))
    return weights, pairs, batches


if __name__ == "__main__":
    write_layer(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40)
