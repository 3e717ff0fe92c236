"""What tests of layers and models share: where the samples are, and random experts in any format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fanfold.formats import codec
from fanfold.formats.stack import stack
from fanfold.layers.reference import LayerPairs
from fanfold.spec import Activation, ExpertWeights, LoraPair, WeightFormat
from fanfold.spec.weights import ProjectionWeights

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
EXAMPLE = ROOT / "examples" / "tiny-moe"
SILU = Activation("silu")


def sample(name: str) -> Path:
    """The folder of a sample: of tests/golden, of tiny-moe there, or of the example."""
    found = [path for path in (GOLDEN / name, GOLDEN / "tiny-moe" / name, EXAMPLE / name) if _is_whole(path)]
    return found[0]


def _is_whole(path: Path) -> bool:
    return any(path.glob("*.safetensors"))


def reference(name: str) -> dict[str, Tensor]:
    """reference.pt of a sample; for those of the example it lies in tests/golden/tiny-moe."""
    folder = GOLDEN / name if (GOLDEN / name).exists() else GOLDEN / "tiny-moe" / name
    return torch.load(folder / "reference.pt", weights_only=True)


def on(weights: ExpertWeights, place: str) -> ExpertWeights:
    """The same experts on a device."""

    def moved(projection: ProjectionWeights) -> ProjectionWeights:
        tensors = {name: tensor.to(place) for name, tensor in projection.tensors.items()}
        bias = None if projection.bias is None else projection.bias.to(place)
        return replace(projection, tensors=tensors, bias=bias)

    return ExpertWeights(moved(weights.gate_up), moved(weights.down))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def typical_error(found: Tensor, expected: Tensor) -> float:
    """The median of tokens' relative errors, [..., N]: one that rounding takes to another expert is another token."""
    errors = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return float(errors.median())


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_projection(name: str, experts: int, halves: int, n: int, k: int, seed: int = 0) -> ProjectionWeights:
    """Random weights of about 1 / sqrt(K), rounded to the format; every expert and half has another size."""
    fmt = WeightFormat.parse(name)
    rows: list[list[dict[str, Tensor]]] = []
    for e in range(experts):
        row: list[dict[str, Tensor]] = []
        for p in range(halves):
            at = seed + 10 * e + p
            size = (1 + (e + 2 * p) % 4) / k**0.5
            g_idx = None
            if fmt.act_order:
                generator = torch.Generator().manual_seed(seed + 10 * e)  # gate and up share their order
                g_idx = (torch.randperm(k, generator=generator) // fmt.group_size).int()
            row.append(codec.quantize(fmt, size * numbers(n, k, seed=at), g_idx))
        rows.append(row)
    return stack(fmt, rows, n=n, k=k)


def random_experts(
    name: str, experts: int = 6, hidden: int = 64, intermediate: int = 32, *, gated: bool = True, seed: int = 0
) -> ExpertWeights:
    return ExpertWeights(
        random_projection(name, experts, 2 if gated else 1, intermediate, hidden, seed),
        random_projection(name, experts, 1, hidden, intermediate, seed + 1000),
    )


def random_pairs(
    weights: ExpertWeights, slots: int, *, ranks: tuple[int, ...] = (1, 4, 5, 16), dtype: torch.dtype = torch.float32
) -> LayerPairs:
    """A pair of another rank and scale for every slot, expert and projection."""
    shape = weights.shape
    sizes = {"gate": (shape.hidden, shape.intermediate), "up": (shape.hidden, shape.intermediate)}
    sizes["down"] = (shape.intermediate, shape.hidden)
    if not shape.gated:
        del sizes["gate"]
    pairs: dict[str, dict[tuple[int, int], LoraPair]] = {}
    for number, (name, (inputs, outputs)) in enumerate(sizes.items()):
        pairs[name] = {}
        for slot in range(slots):
            for e in range(shape.num_experts):
                at = 100 * number + 10 * slot + e
                rank = ranks[at % len(ranks)]
                a = (numbers(rank, inputs, seed=at) / inputs**0.5).to(dtype)
                b = (numbers(outputs, rank, seed=at + 1) / rank**0.5).to(dtype)
                pairs[name][slot, e] = LoraPair(a, b, 0.3 + 0.2 * (at % 7))
    return pairs


def random_routing(tokens: int, top_k: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids without repetition, and weights that sum to 1."""
    scores = numbers(tokens, experts, seed=seed).softmax(-1)
    weights, ids = scores.topk(top_k)
    return ids, weights / weights.sum(-1, keepdim=True)


def dense(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Dequantised fp32 weights: gate_up [E, P, I, H], down [E, H, I]."""
    stacks: list[Tensor] = []
    for projection in (weights.gate_up, weights.down):
        one = [
            torch.stack([codec.dequantize_expert(projection, e, p) for p in range(projection.halves)])
            for e in range(projection.num_experts)
        ]
        stacks.append(torch.stack(one))
    return stacks[0], stacks[1][:, 0]


def logits(model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=input_ids, **options).logits
