"""Names: which tensor of a checkpoint belongs to which expert.

Spellings met in files: one Linear an expert (`...experts.3.up_proj.qweight`; Mixtral's w1/w2/w3 are gate/down/up), all
experts in one tensor (`...experts.gate_up_proj_blocks`), and Granite's (`...block_sparse_moe.input_linear.weight`).
Shared experts (`mlp.shared_experts.up_proj`) are ordinary Linears and none of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

LINEARS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
FUSED = {"gate_up_proj": "gate_up", "up_proj": "up", "down_proj": "down"}
GRANITE = {"input_linear": "gate_up", "output_linear": "down"}
DIGITS = 5  # of a layer's or an expert's number, at most


@dataclass(frozen=True)
class ExpertName:
    """What the name of an expert's tensor says.

    Attributes:
        container: module of all experts of the layer.
        layer: its number.
        expert: the expert's number; None where one tensor holds all experts.
        projection: `gate`, `up`, `down`, or `gate_up` (both halves in one tensor).
        suffix: what is left, e.g. `qweight`, `weight`, `blocks`; `weight` where nothing is.
    """

    container: str
    layer: int
    expert: int | None
    projection: str
    suffix: str


def expert_name(name: str) -> ExpertName | None:
    """What `name` says, or None where it names no expert's tensor."""
    parts = name.split(".")
    place = _experts_at(parts)
    if place is not None:
        before, rest = parts[: place + 1], parts[place + 1 :]
        named = _per_expert(rest) or _fused(rest)
    elif len(parts) > 2 and parts[-3] == "block_sparse_moe" and parts[-2] in GRANITE:
        before, named = parts[:-2], (None, GRANITE[parts[-2]], parts[-1])
    else:
        return None
    layer = _layer(before)
    if named is None or layer is None:
        return None
    return ExpertName(".".join(before), layer, *named)


def in_experts(name: str) -> bool:
    """Whether the tensor lies in a layer's experts, also where `expert_name` can't tell what it is."""
    parts = name.split(".")
    place = _experts_at(parts)
    return place is not None and _layer(parts[: place + 1]) is not None


def is_draft(name: str) -> bool:
    """Whether the tensor belongs to the layers that predict further tokens (`mtp...`), beside the model proper."""
    return any(part.startswith("mtp") for part in name.split("."))


def _experts_at(parts: list[str]) -> int | None:
    return parts.index("experts") if "experts" in parts else None


def _layer(parts: list[str]) -> int | None:
    """The number behind the last `layers`."""
    numbers = [number for word, number in pairwise(parts) if word == "layers"]
    return _number(numbers[-1]) if numbers else None


def _per_expert(rest: list[str]) -> tuple[int, str, str] | None:
    if len(rest) != 3 or rest[1] not in LINEARS:
        return None
    expert = _number(rest[0])
    return None if expert is None else (expert, LINEARS[rest[1]], rest[2])


def _fused(rest: list[str]) -> tuple[None, str, str] | None:
    if len(rest) == 2 and rest[0] in FUSED:
        return None, FUSED[rest[0]], rest[1]
    if len(rest) != 1:
        return None
    for projection, meaning in FUSED.items():
        if rest[0] == projection:
            return None, meaning, "weight"
        if rest[0].startswith(projection + "_"):
            return None, meaning, rest[0].removeprefix(projection + "_")
    return None


def _number(part: str) -> int | None:
    return int(part) if part.isascii() and part.isdigit() and len(part) <= DIGITS else None
