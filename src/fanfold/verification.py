"""verify: a packed checkpoint and its adapters against dense fp32, layer by layer.

The dense side is transformers' own experts class, filled with the dequantised weights of one layer at a time (adapters
merged in), so that it shares neither our layer nor our LoRA fold, and needs the memory of one dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fanfold.formats.codec import dequantize_expert
from fanfold.integrations.transformers.model import load_model
from fanfold.integrations.transformers.places import layer_number
from fanfold.layers.experts import Experts
from fanfold.layers.linear import Linear
from fanfold.spec.lora import LoraPair
from fanfold.spec.weights import ProjectionWeights

TOLERANCE = 1e-4  # relative error, fp32 on both sides; 5e-7 is usual
TOKENS = 24  # of each row of the test batch
Progress = Callable[[int, int, str], None]


def verify(
    path: str | Path, adapters: Mapping[str, str | Path] | None = None, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Compares every expert layer and the logits with a dense fp32 run of the same weights.

    One batch of random tokens, a row for the base and one for each adapter, runs packed in fp32; each row is then
    compared with a dense run that has that row's adapter merged into its weights. Activations stay as they are on both
    sides, also where the checkpoint has them quantised.

    Args:
        path: the checkpoint directory.
        adapters: name -> PEFT directory.
        progress: called with (done, total, what).

    Returns:
        `tolerance`; `layers`: for each expert layer its `layer`, `format` and `relative_error` (the worst over rows, on
        the dense run's own inputs, as routed and once through every expert); `logits`: `relative_error` and
        `max_abs_difference` (worst over rows); `base_rows_bit_equal`: whether the base row equals, bit for bit, the
        same batch without adapters; `ok`.

    Raises:
        FanfoldError: what load_model and AdapterPool.load raise.
    """
    model: Any = load_model(path, dtype=torch.float32, activation_format="plain", progress=progress)
    names: list[str | None] = [None]
    for name, folder in (adapters or {}).items():
        model.adapters.load(name, folder)
        names.append(name)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    row = torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = row.expand(len(names), -1)
    with torch.inference_mode():
        with model.adapters.using(names):
            packed = _logits(model, batch)
        without = _logits(model, batch)
        sites = cast("Mapping[str, object]", model.adapter_sites)
        layers = {at: site for at, site in sites.items() if isinstance(site, Experts)}
        errors = dict.fromkeys(layers, 0.0)
        logits, largest = 0.0, 0.0
        for done, name in enumerate(names):
            if progress is not None:
                progress(done, len(names), f"dense run of {name or 'the base'}")
            slot = -1 if name is None else model.adapters.slot(name)
            with _dense(model, layers, slot, errors):
                dense = _logits(model, row)[0]
            logits = max(logits, relative_error(packed[done], dense))
            largest = max(largest, (packed[done] - dense).abs().max().item())
        if progress is not None:
            progress(len(names), len(names), "dense runs")
    equal = torch.equal(packed[0], without[0])
    return {
        "tolerance": TOLERANCE,
        "layers": [
            {"layer": layer_number(at), "format": _formats(experts), "relative_error": errors[at]}
            for at, experts in layers.items()
        ],
        "logits": {"relative_error": logits, "max_abs_difference": largest},
        "base_rows_bit_equal": equal,
        "ok": equal and logits <= TOLERANCE and all(error <= TOLERANCE for error in errors.values()),
    }


