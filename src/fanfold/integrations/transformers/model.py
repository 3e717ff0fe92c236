"""load_model: a checkpoint directory as a transformers model whose experts stay packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from fanfold.distributed.loading import loading, spread_layer
from fanfold.distributed.plan import ExpertPlan
from fanfold.errors import ConfigError, FanfoldError, TensorError, UnavailableError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.matrix import BESIDE
from fanfold.formats.names import expert_name
from fanfold.integrations.transformers.adapters import attach_adapters
from fanfold.integrations.transformers.places import (
    activation_of,
    check_layers,
    check_place,
    layer_number,
    no_places,
)
from fanfold.integrations.transformers.quantizer import (
    METHOD,
    EmptyPlace,
    FanfoldQuantizer,
    modules_of,
    register,
    shapes_of,
)
from fanfold.layers.activation_format import AUTO, check_name
from fanfold.load import Options, build_experts, checked_device, compute_dtype, open_checkpoint
from fanfold.ops.failures import placing

Progress = Callable[[int, int, str], None]


class LazyWeight:
    """A tensor of the checkpoint that is read, and dequantised where it is packed, when transformers takes it.

    What goes wrong then is noted in `failures`: transformers reports it in words of its own.
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, packed: str | None, dtype: torch.dtype, failures: list[FanfoldError]
    ) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._packed = packed
        self._dtype = dtype
        self._failures = failures

    def __getitem__(self, _: object) -> Tensor:
        try:
            if self._packed is not None:
                return self._checkpoint.read_linear(self._packed, self._dtype)
            return self._checkpoint.files.read(self._name)
        except FanfoldError as error:
            self._failures.append(error)
            raise

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
    batch_invariant: bool = False,
    activation_format: str = AUTO,
    progress: Progress | None = None,
    parallel: ExpertPlan | Any = None,
) -> Any:
    """A transformers model whose experts are fanfold's and stay packed; all else is transformers' own.

    Weights outside the experts that are packed too (attention in most checkpoints) are dequantised to `dtype`. The
    model has an attribute `adapters`, a fanfold.AdapterPool of 8 slots.

    Args:
        path: the checkpoint directory.
        device: where the model goes.
        dtype: of activations and unpacked weights: bfloat16, float16 or float32; None takes the one of config.json.
        implementation: "auto", or the name of one: see fanfold.Experts.
        batch_invariant: see fanfold.Experts.
        activation_format: of the experts, see fanfold.Experts; "auto" does as the checkpoint says.
        progress: called with (done, total, what) while loading.
        parallel: spreads the experts over the ranks of a process group, all else being on every rank; a collective
            call then: all ranks load, or none. A transformers DistributedConfig says the same with tp_size and ep_size
            of the number of ranks and tp_plan={}. None: all experts are here.

    Returns:
        The model (of the class its config.json names), in evaluation mode, without gradients.

    Raises:
        MissingFileError, CorruptFileError, ConfigError, TensorError, UnsupportedError: each names the file or tensor.
        MissingExpertsError: experts of the model are not in the checkpoint.
        ArgumentError: a device, dtype or implementation that does not exist; `parallel` is no plan.
        UnavailableError: the device is not there, no implementation runs on it, or transformers is too old for
            `parallel`.
        DeviceMemoryError: it has no room for the weights.
        RankError: another rank failed, is gone, or reads another checkpoint.
    """
    plan = _plan_of(parallel)
    with nullcontext() if plan is None else loading(path, plan):
        target = checked_device(device, implementation)
        check_name(activation_format)
        checkpoint = open_checkpoint(path)
        chosen = compute_dtype(checkpoint, dtype)
        model = _without_experts(checkpoint, chosen)
        places = [(name, place) for name, place in modules_of(model) if isinstance(place, EmptyPlace)]
        check_layers(checkpoint, model, places)
    options = Options(chosen, target, implementation, batch_invariant, activation_format)
    for done, (name, place) in enumerate(places):
        if progress is not None:
            progress(done, len(places), f"experts of {name}")
        original = place.original[0]
        activation = activation_of(original)
        what = checkpoint, layer_number(name), activation, options
        experts = build_experts(*what, name) if plan is None else spread_layer(*what, plan, name)
        check_place(checkpoint, name, original, experts)
        model.set_submodule(name, experts)
    if progress is not None:
        progress(len(places), len(places), "experts")
    nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with placing(f"{checkpoint.path}: weights outside the experts", nbytes, target):
        cast("nn.Module", model).to(target)
    model.requires_grad_(False)
    attach_adapters(model, chosen)
    return model


