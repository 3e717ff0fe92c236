"""load_model: a checkpoint directory as a transformers model whose experts stay packed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from fanfold.errors import ConfigError, MissingExpertsError, TensorError, UnsupportedError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.matrix import BESIDE
from fanfold.integrations.transformers.adapters import attach_adapters
from fanfold.integrations.transformers.quantizer import METHOD, EmptyPlace, modules_of, register
from fanfold.load import build_experts, compute_dtype, open_checkpoint
from fanfold.select import choose
from fanfold.spec.activation import Activation

Progress = Callable[[int, int, str], None]
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class LazyWeight:
    """A tensor of the checkpoint that is read, and dequantised where it is packed, when transformers takes it."""

    def __init__(self, checkpoint: Checkpoint, name: str, packed: str | None, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._packed = packed
        self._dtype = dtype

    def __getitem__(self, _: object) -> Tensor:
        if self._packed is not None:
            return self._checkpoint.read_linear(self._packed, self._dtype)
        return self._checkpoint.files.read(self._name)

    def get_shape(self) -> list[int]:
        """As a safetensors slice has it."""
        if self._packed is not None:
            matrix = self._checkpoint.linear(self._packed)
            return [matrix.n, matrix.k]
        return list(self._checkpoint.files.infos[self._name].shape)

    def get_dtype(self) -> str:
        """As a safetensors slice has it; transformers asks whether it starts with F or BF."""
        dtype = self._dtype if self._packed is not None else self._checkpoint.files.infos[self._name].dtype
        return {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}.get(dtype, "I64")


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    implementation: str = "auto",
    progress: Progress | None = None,
) -> Any:
    """A transformers model whose experts are fanfold's and stay packed; all else is transformers' own.

    Weights outside the experts that are packed too (attention in most checkpoints) are dequantised to `dtype`. The
    model has an attribute `adapters`, a fanfold.AdapterPool of 8 slots.

    Args:
        path: the checkpoint directory.
        device: where the model goes.
        dtype: of activations and unpacked weights: bfloat16, float16 or float32; None takes the one of config.json.
        implementation: "auto", or "reference".
        progress: called with (done, total, what) while loading.

    Returns:
        The model (of the class its config.json names), in evaluation mode, without gradients.

    Raises:
        MissingFileError, CorruptFileError, ConfigError, TensorError, UnsupportedError: each names the file or tensor.
        MissingExpertsError: experts of the model are not in the checkpoint.
        UnavailableError: no implementation for the device.
    """
    checkpoint = open_checkpoint(path)
    chosen = compute_dtype(checkpoint, dtype)
    device = torch.device(device)
    choose("cpu" if device.type == "cpu" else "sm_90", implementation)
    model = _without_experts(checkpoint, chosen)
    places = [(name, place) for name, place in modules_of(model) if isinstance(place, EmptyPlace)]
    _check_layers(checkpoint, model, places)
    for done, (name, place) in enumerate(places):
        if progress is not None:
            progress(done, len(places), f"experts of {name}")
        original = place.original[0]
        experts = build_experts(checkpoint, layer_number(name), activation_of(original), chosen, "auto", name)
        experts.requested = implementation
        _check_place(checkpoint, name, original, experts.shape.num_experts)
        model.set_submodule(name, experts.to(device))
    if progress is not None:
        progress(len(places), len(places), "experts")
    checkpoint.files.close()
    cast("nn.Module", model).to(device)
    model.requires_grad_(False)
    attach_adapters(model, chosen)
    return model


def activation_of(experts: nn.Module) -> Activation:
    """The activation of transformers' experts module.

    Raises:
        UnsupportedError: its gate is of a kind that fanfold does not run.
    """
    kind = type(experts).__name__
    if kind == "GptOssExperts":
        return Activation(
            "clamped_swiglu", alpha=float(cast("Any", experts).alpha), limit=float(cast("Any", experts).limit)
        )
    function = type(getattr(experts, "act_fn", None)).__name__
    gated = bool(getattr(experts, "has_gate", True))
    own_gate = getattr(type(experts), "_apply_gate", None)
    plain = getattr(own_gate, "__name__", "") == "_default_apply_gate" and not getattr(
        experts, "has_post_expert_norm", False
    )
    if gated and plain and function in ("SiLUActivation", "SiLU"):
        return Activation("silu")
    if gated and plain and function in ("GELUTanh", "NewGELUActivation", "PytorchGELUTanh"):
        return Activation("gelu_tanh")
    if not gated and function == "ReLUSquaredActivation":
        return Activation("relu2")
    raise UnsupportedError(
        f"activation of {kind}",
        found=f"{function}{'' if plain else ' with a gate of its own'}",
        expected="SiLU or tanh-GELU gates, gpt-oss's clamped SwiGLU, or relu^2 without a gate",
        next_step="Experts of this family are not run yet.",
    )


def _without_experts(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model with an EmptyPlace for the experts of each layer, all other weights loaded.

    Raises:
        ConfigError: transformers can't make a model of this config.
        TensorError: weights are missing, left over, or of the wrong shape.
    """
    register()
    state: dict[str, Any] = {
        name: LazyWeight(checkpoint, name, None, dtype)
        for name in checkpoint.plain
        if name.rpartition(".")[2] not in BESIDE or name.endswith(".bias")
    }
    for module in checkpoint.packed:
        state[f"{module}.weight"] = LazyWeight(checkpoint, module, module, dtype)
    config = _config(checkpoint)
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    if model_class is None:
        raise ConfigError(
            f"{checkpoint.config.path}: architectures",
            found=repr(config.architectures),
            expected=f"a model class of transformers {transformers.__version__}",
            next_step="Install a transformers that knows this model.",
        )
    try:
        loaded = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorError(
            str(checkpoint.path),
            found=f"{type(error).__name__} from transformers: {error}",
            expected=f"the weights of a {model_class.__name__} of this config",
            next_step="Compare config.json with the weights; fetch both again.",
        ) from error
    model, report = cast("tuple[PreTrainedModel, Mapping[str, Any]]", loaded)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(map(str, report.get(what) or ()))
        if names:
            raise TensorError(
                str(checkpoint.path),
                found=f"{what.replace('_', ' ')}: {', '.join(names[:4])}"
                + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
                expected=f"exactly the weights of a {model_class.__name__} of this config",
                next_step="Fetch the checkpoint again; nothing is filled with random weights or left out silently.",
            )
    _generation_config(checkpoint, model)
    return model


