"""explain_checkpoint: the layers of a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fanfold.errors import ConfigError, MissingExpertsError
from fanfold.explanation.layer import explain_job
from fanfold.formats.checkpoint import Checkpoint
from fanfold.layers.activation_format import AUTO, resolved
from fanfold.load import compute_dtype
from fanfold.spec.job import LayerJob
from fanfold.spec.shape import ExpertShape


def explain_checkpoint(
    path: str | Path, arch: int | str, tokens: int, adapters: int = 0, rank: int = 16
) -> dict[str, Any]:
    """What runs the expert layers of a checkpoint. Of the weights only headers (and a g_idx a layer) are read.

    Args:
        path: the checkpoint directory.
        arch: "cpu", or a compute capability such as 90.
        tokens: of a call.
        adapters: of a batch, see `explain`.
        rank: of the adapters.

    Returns:
        `path`, `model_type`, and `answers`: for all layers that have the same answer, `layers` (their numbers) and
        what `explain` says of one. Activations are in the dtype of config.json, rounded to NVFP4 where it says so.

    Raises:
        ConfigError: config.json does not say how many experts a token has.
        MissingExpertsError: there are no expert layers.
        MissingFileError, CorruptFileError, TensorError, UnsupportedError, ArgumentError: each names what is wrong.
    """
    checkpoint = Checkpoint(path)
    top_k = checkpoint.config.top_k
    if top_k is None:
        raise ConfigError(
            checkpoint.config.path,
            found="no number of experts a token",
            expected="num_experts_per_tok",
            next_step="Give the layer's sizes instead: --shape T,H,I,E,k.",
        )
    dtype = compute_dtype(checkpoint, None)
    answers: list[dict[str, Any]] = []
    for layer in checkpoint.layers:
        info = checkpoint.describe(layer)
        up, down = info["gate_up"], info["down"]
        shape = ExpertShape(up.num_experts, up.k, up.n, up.halves == 2)
        activations = resolved(AUTO, up, down, checkpoint.layer(layer).container)
        job = LayerJob(shape, up.format, down.format, checkpoint.config.activation.kind, dtype, activations)
        answer = explain_job(job, arch, tokens, top_k, adapters, rank)
        same = next((found for found in answers if {**found, "layers": None} == {"layers": None, **answer}), None)
        if same is None:
            answers.append({"layers": [layer], **answer})
        else:
            same["layers"].append(layer)
    if not answers:
        raise MissingExpertsError(
            str(checkpoint.path),
            found="no expert layers",
            expected="a Mixture-of-Experts model",
            next_step="`fanfold inspect` says what the checkpoint holds.",
        )
    return {"path": str(checkpoint.path), "model_type": checkpoint.config.model_type, "answers": answers}
