"""ModelOpt's config: one `quant_algo` for all modules but the excluded ones, or one a module (MIXED_PRECISION)."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TypeVar

from fanfold.formats.config_fields import Fields
from fanfold.formats.schemes import Scheme
from fanfold.spec.weight_format import WeightFormat

T = TypeVar("T")
# Of W4A8 and W4A4 the weights alone matter here. Names are met in capitals and in small letters.
ALGORITHMS = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "FP8": "fp8-tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel",
}


def modelopt(config: Fields) -> Scheme:
    """The scheme of a ModelOpt config.

    Raises:
        ConfigError: a field is missing or malformed.
        UnsupportedError: an algorithm that fanfold does not run.
    """
    return by_module(config, _format)


def by_module(config: Fields, of_algorithm: Callable[[Fields], T]) -> Callable[[str], T | None]:
    """Module name -> what `of_algorithm` says of the object with the module's `quant_algo`; None for excluded modules.

    Raises:
        ConfigError: a field is missing or malformed.
    """
    excluded = config.names("exclude_modules", "ignore")
    if config.text("quant_algo").upper() == "MIXED_PRECISION":
        layers = config.object("quantized_layers")
        named = {name: of_algorithm(layers.object(name)) for name in layers.values}
        return named.get
    common = of_algorithm(config)
    return lambda module: None if any(fnmatchcase(module, pattern) for pattern in excluded) else common


def _format(config: Fields) -> WeightFormat:
    algorithm = config.text("quant_algo").upper()
    if algorithm == "FP8_PB_WO":
        stated = config.has("weight_block_size")
        return WeightFormat("fp8", 8, block=config.block("weight_block_size") if stated else None)
    name = ALGORITHMS.get(algorithm)
    if name is None:
        raise config.unsupported("quant_algo", f"{', '.join(ALGORITHMS)}, FP8_PB_WO or MIXED_PRECISION")
    fmt = WeightFormat.parse(name)
    if fmt.group_size != -1 and config.has("group_size") and config.integer("group_size") != fmt.group_size:
        raise config.unsupported("group_size", str(fmt.group_size))
    return fmt
