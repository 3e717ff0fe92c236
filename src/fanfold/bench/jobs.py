"""What is timed: layers and formats, by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from fanfold.errors import ArgumentError
from fanfold.spec.activation import Activation
from fanfold.spec.shape import ExpertShape
from fanfold.spec.weight_format import WeightFormat


@dataclass(frozen=True)
class LayerShape:
    """One expert layer.

    Attributes:
        name: as it is asked for.
        experts: its sizes.
        top_k: experts a token.
        activation: between gate_up and down.
        bias: whether every matrix has a bias.
    """

    name: str
    experts: ExpertShape
    top_k: int
    activation: Activation = field(default_factory=Activation)
    bias: bool = False


LAYERS = {
    shape.name: shape
    for shape in (
        LayerShape("qwen3-30b", ExpertShape(128, 2048, 768), 8),
        LayerShape("mixtral-8x7b", ExpertShape(8, 4096, 14336), 2),
        LayerShape("deepseek-v3/8", ExpertShape(32, 7168, 2048), 8),  # one of 8 expert-parallel ranks
        LayerShape("gpt-oss-120b", ExpertShape(128, 2880, 2880), 4, Activation("clamped_swiglu"), bias=True),
        LayerShape("qwen3-next", ExpertShape(512, 2048, 512), 10),
    )
}

FORMATS = (
    "bf16",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block128x128",
    "gptq2-g128",
    "gptq3-g128",
    "gptq4-g128",
    "gptq4-g128-asym-v1",
    "gptq4-g128-actorder",
    "gptq8-g128",
    "awq4-g128-asym",
    "packed4-g128",
    "packed8-channel",
    "nvfp4",
    "mxfp4",
)
"""What `all` means: every kind of weights and every width of integers, as they are met most."""


def layer_shape(text: str) -> LayerShape:
    """The layer of that name, or of the sizes `E,k,H,I` (SiLU, no biases).

    Raises:
        ArgumentError: neither, or more experts a token than there are.
    """
    if text in LAYERS:
        return LAYERS[text]
    sizes = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(sizes) != 4 or text.count(",") != 3 or not 1 <= sizes[1] <= sizes[0]:
        raise ArgumentError(
            "shape",
            found=repr(text),
            expected=f"one of {', '.join(LAYERS)}, or E,k,H,I with 1 <= k <= E",
            next_step="E.g. 64,8,2048,1024: 64 experts, 8 a token, hidden size 2048, intermediate size 1024.",
        )
    experts, top_k, hidden, intermediate = sizes
    return LayerShape(",".join(map(str, sizes)), ExpertShape(experts, hidden, intermediate), top_k)


def weight_formats(text: str) -> list[WeightFormat]:
    """The format of that name, or all of `FORMATS` for `all`.

    Raises:
        UnsupportedError: no format has that name.
    """
    return [WeightFormat.parse(name) for name in (FORMATS if text == "all" else (text,))]
