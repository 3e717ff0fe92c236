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
    fmt: WeightFormat = checkpoint.describe(first.layer)["gate_up"].format
    if fmt.kind != "gptq":
        return None
    words = [
        checkpoint.files.read(suffixes["qzeros"])
        for (projection, _), suffixes in first.per_expert.items()
        if projection != "down" and "qzeros" in suffixes  # down may have another bit width
    ]
    stored = [unpack_words(w, fmt.bits, w.shape[1] * 32 // fmt.bits).flatten() for w in words]
    zeros = torch.cat(stored).float() if stored else torch.empty(0)
    if len(zeros) < FEWEST:
        return None
    constant = bool((zeros == zeros[0]).all())
    if fmt.symmetric and not constant:
        return None  # such zeros are meaningless under either label, and are not used
    label, other = ("gptq", "gptq_v2") if fmt.zero_point == "v1" else ("gptq_v2", "gptq")
    centre = 2 ** (fmt.bits - 1) if constant else (2**fmt.bits - 1) / 2
    usual = {"gptq": centre - 1, "gptq_v2": centre}
    mean = float(zeros.mean())
    if abs(mean - usual[other]) > NEAR:
        return None
    return (
        f"{checkpoint.path}: checkpoint_format is {label}, but the {len(zeros)} zero points stored for gate and up of "
        f"layer {first.layer} average {mean:.2f}, as in {other} files ({label}: about {usual[label]:.1f}). "
        + (
            "It makes no difference here, as these weights are symmetric; other readers may differ."
            if fmt.symmetric
            else f"The label is followed; if the model writes nonsense, set checkpoint_format to {other} in its config."
        )
    )
