"""bind: every pair of an adapter to its place in a model, or an error and nothing bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fanfold.errors import AdapterMismatchError
from fanfold.lora.adapter import Adapter, ExpertTarget, FusedTarget, ModuleTarget, Projection, Target
from fanfold.lora.layout import orientation_of, take_apart
from fanfold.lora.resolve import SiteFinder
from fanfold.lora.site import ExpertSite, LinearSite, Pairs, Site
from fanfold.spec import LoraPair

Place = TypeVar("Place")


def bind(adapter: Adapter, sites: Mapping[str, Site], *, partial: bool = False) -> dict[str, Pairs]:
    """The pairs of an adapter by site.

    Args:
        adapter: what read_adapter returned.
        sites: the ExpertSites and LinearSites of the model by path.
        partial: leave out what has no site here, as long as something has one: for a layer on its own, which
            an adapter of the whole model still fits. For a whole model (False) that is an error.

    Returns:
        Site path -> {(projection, expert): pair} for an ExpertSite, one pair for a LinearSite. Tensors are
        views of the adapter's.

    Raises:
        AdapterMismatchError: a target has no site, or more than one; its shapes, its expert or its kind do
            not fit the site; or two targets mean the same weights.
    """
    finder = SiteFinder(sites)
    # once a site: a protocol is slow to ask for, and adapters have thousands of targets
    expert_sites = {path: site for path, site in sites.items() if isinstance(site, ExpertSite)}
    single: list[tuple[ExpertTarget, ExpertSite]] = []
    plain: list[tuple[Target, Site]] = []
    fused: list[tuple[FusedTarget, ExpertSite]] = []
    for target in adapter.targets:
        path = finder.find(target.path)
        if path is None:
            if partial:
                continue
            raise _no_site(target, finder.nearest(target.path))
        site = sites[path]
        if isinstance(target, FusedTarget):
            fused.append((target, _expert_site(target, site, expert_sites.get(path))))
        elif isinstance(target, ExpertTarget):
            single.append((target, _expert_site(target, site, expert_sites.get(path))))
        else:
            plain.append((target, site))
    if not single and not plain and not fused:
        raise AdapterMismatchError(
            str(adapter.path),
            found=f"targets such as {adapter.targets[0].key}",
            expected=f"at least one for {', '.join(list(sites)[:3]) or 'a module, and there are none'}",
            next_step="Load the adapter on the model that it was trained on.",
        )

    experts: dict[str, dict[tuple[Projection, int], LoraPair]] = {}
    linears: dict[str, LoraPair] = {}
    for target, expert_site in single:
        _add(experts.setdefault(expert_site.path, {}), _expert_pair(target, expert_site), target)
    for target, site in plain:
        _add(linears, {site.path: _linear_pair(target, site)}, target)
    orientation = orientation_of(adapter, fused)
    for target, expert_site in fused:
        _add(experts.setdefault(expert_site.path, {}), take_apart(target, expert_site, orientation), target)
    return {**experts, **linears}


def _add(into: dict[Place, LoraPair], pairs: Mapping[Place, LoraPair], target: Target) -> None:
    for place, pair in pairs.items():
        if place in into:
            raise AdapterMismatchError(
                target.key,
                found=f"a second pair for {place}",
                expected="each weight of the model adapted once",
                next_step="Remove one of the two from the adapter.",
            )
        into[place] = pair


def _expert_pair(target: ExpertTarget, site: ExpertSite) -> dict[tuple[Projection, int], LoraPair]:
    shape = site.shape
    if target.expert >= shape.num_experts:
        raise AdapterMismatchError(
            target.key,
            found=f"expert {target.expert}",
            expected=f"experts 0 to {shape.num_experts - 1} at {site.path}",
            next_step="Load the adapter on the model that it was trained on.",
        )
    if target.projection == "gate" and not shape.gated:
        raise _wrong_kind(target, site, "experts with a gate projection")
    inputs, outputs = shape.hidden, shape.intermediate
    if target.projection == "down":
        inputs, outputs = outputs, inputs
    return {(target.projection, target.expert): _pair(target, site, inputs, outputs)}


def _linear_pair(target: Target, site: Site) -> LoraPair:
    if not isinstance(site, LinearSite):
        raise _wrong_kind(target, site, "a Linear")
    if isinstance(target, ModuleTarget) and target.copy is not None:
        _check_copy(target, target.copy, site.weight)
    return _pair(target, site, site.in_features, site.out_features)


def _check_copy(target: Target, copy: Tensor, weight: Tensor) -> None:
    """The base's weight in the adapter's file is that of the model, as far as the coarser of the two dtypes tells."""
    same = copy.shape == weight.shape
    if same:
        held = weight.cpu()
        same = torch.equal(copy.to(held.dtype), held) or torch.equal(copy, held.to(copy.dtype))
    if not same:
        raise AdapterMismatchError(
            f"{target.key}.base_layer.weight",
            found="a base weight that is not the model's",
            expected=f"the weight of {target.path} that the model has",
            next_step="Load the adapter on the model that it was trained on, or save it again with PEFT's "
            "save_embedding_layers=False if only its deltas are wanted.",
        )


def _pair(target: Target, site: Site, inputs: int, outputs: int) -> LoraPair:
    if (target.a.shape[1], target.b.shape[0]) != (inputs, outputs):
        raise AdapterMismatchError(
            target.key,
            found=f"lora_A {list(target.a.shape)}, lora_B {list(target.b.shape)}",
            expected=f"lora_A [{target.rank}, {inputs}] and lora_B [{outputs}, {target.rank}]",
            next_step="Load the adapter on the model that it was trained on.",
        )
    return LoraPair(target.a, target.b, target.scale)


def _expert_site(target: Target, site: Site, expert_site: ExpertSite | None) -> ExpertSite:
    if expert_site is None:
        raise _wrong_kind(target, site, "experts")
    return expert_site


def _wrong_kind(target: Target, site: Site, expected: str) -> AdapterMismatchError:
    return AdapterMismatchError(
        target.key,
        found=f"{site.path}, which is not that",
        expected=expected,
        next_step="Load the adapter on the model that it was trained on.",
    )


def _no_site(target: Target, nearest: list[str]) -> AdapterMismatchError:
    return AdapterMismatchError(
        target.key,
        found="no such module in the model",
        expected=f"a module that can be adapted; the nearest are {', '.join(nearest) or 'none'}",
        next_step="Load the adapter on the model that it was trained on.",
    )