def _logits(model: Any, input_ids: Tensor) -> Tensor:
    return model(input_ids=input_ids).logits


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| over all elements; infinite where something is not finite."""
    error = _norm(found - expected) / max(_norm(expected), torch.finfo(torch.float32).tiny)
    return error if error == error else float("inf")


def _norm(tensor: Tensor) -> float:
    return tensor.double().square().sum().sqrt().item()


@contextmanager
def _dense(model: nn.Module, layers: Mapping[str, Experts], slot: int, errors: dict[str, float]) -> Generator[None]:
    """Inside, every expert layer is dense with one adapter merged in, and so is every adapted Linear and router."""
    host = cast("Any", model)
    with torch.device("meta"):
        skeleton = type(host)(host.config)
    skeleton.set_experts_implementation("eager")
    linears = [site for site in host.adapter_sites.values() if isinstance(site, Linear) and (slot, 0) in site.pairs]
    kept = [cast("nn.Parameter", site.module.weight) for site in linears]
    try:
        for at, experts in layers.items():
            host.set_submodule(at, _DenseExperts(at, experts, skeleton.get_submodule(at), slot, errors))
        for site, weight in zip(linears, kept, strict=True):  # a parameter of its own: another module may share this
            site.module.weight = nn.Parameter(weight + _delta(site.pairs[slot, 0]), requires_grad=False)
        yield
    finally:
        for at, experts in layers.items():
            host.set_submodule(at, experts)
        for site, weight in zip(linears, kept, strict=True):
            site.module.weight = weight


class _DenseExperts(nn.Module):
    """transformers' experts of one layer, made for one call; notes how far the packed layer is from them."""

    def __init__(self, at: str, packed: Experts, empty: nn.Module, slot: int, errors: dict[str, float]) -> None:
        super().__init__()
        self.at = at
        self.held = packed, empty
        self.slot = slot
        self.errors = errors

    def forward(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        packed, empty = self.held
        dense = empty.to_empty(device=hidden.device)
        _fill(dense, packed, self.slot)
        out: Tensor = dense(hidden, topk_ids, topk_weights)
        batches = [(hidden, topk_ids, topk_weights, out)]
        everyone = _every_expert(hidden, packed.shape.num_experts, topk_ids.shape[1])
        batches.append((*everyone, dense(*everyone)))
        dense.to("meta")
        for x, ids, weights, expected in batches:
            adapter_ids = torch.full((len(x),), self.slot, dtype=torch.int32)
            error = relative_error(packed(x, ids, weights, adapter_ids), expected)
            self.errors[self.at] = max(self.errors[self.at], error)
        return out


def _every_expert(hidden: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of the layer's inputs that goes to every expert: the router leaves some out."""
    tokens = -(-experts // top_k)
    ids = (torch.arange(tokens * top_k) % experts).view(tokens, top_k)
    return hidden[torch.arange(tokens) % len(hidden)], ids, torch.full(ids.shape, 1 / top_k)


def _fill(dense: nn.Module, packed: Experts, slot: int) -> None:
    """Dequantised weights with the slot's pairs merged in, in the module's own layout."""
    up_names = ("gate", "up") if packed.shape.gated else ("up",)
    target = cast("Any", dense)
    names: dict[str, tuple[ProjectionWeights, tuple[str, ...]]] = {
        "gate_up_proj" if packed.shape.gated else "up_proj": (packed.weights.gate_up, up_names),
        "down_proj": (packed.weights.down, ("down",)),
    }
    for name, (projection, halves) in names.items():
        parameter: Tensor = getattr(target, name)
        for expert in range(projection.num_experts):
            parts = [_merged(projection, packed, expert, p, half, slot) for p, half in enumerate(halves)]
            parameter.data[expert] = _laid_out(parts, target)
        if projection.bias is not None:
            bias = projection.bias.float()
            for expert in range(projection.num_experts):
                getattr(target, f"{name}_bias").data[expert] = _interleaved(list(bias[expert]), target)


def _merged(projection: ProjectionWeights, packed: Experts, expert: int, p: int, half: str, slot: int) -> Tensor:
    weight = dequantize_expert(projection, expert, p)
    pair = packed.pairs[half].get((slot, expert))
    return weight if pair is None else weight + _delta(pair)


def _laid_out(parts: list[Tensor], module: Any) -> Tensor:
    rows = _interleaved(parts, module)
    return rows.T if module.is_transposed else rows


def _interleaved(parts: list[Tensor], module: Any) -> Tensor:
    """Gate above up, or their rows in turn."""
    if len(parts) == 2 and not module.is_concatenated:
        return torch.stack(parts, dim=1).flatten(0, 1)
    return torch.cat(parts)


def _delta(pair: LoraPair) -> Tensor:
    return pair.scale * (pair.b.float() @ pair.a.float())


def _formats(experts: Experts) -> str:
    return ", ".join(dict.fromkeys(fmt.name for fmt in experts.formats))
