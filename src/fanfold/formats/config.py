"""ModelConfig: what config.json says of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.formats.values import shown, sound_name
from fanfold.spec.activation import Activation

# Field names met for the number of experts, in this order.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Field names met for the experts of a token, in this order.
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
# Families whose fused expert weights are (E, inputs, outputs); those of all others are (E, outputs, inputs).
TRANSPOSED = frozenset({"aria", "aria_text", "gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})
# Families met in either order: their first checkpoints are transposed, transformers 5 saves them as it holds them.
EITHER_ORDER = frozenset({"qwen3_vl_moe", "qwen3_vl_moe_text"})
# Families whose fused rows alternate g0, u0, g1, u1, ...; all others store gate above up.
INTERLEAVED = frozenset({"gpt_oss"})
# Families whose experts have no gate projection.
UNGATED = frozenset({"nemotron_h"})
# Families whose gate is none of `Activation`'s kinds although hidden_act names one.
OTHER_GATES = frozenset(
    {
        "deepseek_v4",
        "glm5_next",
        "hy_v4",
        "inkling2",
        "inkling2_loop",
        "minimax_m3_vl",
        "muse_spark",
        "openai_privacy_filter",
    }
)
# Families whose configs have no field for it, as there is only SiLU.
ALWAYS_SILU = frozenset({"lfm2_moe"})
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
LIMIT = 7.0  # gpt-oss's, where config.json does not say
LARGEST_LIMIT = 1e6


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that matter to experts; those of `text_config` where there is one.

    Attributes:
        path: the file, for messages.
        fields: the object that describes the language model.
        quantization: `quantization_config`, from the top or from `text_config`.
        model_type: e.g. `qwen3_moe`, of the language model or else of the whole; empty where the file does not say.
        dtype: `dtype` (older: `torch_dtype`), likewise; None where the file does not say.
    """

    path: str
    fields: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    model_type: str
    dtype: object

    @classmethod
    def of(cls, path: str, config: Mapping[str, Any]) -> ModelConfig:
        """The config of a checkpoint, from the object in its config.json.

        Raises:
            ConfigError: `text_config` or `quantization_config` is no object.
        """
        fields = _object(path, config, "text_config") or config
        quantization = _object(path, config, "quantization_config") or _object(path, fields, "quantization_config")
        stated = fields.get("model_type") or config.get("model_type") or ""
        model_type = stated if isinstance(stated, str) and sound_name(stated) else ""
        dtypes = (where.get(name) for where in (fields, config) for name in ("dtype", "torch_dtype"))
        return cls(path, fields, quantization, model_type, next((dtype for dtype in dtypes if dtype), None))

    @property
    def hidden_size(self) -> int | None:
        """H, where the file says.

        Raises:
            ConfigError: it is no positive number.
        """
        return self._size("hidden_size")

    @property
    def num_experts(self) -> int | None:
        """E, under whichever name the file has it.

        Raises:
            ConfigError: no positive number, or two of the names disagree.
        """
        found = {name: self._size(name) for name in NUM_EXPERTS if self.fields.get(name) is not None}
        if len(set(found.values())) > 1:
            raise ConfigError(
                self.path,
                found=", ".join(f"{name} = {value}" for name, value in found.items()),
                expected="one number of experts",
                next_step="Correct config.json.",
            )
        return next(iter(found.values()), None)

    @property
    def top_k(self) -> int | None:
        """k, under whichever name the file has it.

        Raises:
            ConfigError: no positive number.
        """
        return next((self._size(name) for name in TOP_K if self.fields.get(name) is not None), None)

    @property
    def gated(self) -> bool:
        """Whether experts have a gate projection beside up."""
        return self.model_type not in UNGATED

    @property
    def transposed(self) -> bool:
        """Whether the family's fused weights are (E, inputs, outputs)."""
        return self.model_type in TRANSPOSED

    @property
    def either_order(self) -> bool:
        """Whether files may have fused weights in either order, as their shapes against H tell."""
        return self.model_type in EITHER_ORDER

    @property
    def interleaved(self) -> bool:
        """Whether the rows of fused gate_up weights alternate between gate and up."""
        return self.model_type in INTERLEAVED

    @property
    def activation(self) -> Activation:
        """The experts' activation.

        Raises:
            ConfigError: gpt-oss's limit is no positive number.
            UnsupportedError: one that fanfold does not run.
        """
        if self.model_type == "gpt_oss":
            return Activation("clamped_swiglu", limit=self._limit())
        if self.model_type in ALWAYS_SILU:
            return Activation("silu")
        stated = next(
            (self.fields[n] for n in ("mlp_hidden_act", "hidden_act", "hidden_activation") if self.fields.get(n)), None
        )
        name = stated if isinstance(stated, str) else ""
        if self.model_type in UNGATED and name == "relu2":
            return Activation("relu2")
        if self.model_type in OTHER_GATES or self.model_type in UNGATED or name not in ACTIVATIONS:
            raise UnsupportedError(
                f"{self.path}: activation of {self.model_type or 'this model'}",
                found=shown(stated),
                expected=f"{', '.join(ACTIVATIONS)}, gpt-oss's clamped SwiGLU or Nemotron-H's relu2",
                next_step="Experts with this activation are not run yet.",
            )
        return Activation("silu" if ACTIVATIONS[name] == "silu" else "gelu_tanh")

    def _limit(self) -> float:
        limit = self.fields.get("swiglu_limit")
        if limit is None:
            return LIMIT
        if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not 0 < limit < LARGEST_LIMIT:
            raise self._error("swiglu_limit", "a positive number")
        return float(limit)

    def _size(self, name: str) -> int | None:
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(name, "a positive whole number")
        return value

    def _error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {name}",
            found=shown(self.fields.get(name)),
            expected=expected,
            next_step="Correct config.json.",
        )


def _object(path: str, fields: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f"{path}: {name}",
            found=shown(value),
            expected="an object",
            next_step="Correct config.json.",
        )
    return cast("Mapping[str, Any] | None", value)
