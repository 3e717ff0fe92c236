"""quantize: a checkpoint of BF16 or FP16 experts to one that compressed-tensors reads, a layer at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize
from fanfold.formats.files import read_json
from fanfold.quantization.accuracy import ProjectionErrors
from fanfold.quantization.names import left_alone
from fanfold.quantization.output import check_free, copy_side_files, whole_folder
from fanfold.quantization.pack import named, pack
from fanfold.quantization.plan import ProjectionPlan, plan_of
from fanfold.quantization.shards import LARGEST, Shards
from fanfold.quantization.target import Target, target_of
from fanfold.spec.weights import ProjectionWeights

Progress = Callable[[int, int, str], None]


def quantize(
    path: str | Path,
    output: str | Path,
    target: str,
    *,
    group_size: int | None = None,
    shard_bytes: int = LARGEST,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Rounds the experts to nearest and copies everything else; `output` appears only once it is complete.

    The experts of one layer are in memory at a time. Experts become one Linear each, `...experts.N.gate_proj` and so
    on, under the names that llmcompressor gives them; those that were one Linear each keep their names.

    Args:
        path: a checkpoint whose experts are plain BF16 or FP16.
        output: where the result goes: nothing is there yet, or an empty directory.
        target: nvfp4 (weights alone; gate and up of an expert share their global scale), mxfp4, int4 (symmetric), or
            fp8 (a scale a row; engines quantise activations by token).
        group_size: of int4: consecutive inputs that share a scale; None takes 128.
        shard_bytes: bytes of tensors in a shard that holds more than one.
        progress: called with (experts done, all experts, what).

    Returns:
        `checkpoint`, `output`, `format` (as `fanfold inspect` prints it), `bytes` (experts, experts_before, other), and
        `layers`: for each its `layer` and, for `gate`, `up` and `down` as the experts have them, `relative_error`
        (||W' - W|| / ||W||, Frobenius, over all experts), `worst_expert` and `worst_relative_error`.

    Raises:
        ArgumentError: no such target, a group size that it can't have, or an `output` where something is.
        UnsupportedError: a checkpoint that is quantised already, experts that are neither BF16 nor FP16, inputs that
            are no multiple of the group, or fused experts of a family for which there are no names of single ones.
        MissingExpertsError: experts, or tensors of experts, are absent.
        TensorError: a weight that is not finite, or tensors that do not fit config.json.
        MissingFileError, CorruptFileError, ConfigError: the checkpoint can't be read.
        UnavailableError: `output` can't be written.
    """
    path, output = Path(path), Path(output)
    goal = target_of(target, group_size)
    check_free(output)
    checkpoint = Checkpoint(path)
    plan = plan_of(checkpoint, goal)
    total = sum(projections[0].info.num_experts for projections in plan.layers.values())
    done = 0
    layers: list[dict[str, Any]] = []

    def count(layer: int) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total, f"layer {layer}")

    with whole_folder(output) as folder:
        shards = Shards(folder, plan.slots, shard_bytes)
        for step in plan.steps:
            if isinstance(step, str):
                shards.write(step, checkpoint.files.read(step))
            else:
                errors = _write_layer(checkpoint, step, plan.layers[step], goal, shards, count)
                layers.append({"layer": step, **errors})
        shards.finish()
        config = read_json(path / "config.json") | {"quantization_config": goal.config(left_alone(checkpoint))}
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        copy_side_files(path, folder)
        written = Checkpoint(folder)
        for layer in written.layers:
            written.describe(layer)  # what was written can be read, and is what its config says
    other = sum(info.nbytes for info in written.files.infos.values()) - written.expert_bytes()
    sizes = {"experts": written.expert_bytes(), "experts_before": checkpoint.expert_bytes(), "other": other}
    layers.sort(key=lambda entry: entry["layer"])
    return {
        "checkpoint": str(path),
        "output": str(output),
        "format": goal.format.name,
        "bytes": sizes,
        "layers": layers,
    }


def _write_layer(
    checkpoint: Checkpoint,
    layer: int,
    plans: Sequence[ProjectionPlan],
    target: Target,
    shards: Shards,
    count: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """Quantises the experts of one layer into their places; what it cost by projection (gate, up, down)."""
    experts = checkpoint.read_experts(layer)
    errors = {half: ProjectionErrors() for plan in plans for half in plan.halves}
    for expert in range(experts.shape.num_experts):
        for plan, weights in zip(plans, (experts.gate_up, experts.down), strict=True):
            _write_expert(expert, plan, weights, target, shards, errors)
        count(layer)
    return {half: collected.report() for half, collected in errors.items()}


def _write_expert(
    expert: int,
    plan: ProjectionPlan,
    weights: ProjectionWeights,
    target: Target,
    shards: Shards,
    errors: dict[str, ProjectionErrors],
) -> None:
    """One projection of one expert."""
    weight = weights.tensors["weight"][expert]
    for p, tensors in enumerate(pack(target, weight)):
        module = plan.modules[expert][p]
        for name, tensor in named(target, module, tensors, weights.n, weights.k).items():
            shards.write(name, tensor)
        if weights.bias is not None:
            shards.write(f"{module}.bias", weights.bias[expert, p])
        decoded = dequantize(target.format, tensors, weights.n, weights.k)
        errors[plan.halves[p]].add(weight[p].float(), decoded)