def _without_experts(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model with an EmptyPlace for the experts of each layer, all other weights loaded.

    Raises:
        ConfigError: transformers can't make a model of this config.
        TensorError: weights are missing, left over, or of the wrong shape.
        CorruptFileError: a file changed while it was read.
    """
    register()
    failures: list[FanfoldError] = []
    state: dict[str, Any] = {
        name: LazyWeight(checkpoint, name, None, dtype, failures)
        for name in checkpoint.plain
        if name.rpartition(".")[2] not in BESIDE or name.endswith(".bias")
    }
    for module in checkpoint.packed:
        state[f"{module}.weight"] = LazyWeight(checkpoint, module, module, dtype, failures)
    config = _config(checkpoint)
    model_class = _model_class(checkpoint, config)
    try:
        loaded = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused by name below
        )
    except Exception as error:  # transformers raises many unlike classes, Exception among them
        if failures:
            raise failures[0] from error
        raise TensorError(
            str(checkpoint.path),
            found=f"{type(error).__name__} from transformers: {error}",
            expected=f"the weights of a {model_class.__name__} of this config",
            next_step="Compare config.json with the weights; fetch both again.",
        ) from error
    model, report = cast("tuple[PreTrainedModel, Mapping[str, Any]]", loaded)
    experts = sorted(name for name in report.get("missing_keys") or () if expert_name(name) is not None)
    if experts:
        raise no_places(checkpoint, model_class.__name__, f"experts such as {experts[0]} outside that interface")
    wrong = {
        what: [str(entry) for entry in report.get(what) or ()]
        for what in ("missing_keys", "unexpected_keys", "error_msgs")
    }
    wrong["mismatched_keys"] = _mismatched(model, report)
    for what, names in wrong.items():
        names.sort()
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


def _mismatched(model: PreTrainedModel, report: Mapping[str, Any]) -> list[str]:
    """Names and shapes of weights of another shape than the model's class has made.

    transformers 5.17 takes such weights where it has a quantizer; later ones report them.
    """
    made = cast("FanfoldQuantizer", model.hf_quantizer).shapes
    taken = [(name, shape, made[name]) for name, shape in shapes_of(model).items() if shape != made.get(name, shape)]
    return [
        f"{name} {list(found)} instead of {list(here)}" for name, found, here in (*report["mismatched_keys"], *taken)
    ]


def _model_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel]:
    names = cast("list[object] | None", config.architectures)
    name = names[0] if names else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise ConfigError(
            f"{checkpoint.config.path}: architectures",
            found=repr(names),
            expected=f"a model class of transformers {transformers.__version__}",
            next_step="Install a transformers that knows this model.",
        )
    return found


def _config(checkpoint: Checkpoint) -> PreTrainedConfig:
    try:
        config = cast("Any", AutoConfig).from_pretrained(
            str(checkpoint.path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and huggingface_hub raise many unlike classes, Exception among them
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
    file = checkpoint.path / "generation_config.json"
    if not file.exists():
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            str(checkpoint.path), local_files_only=True
        )
    except Exception as error:  # transformers raises many unlike classes
        raise ConfigError(
            str(file),
            found=f"{type(error).__name__} from transformers: {error}",
            expected=f"a generation config that transformers {transformers.__version__} reads",
            next_step="Correct the file, or remove it to generate with the defaults.",
        ) from error


def _plan_of(parallel: object) -> ExpertPlan | None:
    """A plan as it is, or what transformers' DistributedConfig says."""
    if parallel is None or isinstance(parallel, ExpertPlan):
        return parallel
    if find_spec("transformers.distributed.expert_parallel") is None:
        raise UnavailableError(
            "load_model: parallel",
            found=f"{type(parallel).__name__}, and a transformers without expert parallelism",
            expected="a fanfold.distributed.ExpertPlan",
            next_step="Pass ExpertPlan(), which needs no other transformers; DistributedConfig takes release 5.24.",
        )
    from fanfold.integrations.transformers.parallel import plan_of

    return plan_of(parallel)
