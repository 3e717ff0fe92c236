"""adapter_config.json of a PEFT adapter: what fanfold needs of it, and what it refuses.

A field that changes what the adapter computes is either honoured or refused by name; fields that only say how
it was trained (dropout, which layers were chosen, initialisation from data) are not needed to run it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from fanfold.errors import ConfigError, CorruptFileError, MissingFileError, UnsupportedError

FILE_NAME = "adapter_config.json"
Number = TypeVar("Number", int, float)

# Fields that change what is computed, or add weights beside A and B.
_REFUSED = {
    "use_dora": "makes this DoRA, which also rescales the base weights",
    "lora_bias": "adds a bias behind lora_B",
    "modules_to_save": "replaces whole modules of the base",
    "fan_in_fan_out": "stores the weights of the base transposed",
    "alora_invocation_tokens": "turns the adapter on from a token of the prompt onwards",
    "trainable_token_indices": "changes rows of the embedding",
    "layer_replication": "repeats layers of the base",
}
# PEFT switches a variant of LoRA on by a field named use_<x> or <x>_config. These leave the product alone:
_TRAINING_ONLY = {
    "use_rslora",  # honoured, see `scale`
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "runtime_config",
    "velora_config",
}
_FP32_MAX = 3.4028234e38  # the scale is an fp32 factor
# Initialisations that first change the base weights: the adapter then belongs to that changed base.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """The facts of adapter_config.json that decide what an adapter computes.

    Attributes:
        rank: r of targets without an entry in `rank_pattern`.
        alpha: lora_alpha of targets without an entry in `alpha_pattern`.
        use_rslora: scale is alpha / sqrt(r) instead of alpha / r.
        rank_pattern: pattern -> r, in the file's order; the first one that matches counts.
        alpha_pattern: pattern -> lora_alpha, likewise.
        target_parameters: names of parameters adapted directly, e.g. "mlp.experts.gate_up_proj".
        peft_version: version of the PEFT that wrote the file; None before 0.18.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    target_parameters: tuple[str, ...] = ()
    peft_version: str | None = None

    @property
    def generation(self) -> tuple[int, int]:
        """(major, minor) of `peft_version`; files without one are of 0.17 or older."""
        major, minor = (self.peft_version or "0.17").split(".")[:2]
        return int(major), int(re.split(r"[^0-9]", minor)[0])

    def rank_of(self, key: str) -> int:
        """The r of a target; `key` is its module path, or the parameter's where that is targeted."""
        return _first_match(self.rank_pattern, key, self.rank)

    def scale_of(self, key: str) -> float:
        """Scale of that target: alpha / r, or alpha / sqrt(r) with rsLoRA (update_layer of PEFT)."""
        rank = self.rank_of(key)
        return _first_match(self.alpha_pattern, key, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, key: str) -> bool:
        """Whether `target_parameters` names this parameter, e.g. model.layers.0.mlp.gate.weight."""
        return any(key == name or key.endswith(f".{name}") for name in self.target_parameters)


def read_config(folder: Path) -> AdapterConfig:
    """Reads and checks `folder`/adapter_config.json.

    Raises:
        MissingFileError: there is no such file.
        CorruptFileError: it is not JSON.
        ConfigError: a field is missing or impossible.
        UnsupportedError: it asks for something else than plain LoRA on a plain base.
    """
    file = folder / FILE_NAME
    fields = _read_json(file)
    _refuse_variants(file, fields)
    version = fields.get("peft_version")
    if version is not None and not (isinstance(version, str) and re.match(r"[0-9]{1,9}\.[0-9]{1,9}", version)):
        raise _wrong(file, "peft_version", version, "a version such as 0.21.2, or no such field")
    rslora = fields.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise _wrong(file, "use_rslora", rslora, "true or false")
    return AdapterConfig(
        rank=_rank(file, "r", fields.get("r")),
        alpha=_alpha(file, "lora_alpha", fields.get("lora_alpha")),
        use_rslora=rslora,
        rank_pattern={
            pattern: _rank(file, f"rank_pattern[{pattern!r}]", value)
            for pattern, value in _patterns(file, fields, "rank_pattern").items()
        },
        alpha_pattern={
            pattern: _alpha(file, f"alpha_pattern[{pattern!r}]", value)
            for pattern, value in _patterns(file, fields, "alpha_pattern").items()
        },
        target_parameters=_names(file, "target_parameters", fields.get("target_parameters")),
        peft_version=version,
    )


def _read_json(file: Path) -> dict[str, object]:
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(
            str(file),
            found="no such file",
            expected="the adapter_config.json that PEFT writes beside the weights",
            next_step="Pass the directory that save_pretrained of PEFT wrote.",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(
            str(file), found=str(error), expected="a readable JSON file", next_step="Copy the adapter again."
        ) from error
    if not isinstance(value, dict):
        raise _wrong(file, "top level", value, "an object with the fields of a PEFT LoraConfig")
    return cast("dict[str, object]", value)


def _refuse_variants(file: Path, fields: Mapping[str, object]) -> None:
    kind = fields.get("peft_type")
    if not isinstance(kind, str):
        raise _wrong(file, "peft_type", kind, "LORA")
    if kind != "LORA":
        raise _unsupported(file, "peft_type", kind, "LORA")
    for name, reason in _REFUSED.items():
        if fields.get(name):
            raise _unsupported(file, name, fields[name], f"no {name}: it {reason}")
    for name, value in fields.items():
        variant = (name.startswith("use_") or name.endswith("_config")) and name not in _TRAINING_ONLY
        if variant and value:
            raise _unsupported(file, name, value, "plain LoRA without variants")
    if fields.get("bias", "none") != "none":
        raise _unsupported(file, "bias", fields["bias"], "'none': biases of the base stay as they are")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        expected = "an initialisation that leaves the base weights alone"
        raise _unsupported(file, "init_lora_weights", start, expected)


def _rank(file: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(file, name, value, "a whole number >= 1")
    return value


def _alpha(file: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _FP32_MAX:
        raise _wrong(file, name, value, "a finite number")
    return float(value)


def _names(file: Path, name: str, value: object) -> tuple[str, ...]:
    entries = cast("list[object]", value) if isinstance(value, list) else [value]
    names = [entry for entry in entries if isinstance(entry, str)]
    if value is not None and (not isinstance(value, list) or len(names) != len(entries)):
        raise _wrong(file, name, cast("object", value), "a list of parameter names, or null")
    return tuple(names)


def _patterns(file: Path, fields: Mapping[str, object], name: str) -> dict[str, object]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(file, name, value, "an object {pattern: number}, or null")
    patterns = cast("dict[str, object]", value)
    for pattern in patterns:
        try:
            _compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise _wrong(file, f"{name}[{pattern!r}]", str(error), "a regular expression") from error
    return patterns


def _compiled(pattern: str) -> re.Pattern[str]:
    # the rule of peft.utils.other.get_pattern_key
    return re.compile(rf"(.*\.)?({pattern})$")


def _first_match(patterns: Mapping[str, Number], key: str, default: Number) -> Number:
    return next((value for pattern, value in patterns.items() if _compiled(pattern).match(key)), default)


def _wrong(file: Path, name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{file}: {name}",
        found=_shown(value),
        expected=expected,
        next_step="Correct the field, or save the adapter again with PEFT.",
    )


def _unsupported(file: Path, name: str, value: object, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"{file}: {name}",
        found=_shown(value),
        expected=expected,
        next_step="Merge such an adapter into its base with PEFT, or train it as plain LoRA.",
    )


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
