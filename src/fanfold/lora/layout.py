"""Stacked LoRA factors of fused experts, taken apart into one pair for each expert.

PEFT stacks E experts of rank r into 2-D factors, A expert-major and B rank-major (its ParamWrapper):
    A_e = A.reshape(E, r, -1)[e]              B_e = B.reshape(-1, r, E)[:, :, e]
Two orientations occur, by PEFT version and by how the model stores the parameter:
    standard   A [r*E, in], B [out, r*E]      W_e [out, in] += scale * B_e A_e
    reversed   A [r*E, out], B [in, r*E]      W_e [out, in] += scale * (B_e A_e)^T: a = B_e^T, b = A_e^T
Parameters stored (E, out, in): PEFT >= 0.19 writes standard, 0.17 and 0.18 reversed. Stored (E, in, out): all
write standard, except PEFT >= 0.19 where the model's class did not say that it is transposed. Shapes decide
where they can; where in == out for every target of an adapter, version and storage do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fanfold.errors import AdapterMismatchError
from fanfold.lora.adapter import Adapter, FusedTarget, Projection
from fanfold.lora.site import ExpertSite
from fanfold.spec import LoraPair

Orientation = Literal["standard", "reversed"]
_STANDARD_SINCE = (0, 19)


def orientation_of(adapter: Adapter, placed: Sequence[tuple[FusedTarget, ExpertSite]]) -> Orientation:
    """The orientation of all fused targets of an adapter; one tool wrote them, so they have it in common.

    Raises:
        AdapterMismatchError: the shapes of a target fit neither, or two targets fit unlike ones.
    """
    possible: set[Orientation] = {"standard", "reversed"}
    for target, site in placed:
        fitting = _fitting(target, site)
        if not fitting & possible:
            raise _mismatch(target, site, "shapes of the other orientation than the targets before it")
        possible &= fitting
    if len(possible) == 1:
        return possible.pop()
    old = adapter.config.generation < _STANDARD_SINCE
    return "reversed" if old and not any(site.transposed for _, site in placed) else "standard"


def take_apart(
    target: FusedTarget, site: ExpertSite, orientation: Orientation
) -> dict[tuple[Projection, int], LoraPair]:
    """One pair for each projection and expert; views of the stacked factors, gate and up share their A."""
    experts = site.shape.num_experts
    a = target.a.reshape(experts, target.rank, -1)  # [E, r, in]
    b = target.b.reshape(-1, target.rank, experts).permute(2, 0, 1)  # [E, out, r]
    if orientation == "reversed":
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    pairs: dict[tuple[Projection, int], LoraPair] = {}
    for expert in range(experts):
        shrink = a[expert]
        for projection, expand in _halves(target, site, b[expert]):
            pairs[projection, expert] = LoraPair(shrink, expand, target.scale)
    return pairs


def _halves(target: FusedTarget, site: ExpertSite, b: Tensor) -> list[tuple[Projection, Tensor]]:
    if target.half == "down":
        return [("down", b)]
    if not site.shape.gated:
        return [("up", b)]
    if site.interleaved:
        return [("gate", b[0::2]), ("up", b[1::2])]
    return [("gate", b[: site.shape.intermediate]), ("up", b[site.shape.intermediate :])]


def _sizes(target: FusedTarget, site: ExpertSite) -> tuple[int, int]:
    shape = site.shape
    if target.half == "down":
        return shape.intermediate, shape.hidden
    return shape.hidden, shape.halves * shape.intermediate


def _fitting(target: FusedTarget, site: ExpertSite) -> set[Orientation]:
    inputs, outputs = _sizes(target, site)
    stacked = target.rank * site.shape.num_experts
    if target.a.shape[0] != stacked:
        raise _mismatch(target, site, f"factors of {target.a.shape[0] // target.rank} experts")
    sizes = target.a.shape[1], target.b.shape[0]
    fitting: set[Orientation] = set()
    if sizes == (inputs, outputs):
        fitting.add("standard")
    if sizes == (outputs, inputs):
        fitting.add("reversed")
    if not fitting:
        raise _mismatch(target, site, "sizes of another model")
    return fitting


def _mismatch(target: FusedTarget, site: ExpertSite, what: str) -> AdapterMismatchError:
    inputs, outputs = _sizes(target, site)
    stacked = target.rank * site.shape.num_experts
    return AdapterMismatchError(
        target.key,
        found=f"{what}: lora_A {list(target.a.shape)}, lora_B {list(target.b.shape)}",
        expected=f"for {site.shape.num_experts} experts of rank {target.rank}: [{stacked}, {inputs}] and "
        f"[{outputs}, {stacked}], or the reverse, [{stacked}, {outputs}] and [{inputs}, {stacked}]",
        next_step="Load the adapter on the model that it was trained on.",
    )
