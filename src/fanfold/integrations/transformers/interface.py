"""experts_implementation="fanfold": transformers' own models of plain weights, with fanfold's kernels.

transformers loads and holds the weights; each call hands them over as they lie.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fanfold.errors import UnsupportedError
from fanfold.integrations.transformers.places import activation_of, kind_of
from fanfold.layers.op import packed_layer
from fanfold.spec.activation import Activation
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

NAME = "fanfold"
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def register() -> None:
    """Makes `experts_implementation="fanfold"` known to transformers; calling it again changes nothing.

    Then `AutoModelForCausalLM.from_pretrained(path, experts_implementation="fanfold")`, or
    `model.set_experts_implementation("fanfold")`, runs the experts of a model with bf16, fp16 or fp32 weights through
    torch.ops.fanfold.packed_layer: kernels on a GPU, the reference on a CPU.

    Where transformers spreads experts over ranks (`distributed_config`), each runs its own the same way. In releases
    that have EPImplementationInterface, `DistributedConfig(ep_implementation="fanfold")` adds rows of all ranks to the
    bits of a single process.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if find_spec("transformers.distributed.expert_parallel") is not None:
        from fanfold.integrations.transformers.parallel import register_parallel

        register_parallel()


def plain_model(path: str | Path, experts: str, dtype: torch.dtype) -> Any:
    """A model of plain weights as transformers loads it, on the CPU.

    Args:
        path: the checkpoint directory.
        experts: transformers' `experts_implementation`.
        dtype: of the weights.
    """
    model = AutoModelForCausalLM.from_pretrained(str(path), experts_implementation=experts, dtype=dtype)
    return cast("Any", model).eval()


def experts_forward(experts: nn.Module, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """What an experts module of transformers runs as its forward.

    Args:
        experts: the module.
        hidden: [T, H].
        topk_ids: int64 [T, k].
        topk_weights: [T, k].

    Returns:
        [T, H] in hidden's dtype.

    Raises:
        UnsupportedError: an activation or dtype that fanfold does not run.
    """
    return packed_layer(hidden, topk_ids, topk_weights, weights_of(experts), _activation(experts))


def _activation(experts: nn.Module) -> Activation:
    """The activation of the module, by the class of its function: a compiler can't try it on a few numbers."""
    function = cast("object", getattr(experts, "act_fn", None))
    known = _KNOWN.get(type(function))
    plain = cast("Any", type(experts))._apply_gate.__name__ == "_default_apply_gate"
    post_norm = getattr(experts, "has_post_expert_norm", False)
    if known is not None and plain and not post_norm and known.gated == cast("Any", experts).has_gate:
        return known
    return activation_of(experts)


def _known_functions() -> dict[type, Activation]:
    """Classes of transformers' activation functions, each tried on a few numbers."""
    found: dict[type, Activation] = {}
    for name in ("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu2"):
        function = cast("Any", ACT2FN)[name]
        kind = kind_of(function)
        if kind is not None:
            found[type(function)] = Activation(kind)
    return found


_KNOWN = _known_functions()


def weights_of(experts: nn.Module) -> ExpertWeights:
    """The parameters of transformers' stacked experts, as views; gpt-oss's biases are copied.

    Raises:
        UnsupportedError: weights of another dtype.
    """
    host = cast("Any", experts)
    halves = 2 if host.has_gate else 1
    up: Tensor = host.gate_up_proj if host.has_gate else host.up_proj
    down: Tensor = host.down_proj
    biases: list[Tensor | None] = [None, None]
    if host.has_bias:
        biases = [host.gate_up_proj_bias if host.has_gate else host.up_proj_bias, host.down_proj_bias]
    if host.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return ExpertWeights(
        _projection(up, biases[0], halves, concatenated=host.is_concatenated), _projection(down, biases[1], 1, True)
    )


def _projection(rows: Tensor, bias: Tensor | None, halves: int, concatenated: bool) -> ProjectionWeights:
    """W [E, P*N, K] and its bias [E, P*N] -> [E, P, N, K], [E, P, N]; rows of gate and up in turn unless concatenated.

    Raises:
        UnsupportedError: no dtype of plain weights.
    """
    if rows.dtype not in KINDS:
        raise UnsupportedError(
            'experts_implementation="fanfold"',
            found=f"{str(rows.dtype).removeprefix('torch.')} weights",
            expected="bfloat16, float16 or float32 weights",
            next_step="Load a quantised checkpoint with fanfold.load_model.",
        )

    def parted(tensor: Tensor) -> Tensor:
        split = cast("Any", tensor).unflatten
        return split(1, (halves, -1)) if concatenated else split(1, (-1, halves)).transpose(1, 2)

    weight = parted(rows)
    fmt = WeightFormat.parse(KINDS[rows.dtype])
    made = None if bias is None else parted(bias).contiguous()
    return ProjectionWeights(fmt, weight.shape[2], weight.shape[3], {"weight": weight}, made)
