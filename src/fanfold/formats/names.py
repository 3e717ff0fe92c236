"""Names: which tensor of a checkpoint belongs to which expert.

Spellings met in files: one Linear an expert (`...experts.3.up_proj.qweight`; Mixtral's w1/w2/w3 are gate/down/up), all
experts in one tensor (`...experts.gate_up_proj_blocks`), and Granite's (`...block_sparse_moe.input_linear.weight`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PROJECTIONS = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
    "gate_up_proj": "gate_up",
    "input_linear": "gate_up",
    "output_linear": "down",
}
PER_EXPERT = re.compile(
    r"(?P<container>(?:.+\.)?layers\.(?P<layer>\d+)\.(?:.+\.)?experts)\.(?P<expert>\d+)"
    r"\.(?P<projection>gate_proj|up_proj|down_proj|w[123])\.(?P<suffix>\w+)"
)
FUSED = re.compile(
    r"(?P<container>(?:.+\.)?layers\.(?P<layer>\d+)\.(?:.+\.)?experts)"
    r"\.(?P<projection>gate_up_proj|up_proj|down_proj)(?:[._](?P<suffix>\w+))?"
)
GRANITE = re.compile(
    r"(?P<container>(?:.+\.)?layers\.(?P<layer>\d+)\.block_sparse_moe)"
    r"\.(?P<projection>input_linear|output_linear)\.(?P<suffix>\w+)"
)


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
    match = PER_EXPERT.fullmatch(name) or FUSED.fullmatch(name) or GRANITE.fullmatch(name)
    if match is None:
        return None
    part = match.groupdict()
    return ExpertName(
        container=part["container"],
        layer=int(part["layer"]),
        expert=int(part["expert"]) if part.get("expert") is not None else None,
        projection=PROJECTIONS[part["projection"]],
        suffix=part["suffix"] or "weight",
    )
