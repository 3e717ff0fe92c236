"""Plan: what a checkpoint becomes, found by its headers before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fanfold.errors import MissingExpertsError, UnsupportedError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.experts import ProjectionInfo
from fanfold.formats.matrix import DENSE
from fanfold.formats.names import expert_name, is_draft
from fanfold.quantization.names import expert_module
from fanfold.quantization.target import Slot, Target

DTYPES = {kind: dtype for dtype, kind in DENSE.items() if kind != "fp32"}


@dataclass(frozen=True)
class ProjectionPlan:
    """One projection of a layer.

    Attributes:
        info: its format and sizes now.
        halves: `gate` and `up`, or the only one.
        modules: for each expert, for each half, the Linear it becomes.
        bias: dtype of the biases, where there are any.
    """

    info: ProjectionInfo
    halves: tuple[str, ...]
    modules: Sequence[Sequence[str]]
    bias: torch.dtype | None

    def slots(self, target: Target) -> list[Slot]:
        """The tensors it becomes, expert by expert.

        Raises:
            UnsupportedError: the packing can't hold such sizes.
        """
        info = self.info
        slots: list[Slot] = []
        for module in (module for row in self.modules for module in row):
            slots += target.slots(module, info.n, info.k, DTYPES[info.format.kind])
            if self.bias is not None:
                slots.append(Slot(f"{module}.bias", self.bias, (info.n,)))
        return slots


@dataclass(frozen=True)
class Plan:
    """What is written.

    Attributes:
        steps: in order, a tensor that is copied (its name) or a layer whose experts are quantised (its number).
        layers: layer -> its projections `gate_up` and `down`.
        slots: every tensor of the result, in the order of the steps.
    """

    steps: Sequence[str | int]
    layers: Mapping[int, Sequence[ProjectionPlan]]
    slots: Sequence[Slot]


def plan_of(checkpoint: Checkpoint, target: Target) -> Plan:
    """The plan for a checkpoint.

    Raises:
        UnsupportedError: it is quantised, its experts are neither bf16 nor fp16, their K is no multiple of the group,
            or there are no names for them.
        MissingExpertsError: it has no experts, or not all of them.
        ConfigError, TensorError: as `Checkpoint.describe`.
    """
    _refuse_quantised(checkpoint)
    if not checkpoint.layers:
        raise MissingExpertsError(
            str(checkpoint.path),
            found="no experts",
            expected="a Mixture-of-Experts checkpoint",
            next_step="`fanfold inspect` says what a checkpoint holds.",
        )
    layers = {layer: _layer(checkpoint, layer, target) for layer in checkpoint.layers}
    steps: dict[str | int, None] = {}
    slots: list[Slot] = []
    for name, info in checkpoint.files.infos.items():
        parsed = None if is_draft(name) else expert_name(name)
        if parsed is None:
            steps[name] = None
            slots.append(Slot(name, info.dtype, info.shape))
        elif parsed.layer not in steps:
            steps[parsed.layer] = None
            slots += [slot for projection in layers[parsed.layer] for slot in projection.slots(target)]
    return Plan(list(steps), layers, slots)


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    method = checkpoint.quantization.method
    if method is None and not checkpoint.packed:
        return
    module = next(iter(checkpoint.packed), None)
    raise UnsupportedError(
        str(checkpoint.path),
        found=f"a checkpoint quantised by {method}" if method else f"packed weights in {module}",
        expected="a checkpoint of plain BF16 or FP16 weights",
        next_step="Quantise the checkpoint that this one was made from: rounding twice loses more than rounding once.",
    )


def _layer(checkpoint: Checkpoint, layer: int, target: Target) -> list[ProjectionPlan]:
    tensors = checkpoint.layer(layer)
    plans: list[ProjectionPlan] = []
    for projection, info in checkpoint.describe(layer).items():
        where = f"{checkpoint.path}: {tensors.container}: {projection}"
        _check(where, info, target)
        up = ("gate", "up") if info.halves == 2 else ("up",)
        halves = up if projection == "gate_up" else ("down",)
        modules = [
            [expert_module(checkpoint, tensors, half, expert) for half in halves] for expert in range(info.num_experts)
        ]
        if tensors.fused:
            suffixes = tensors.fused["gate_up" if info.halves == 2 else halves[0]]
        else:
            suffixes = tensors.per_expert[halves[0], 0]
        bias = checkpoint.files.infos[suffixes["bias"]].dtype if "bias" in suffixes else None
        plans.append(ProjectionPlan(info, halves, modules, bias))
    return plans


def _check(where: str, info: ProjectionInfo, target: Target) -> None:
    if info.format.kind not in DTYPES:
        raise UnsupportedError(
            where,
            found=str(info.format),
            expected="bf16 or fp16",
            next_step="Save the checkpoint in bfloat16 first.",
        )
    group = target.format.group_size
    if group > 0 and info.k % group:
        raise UnsupportedError(
            f"{where} in {target.name}",
            found=f"K = {info.k}",
            expected=f"a multiple of {group}, the weights that share a scale",
            next_step=f"Pass a group size that divides {info.k}." if target.name == "int4" else "Quantise to int4.",
        )
