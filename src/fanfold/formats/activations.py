"""What each quantiser's config says of the activations that a module's weights meet.

A name a module: `plain` (nothing: weight only), `nvfp4`, `mxfp4`, or type and bits, such as `fp8`; `-static` behind it
where the scale is a number of the file (NVFP4's second level always is).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fanfold.formats.compressed_tensors_scheme import by_target
from fanfold.formats.config_fields import Fields
from fanfold.formats.modelopt_scheme import by_module
from fanfold.spec.activation_format import PLAIN

ActivationScheme = Callable[[str], str]
BLOCKS = {16: "nvfp4", 32: "mxfp4"}
"""Names of 4-bit numbers, by the values that share a scale."""
MODELOPT = {
    "NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "fp8-static",
    "FP8": "fp8-static",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}


def compressed_tensors(config: Fields) -> ActivationScheme:
    """`input_activations` of a module's group.

    Raises:
        ConfigError: a field is missing or malformed.
    """
    find = by_target(config, _inputs)
    return lambda module: find(module) or PLAIN


def _inputs(group: Fields) -> str:
    if not group.has("weights") or not group.has("input_activations"):
        return PLAIN
    inputs = group.object("input_activations")
    bits, kind = inputs.integer("num_bits"), inputs.text("type")
    if (bits, kind) == (4, "float") and inputs.has("group_size") and inputs.group_size() in BLOCKS:
        return BLOCKS[inputs.group_size()]
    name = f"{'fp' if kind == 'float' else kind}{bits}"
    return name if inputs.values.get("dynamic") in (True, "local") else f"{name}-static"


def modelopt(config: Fields) -> ActivationScheme:
    """The algorithm of a module; W4A16_NVFP4 and FP8_PB_WO are weight only.

    Raises:
        ConfigError: a field is missing or malformed.
    """
    find = by_module(config, _of_algorithm)
    return lambda module: find(module) or PLAIN


def _of_algorithm(config: Fields) -> str:
    return MODELOPT.get(config.text("quant_algo").upper(), PLAIN)


def fp8(config: Fields) -> ActivationScheme:
    """`activation_scheme` of fine-grained FP8, dynamic where it does not say."""
    name = "fp8-static" if config.text("activation_scheme", "dynamic").lower() == "static" else "fp8"
    return lambda module: name


def weight_only(module: str) -> str:
    """Of quantisers that leave activations alone."""
    return PLAIN


SCHEMES: Mapping[str, Callable[[Fields], ActivationScheme]] = {
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "fp8": fp8,
}
"""By quant_method; all others are `weight_only`."""
