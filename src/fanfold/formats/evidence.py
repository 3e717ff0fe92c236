"""Evidence: whether a GPTQ checkpoint's zero points look like what its label says.

"gptq" (v1) files store zero - 1, "gptq_v2" files the zero. Weights lie around 0, so the zeros of asymmetric files lie
around (2^bits - 1) / 2, and those of symmetric ones are 2^(bits-1): stored values 1 lower speak for v1.
"""

from __future__ import annotations

import torch

from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.words import unpack_words
from fanfold.spec.weight_format import WeightFormat

FEWEST = 256  # stored zeros; fewer say nothing
NEAR = 0.25  # how near their mean must be to what the other label would give


def zero_point_warning(checkpoint: Checkpoint) -> str | None:
    """What to tell the user where the stored zeros speak for the other label; None where they do not.

    Reads the zeros of the first layer with experts.
    """
    first = next(iter(checkpoint.layers.values()), None)
    if first is None or checkpoint.quantization.method != "gptq" or not first.per_expert:
        return None
    fmt: WeightFormat = next(iter(checkpoint.describe(first.layer).values())).format
    if fmt.kind != "gptq":
        return None
    words = [
        checkpoint.files.read(suffixes["qzeros"]) for suffixes in first.per_expert.values() if "qzeros" in suffixes
    ]
    stored = [unpack_words(w, fmt.bits, w.shape[1] * 32 // fmt.bits).flatten() for w in words]
    zeros = torch.cat(stored).float() if stored else torch.empty(0)
    if len(zeros) < FEWEST:
        return None
    mean = float(zeros.mean())
    centre = 2 ** (fmt.bits - 1) if bool((zeros == zeros[0]).all()) else (2**fmt.bits - 1) / 2
    other = "gptq_v2" if fmt.zero_point == "v1" else "gptq"
    if abs(mean - (centre if other == "gptq_v2" else centre - 1)) > NEAR:
        return None
    label = "gptq" if fmt.zero_point == "v1" else "gptq_v2"
    usual = centre - 1 if label == "gptq" else centre
    return (
        f"{checkpoint.path}: checkpoint_format is {label}, but the {len(zeros)} zero points of layer {first.layer} "
        f"average {mean:.2f}, as in {other} files ({label}: about {usual:.1f}). The label is followed; "
        f"if the model writes nonsense, set checkpoint_format to {other} in its config."
    )
