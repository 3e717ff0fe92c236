"""Places: where a model's experts go, and whether a checkpoint's experts belong there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers import PreTrainedModel

from fanfold.distributed.expert_parallel import ExpertParallel
from fanfold.errors import MissingExpertsError, TensorError, UnsupportedError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.integrations.transformers.quantizer import EmptyPlace
from fanfold.layers.experts import Experts
from fanfold.spec.activation import Activation, ActivationKind

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_number(name: str) -> int:
    """The layer of a module's name, e.g. 3 of `model.layers.3.mlp.experts`.

    Raises:
        UnsupportedError: the name has none.
    """
    match = LAYER.search(name)
    if match is None:
        raise UnsupportedError(
            f"experts at {name}",
            found="a name without a layer",
            expected="layers.N. in the name",
            next_step="Experts of this family are not run yet.",
        )
    return int(match[1])


def activation_of(experts: nn.Module) -> Activation:
    """The activation of transformers' experts module.

    Raises:
        UnsupportedError: its gate is of a kind that fanfold does not run.
    """
    host = cast("Any", experts)
    kind = type(experts).__name__
    if kind == "GptOssExperts":
        return Activation("clamped_swiglu", alpha=float(host.alpha), limit=float(host.limit))
    function = getattr(experts, "act_fn", None)
    plain = host._apply_gate.__name__ == "_default_apply_gate" and not getattr(host, "has_post_expert_norm", False)
    found = kind_of(function)
    if found is not None and plain and Activation(found).gated == host.has_gate:
        return Activation(found)
    name = getattr(function, "__name__", type(function).__name__)
    raise UnsupportedError(
        f"activation of {kind}",
        found=f"{name}{'' if plain else ' with a gate or norm of its own'}",
        expected="SiLU or tanh-GELU gates, gpt-oss's clamped SwiGLU, or relu^2 without a gate",
        next_step="Experts of this family are not run yet.",
    )


def kind_of(function: object) -> ActivationKind | None:
    """The kind whose values a function has; None where it has others."""
    if _computes(function, silu):
        return "silu"
    if _computes(function, lambda x: gelu(x, approximate="tanh")):
        return "gelu_tanh"
    return "relu2" if _computes(function, lambda x: torch.relu(x).square()) else None


def _computes(function: object, expected: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function without weights has the values of another; families spell the same one in many ways."""
    if not callable(function) or (isinstance(function, nn.Module) and list(function.parameters())):
        return False
    x = torch.linspace(-8, 8, 65)
    return torch.allclose(cast("Tensor", function(x)), expected(x), rtol=1e-6, atol=1e-6)


def check_layers(checkpoint: Checkpoint, model: PreTrainedModel, places: list[tuple[str, EmptyPlace]]) -> None:
    """Experts for every place, a place for all experts.

    Raises:
        UnsupportedError: the model has no place for experts.
        MissingExpertsError: a place has no experts.
        TensorError: experts have no place.
    """
    if not places:
        raise no_places(checkpoint, type(model).__name__, "no stacked experts that fanfold knows")
    wanted = {layer_number(name) for name, _ in places}
    missing = sorted(wanted - set(checkpoint.layers))
    if missing:
        raise MissingExpertsError(
            str(checkpoint.path),
            found=f"no experts for layers {', '.join(map(str, missing))}",
            expected=f"experts of all {len(wanted)} expert layers",
            next_step="Fetch the missing shards. Experts are never filled with random weights.",
        )
    ignored = cast("list[str]", getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    for layer in sorted(set(checkpoint.layers) - wanted):
        name = next(iter(checkpoint.layers[layer].names()))
        if not any(re.search(pattern, name) for pattern in ignored):
            raise TensorError(
                f"{checkpoint.path}: {name}",
                found=f"experts of layer {layer}",
                expected=f"experts of layers {', '.join(map(str, sorted(wanted)))} only",
                next_step="config.json and the weights are of different checkpoints: fetch both again.",
            )


def no_places(checkpoint: Checkpoint, model_class: str, found: str) -> UnsupportedError:
    """What to raise for a model whose experts fanfold can't take the place of."""
    return UnsupportedError(
        f"{checkpoint.path}: {model_class}",
        found=found,
        expected="a Mixture-of-Experts model of a family that uses transformers' experts interface",
        next_step="Load other models with transformers itself.",
    )


def check_place(checkpoint: Checkpoint, name: str, original: nn.Module, experts: Experts | ExpertParallel) -> None:
    """The experts have the sizes, and biases where, the model's own would have.

    Raises:
        MissingExpertsError: fewer experts than config.json states.
        TensorError: other sizes, or biases in one of the two alone.
    """
    host = cast("Any", original)
    shape = experts.shape
    if shape.num_experts < host.num_experts:
        raise MissingExpertsError(
            f"{checkpoint.path}: {name}",
            found=f"{shape.num_experts} experts",
            expected=f"{host.num_experts}, as config.json states",
            next_step="Fetch the missing shards. Experts are never filled with random weights.",
        )
    down = cast("list[int]", list(host.down_proj.shape))
    hidden, intermediate = reversed(down[1:]) if host.is_transposed else down[1:]
    found = (shape.num_experts, shape.hidden, shape.intermediate, shape.gated, experts.biased)
    expected = (down[0], hidden, intermediate, bool(host.has_gate), (bool(host.has_bias), bool(host.has_bias)))
    if found != expected:
        raise TensorError(
            f"{checkpoint.path}: {name}",
            found=_described(*found),
            expected=f"{_described(*expected)}, as config.json states",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )


def _described(experts: int, hidden: int, intermediate: int, gated: bool, biases: tuple[bool, bool]) -> str:
    gate = "with" if gated else "without"
    with_bias = [name for name, there in zip(("up", "down"), biases, strict=True) if there]
    return f"{experts} experts, H={hidden}, I={intermediate}, {gate} gate, biases: {', '.join(with_bias) or 'none'}"
