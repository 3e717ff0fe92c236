"""Adapters per row of the batch in a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fanfold.distributed.expert_parallel import ExpertParallel
from fanfold.integrations.transformers.quantizer import modules_of
from fanfold.layers.experts import Experts
from fanfold.layers.linear import Linear, Router
from fanfold.lora.pool import AdapterPool
from fanfold.lora.rows import Rows
from fanfold.lora.site import Site


def attach_adapters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives a model whose experts are fanfold's its `adapters`: a pool over experts, Linears and routers.

    Forward and generate then tell the layers which row each token is of.
    """
    rows = Rows(model.device)
    host = cast("Any", model)
    host.adapter_rows = rows
    host.adapter_sites = _sites(model, rows, dtype)
    spread = [site for site in host.adapter_sites.values() if isinstance(site, ExpertParallel)]
    if spread:  # all of one group
        host.together = spread[0].together
    host.adapters = AdapterPool(model)
    note = _note_rows(rows)
    for module in {model, model.base_model}:  # either may be called; the head's own layers run behind the base model
        module.register_forward_pre_hook(note, with_kwargs=True)
    host.generate = _expanding(host.generate, rows)


def _sites(model: PreTrainedModel, rows: Rows, dtype: torch.dtype) -> dict[str, Site]:
    sites: dict[str, Site] = {}
    for path, module in modules_of(model):
        if isinstance(sites.get(path.rpartition(".")[0]), ExpertParallel):
            continue  # this rank's part of experts that are one site
        if isinstance(module, Experts | ExpertParallel):
            module.adapter_rows = rows
            sites[path] = module
            router_path, router = _router(model, path, module)
            if router is not None:
                sites[router_path] = Router(router_path, router, rows, dtype)
        elif isinstance(module, nn.Linear):
            sites[path] = Linear(path, module, rows, dtype)
    return sites


def _router(model: PreTrainedModel, path: str, experts: Experts | ExpertParallel) -> tuple[str, nn.Module | None]:
    """The router beside the experts, where it holds a weight [E, H] of its own (a Linear is one anyway)."""
    parent = path.rpartition(".")[0]
    for name, module in model.get_submodule(parent).named_children():
        weight = getattr(module, "weight", None)
        if (
            not isinstance(module, nn.Linear)
            and isinstance(weight, Tensor)
            and tuple(weight.shape) == (experts.shape.num_experts, experts.shape.hidden)
        ):
            return f"{parent}.{name}", module
    return "", None


def _note_rows(rows: Rows) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("inputs_embeds")
        inputs = kwargs.get("input_ids", args[0] if args else None) if inputs is None else inputs
        if isinstance(inputs, Tensor):
            rows.begin(inputs.shape[0], inputs.shape[1])

    return hook


def _expanding(generate: Callable[..., Any], rows: Rows) -> Callable[..., Any]:
    """generate, whose forwards may have each row several times (beams, return sequences)."""

    @wraps(generate)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        inputs = next(
            (
                v
                for v in (*args[:1], *(kwargs.get(n) for n in ("inputs", "input_ids", "inputs_embeds")))
                if v is not None
            ),
            None,
        )
        if not isinstance(inputs, Tensor):
            return generate(*args, **kwargs)
        with rows.expanding(inputs.shape[0]):
            return generate(*args, **kwargs)

    return wrapped
