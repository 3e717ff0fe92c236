"""The grammar of the tensor names in a PEFT adapter file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fanfold.errors import TensorError, UnsupportedError

# base_model.model.<module>[.base_layer...].lora_A[.default].weight
_PREFIX = "base_model.model."
_WRAPPED = ".base_layer"
_SIDES = {f"{side}{adapter}.weight": side for side in "AB" for adapter in ("", ".default")}
# PEFT saves embeddings and lm_head whole where it adapts them: a copy of the base's weight beside the pair.
_COPY = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight")
# <container>.<number>.<projection>: an expert kept as Linear modules
EXPERT = re.compile(
    r"(?P<container>(?:.+\.)?experts)\.(?P<number>[0-9]{1,9})\.(?P<projection>w1|w2|w3|gate_proj|up_proj|down_proj)"
)
# The stacked parameters of an experts module, in the order of named_parameters.
FUSED_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")

# Parts of a name that belong to something else than plain LoRA on a Linear.
_REFUSED = {
    ".lora_magnitude_vector": "DoRA, which also rescales the base weights",
    ".lora_embedding_": "LoRA on an embedding",
    ".modules_to_save": "a whole module that replaces one of the base",
    ".lora_A.bias": "a bias behind lora_A",
    ".lora_A.default.bias": "a bias behind lora_A",
    ".lora_B.bias": "a bias behind lora_B (lora_bias)",
    ".lora_B.default.bias": "a bias behind lora_B (lora_bias)",
}


@dataclass(frozen=True, eq=False)
class Factors:
    """lora_A and lora_B of one wrapper."""

    a: Tensor
    b: Tensor


def take_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes out the copies of base weights that lie beside a pair, by module."""
    copies: dict[str, Tensor] = {}
    for name in list(tensors):
        match = _COPY.fullmatch(name)
        beside = "" if match is None else f"base_model.model.{match['module']}.lora_A."
        if match is not None and (f"{beside}weight" in tensors or f"{beside}default.weight" in tensors):
            copies[match["module"]] = tensors.pop(name)
    return copies


def group_keys(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, Factors]]:
    """The pairs of the file by module, then by depth of `base_layer` (0 = outermost wrapper).

    Only the experts module nests wrappers, one for each targeted parameter.

    Raises:
        UnsupportedError: a name belongs to DoRA, a bias, an embedding or a whole module.
        TensorError: a name is unknown, double, or without its partner; or there is none at all.
    """
    sides: dict[tuple[str, int, str], Tensor] = {}
    for name, tensor in tensors.items():
        place = _place(name)
        if place is None:
            raise _unknown(file, name)
        if place in sides:
            raise TensorError(
                f"{file}: {name}",
                found="the same tensor under two spellings",
                expected="one lora_A and one lora_B for each target",
                next_step="Remove one of them, or save the adapter again with PEFT.",
            )
        sides[place] = tensor
    if not sides:
        raise TensorError(
            str(file),
            found="no tensors",
            expected="at least one pair of lora_A and lora_B",
            next_step="Save the adapter again with PEFT.",
        )
    groups: dict[str, dict[int, Factors]] = {}
    for module, depth, side in sides:
        partner = "B" if side == "A" else "A"
        if (module, depth, partner) not in sides:
            where = module + ".base_layer" * depth
            raise TensorError(
                f"{file}: {where}",
                found=f"lora_{side} without lora_{partner}",
                expected="both",
                next_step="The file is incomplete; save the adapter again with PEFT.",
            )
        groups.setdefault(module, {})[depth] = Factors(sides[module, depth, "A"], sides[module, depth, "B"])
    return groups


def _place(name: str) -> tuple[str, int, str] | None:
    """Module, depth and side; adapters have thousands of names, for which a regular expression is slow."""
    path, _, end = name.rpartition(".lora_")
    if end not in _SIDES or not path.startswith(_PREFIX) or "\n" in name:
        return None
    module, depth = path.removeprefix(_PREFIX), 0
    while module.endswith(_WRAPPED) and module != _WRAPPED:
        module, depth = module.removesuffix(_WRAPPED), depth + 1
    if not module or (depth > 0 and module.rpartition(".")[2] != "experts"):
        return None
    return module, depth, _SIDES[end]


def _unknown(file: Path, name: str) -> UnsupportedError | TensorError:
    for part, meaning in _REFUSED.items():
        if part in name:
            return UnsupportedError(
                f"{file}: {name}",
                found=meaning,
                expected="lora_A and lora_B of Linear modules and stacked experts",
                next_step="Merge such an adapter into its base with PEFT, or train it as plain LoRA.",
            )
    return TensorError(
        f"{file}: {name}",
        found="an unknown key",
        expected="base_model.model.<module>.lora_A.weight or lora_B.weight",
        next_step="Every tensor of an adapter must be used; save it again with PEFT, as plain LoRA.",
    )
