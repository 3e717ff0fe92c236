"""Where formats meet layers: checkpoint directory -> Experts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fanfold.errors import ArgumentError, CheckpointWarning, UnavailableError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.evidence import zero_point_warning
from fanfold.layers.activation_format import AUTO, check_name
from fanfold.layers.experts import Experts, arch_of
from fanfold.select import check
from fanfold.spec.activation import Activation

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_experts(
    path: str | Path,
    layer: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    implementation: str = "auto",
    batch_invariant: bool = False,
    activation_format: str = AUTO,
    experts: Sequence[int] | None = None,
) -> Experts:
    """The experts of one layer of a checkpoint, packed, without transformers.

    Args:
        path: the checkpoint directory.
        layer: the layer's number.
        device: where the weights go.
        dtype: of the activations, by which adapters are kept; None takes the one config.json names.
        implementation: "auto", or the name of one: see Experts.
        batch_invariant: see Experts.
        activation_format: see Experts; "auto" does as the checkpoint says.
        experts: those to read, in that order, as the experts 0, 1, ... of the result; no bytes of others are read.
            None: all. fanfold.distributed.load_experts makes one layer of the parts of several processes.

    Returns:
        A fanfold.Experts.

    Raises:
        MissingFileError, CorruptFileError, ConfigError, TensorError, UnsupportedError: see fanfold.errors; each names
            the file or tensor.
        MissingExpertsError: the layer has no experts, or not all of them.
        ArgumentError: a device, dtype, implementation or expert that does not exist.
        UnavailableError: the device is not there, or no implementation runs on it.
        DeviceMemoryError: it has no room for the weights.
    """
    target = checked_device(device, implementation)
    check_name(activation_format)
    checkpoint = open_checkpoint(path)
    chosen = compute_dtype(checkpoint, dtype)
    activation = checkpoint.config.activation
    options = Options(chosen, target, implementation, batch_invariant, activation_format)
    return build_experts(checkpoint, layer, activation, options, experts=experts)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint, with a CheckpointWarning where it looks unlike its label."""
    checkpoint = Checkpoint(path)
    warning = zero_point_warning(checkpoint)
    if warning is not None:
        warnings.warn(warning, CheckpointWarning, stacklevel=3)
    return checkpoint


@dataclass(frozen=True)
class Options:
    """How the experts of a checkpoint are to run: see Experts."""

    dtype: torch.dtype
    device: torch.device
    implementation: str
    batch_invariant: bool
    activation_format: str


def build_experts(
    checkpoint: Checkpoint,
    layer: int,
    activation: Activation,
    options: Options,
    path: str | None = None,
    experts: Sequence[int] | None = None,
) -> Experts:
    """Reads one layer's experts onto a device, all or some of them.

    Args:
        checkpoint: where from.
        layer: its number.
        activation: between gate_up and down.
        options: how they are to run.
        path: the module's name in the model; None: as in the file.
        experts: those to read; None for all.
    """
    tensors = checkpoint.layer(layer)
    made = Experts(
        checkpoint.read_experts(layer, experts),
        activation,
        dtype=options.dtype,
        batch_invariant=options.batch_invariant,
        activation_format=options.activation_format,
        path=path or tensors.container,
        interleaved=checkpoint.config.interleaved,
        transposed=checkpoint.config.transposed,
    )
    made.requested = options.implementation  # the host that reads may be another device than the one that runs
    return made.to(options.device)


def checked_device(device: str | torch.device, implementation: str) -> torch.device:
    """The device, where it is there and an implementation runs on it.

    Raises:
        ArgumentError: neither a CPU nor a CUDA device, or no implementation of that name.
        UnavailableError: the device is not there, or no implementation runs on it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ArgumentError(
            "device",
            found=repr(device),
            expected='"cpu" or "cuda"',
            next_step='Pass device="cpu".',
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"device {found}",
            found=f"{torch.cuda.device_count()} CUDA devices",
            expected="that device, and a CUDA build of torch",
            next_step='Pass device="cpu".',
        )
    check(arch_of(found), implementation)
    return found


def compute_dtype(checkpoint: Checkpoint, dtype: torch.dtype | str | None) -> torch.dtype:
    """The dtype asked for, else the one config.json names, else bfloat16.

    Raises:
        ArgumentError: not bfloat16, float16 or float32.
    """
    wanted = (checkpoint.config.dtype or "bfloat16") if dtype is None else dtype
    found = wanted if isinstance(wanted, torch.dtype) else DTYPES.get(str(wanted).removeprefix("torch."))
    if found not in DTYPES.values():
        raise ArgumentError(
            f"{checkpoint.config.path}: dtype" if dtype is None else "dtype",
            found=repr(wanted),
            expected=f"one of {', '.join(DTYPES)}",
            next_step="Pass dtype=torch.bfloat16.",
        )
    assert isinstance(found, torch.dtype)
    return found
