"""The hook by which transformers builds a model with empty places for the experts.

transformers knows how each family names and converts its other weights; of the experts it must make nothing: no memory,
no random values. A quantizer may replace modules before weights are loaded, which is all this one does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "fanfold"


class EmptyPlace(nn.Module):
    """Stands where the packed experts go; remembers the module that transformers made, on the meta device."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = [original]  # in a list, so that its parameters are not the model's


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules; transformers' annotations leave them unknown."""
    return list(cast("Any", model).named_modules())


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """The shape of every parameter and buffer."""
    host = cast("Any", model)
    return {name: tensor.shape for name, tensor in (*host.named_parameters(), *host.named_buffers())}


def is_experts(module: nn.Module) -> bool:
    """Whether a module is transformers' class of stacked experts."""
    return hasattr(module, "num_experts") and hasattr(module, "down_proj") and hasattr(module, "is_transposed")


class FanfoldConfig(QuantizationConfigMixin):
    """Marks a model whose experts fanfold holds."""

    def __init__(self, **kwargs: Any) -> None:
        self.quant_method = METHOD  # pyright: ignore[reportAttributeAccessIssue]


class FanfoldQuantizer(HfQuantizer):
    """Replaces every experts module by an EmptyPlace before weights are loaded.

    Attributes:
        shapes: of every other parameter and buffer, as the model's class has made it.
    """

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any) -> None:
        # What transformers is given is plain: it casts every tensor as for any model, and one by one.
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": False})
        self.shapes: dict[str, torch.Size] = {}

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for path, module in modules_of(model):
            if is_experts(module):
                model.set_submodule(path, EmptyPlace(module))
        self.shapes = shapes_of(model)
        return model

    # transformers leaves the results of these two unannotated, which reads as None.
    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The checkpoint on disk stays the only copy."""
        return False

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Inference only."""
        return False


def register() -> None:
    """Makes the method known to transformers, once a process."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(FanfoldConfig)
        register_quantizer(METHOD)(FanfoldQuantizer)