def _config(checkpoint: Checkpoint) -> PreTrainedConfig:
    try:
        config = cast("Any", AutoConfig).from_pretrained(str(checkpoint.path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            checkpoint.config.path,
            found=f"{type(error).__name__} from transformers: {error}",
            expected=f"a config that transformers {transformers.__version__} reads",
            next_step="Correct config.json, or install a transformers that knows this model.",
        ) from error
    for fields in (config, config.get_text_config()):
        if hasattr(fields, "quantization_config"):
            del fields.quantization_config
    config.quantization_config = {"quant_method": METHOD}
    return cast("PreTrainedConfig", config)


def _generation_config(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """generation_config.json, which from_pretrained reads only from a path."""
    if (checkpoint.path / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            str(checkpoint.path), local_files_only=True
        )


def layer_number(name: str) -> int:
    """The layer of a module's name, e.g. 3 of `model.layers.3.mlp.experts`."""
    match = LAYER.search(name)
    assert match is not None, name
    return int(match[1])


def _check_layers(checkpoint: Checkpoint, model: PreTrainedModel, places: list[tuple[str, EmptyPlace]]) -> None:
    """Experts for every place, a place for all experts."""
    if not places:
        raise UnsupportedError(
            f"{checkpoint.path}: {type(model).__name__}",
            found="no stacked experts that fanfold knows",
            expected="a Mixture-of-Experts model of a family that uses transformers' experts interface",
            next_step="Load other models with transformers itself.",
        )
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


def _check_place(checkpoint: Checkpoint, name: str, original: nn.Module, experts: int) -> None:
    expected = cast("int", original.num_experts)
    if experts != expected:
        raise MissingExpertsError(
            f"{checkpoint.path}: {name}",
            found=f"{experts} experts",
            expected=f"{expected}, as config.json states",
            next_step="Fetch the missing shards. Experts are never filled with random weights.",
        )
