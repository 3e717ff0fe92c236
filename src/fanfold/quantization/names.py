"""Names: what each expert's Linears, and the Linears left as they are, are called in the written checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from fanfold.errors import UnsupportedError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.experts import LayerTensors

LINEARS: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# Families whose experts, where they are one Linear each, are called like Mixtral's.
NUMBERED: Mapping[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}
NUMBERED_FAMILIES = frozenset({"lfm2_moe", "minimax", "minimax_m2", "mixtral", "phimoe"})
DRAFT = r"re:(.*\.)?mtp.*"  # layers that predict further tokens; see formats/names.py


def expert_module(checkpoint: Checkpoint, tensors: LayerTensors, projection: str, expert: int) -> str:
    """The Linear of one expert and projection (`gate`, `up` or `down`).

    Experts that are one Linear each keep their names, so that whatever reads the source finds them.

    Raises:
        UnsupportedError: fused experts for which there is no such name.
    """
    if not tensors.fused:
        suffix, name = next(iter(tensors.per_expert[projection, expert].items()))
        return name.removesuffix(f".{suffix}")
    if not tensors.container.endswith(".experts"):
        raise UnsupportedError(
            f"{checkpoint.path}: {tensors.container}",
            found=f"fused experts of {checkpoint.config.model_type or 'this model'}, outside a module `experts`",
            expected="experts for which compressed-tensors has names, ...experts.N.gate_proj",
            next_step="No reader knows single experts of this family; quantise it with another tool.",
        )
    numbered = checkpoint.config.model_type in NUMBERED_FAMILIES
    return f"{tensors.container}.{expert}.{(NUMBERED if numbered else LINEARS)[projection]}"


def left_alone(checkpoint: Checkpoint) -> list[str]:
    """Modules outside the experts with a weight [N, K], for the config's `ignore`; and `lm_head`, which may be tied."""
    infos, plain = checkpoint.files.infos, set(checkpoint.plain)
    modules = [
        name.removesuffix(".weight")
        for name in infos
        if name in plain and name.endswith(".weight") and len(infos[name].shape) == 2
    ]
    return [*dict.fromkeys([*modules, "lm_head", *([DRAFT] if checkpoint.draft else [])])]
