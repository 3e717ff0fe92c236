"""inspect: what a checkpoint or an adapter holds, and whether it can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fanfold.errors import CorruptFileError, FanfoldError, MissingFileError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.evidence import zero_point_warning
from fanfold.formats.experts import ProjectionInfo
from fanfold.lora.adapter import ExpertTarget, FusedTarget, read_adapter


def inspect(path: str | Path) -> dict[str, Any]:
    """What the directory holds, as plain data. Of the weights only headers (and a g_idx a layer) are read.

    Args:
        path: a checkpoint (config.json) or a PEFT adapter (adapter_config.json).

    Returns:
        For both `kind` ("checkpoint" or "adapter"), `path`, `can_run` and `reason` (None, or why not).

        A checkpoint: `model_type`, `quantization` (quant_method or None), `experts` (layers, num_experts, hidden,
        intermediate, gated, activation), `layers` (a list: layer, gate_up and down with format, kind, bits, group_size,
        symmetric, zero_point, act_order, block, activations (what the config says they are quantised to: plain, nvfp4,
        fp8, ...), shape [E, N, K] of one half), `packed` (what stays packed), `unpacked` (modules outside the experts
        that are dequantised when loaded: module and format), `bytes` (experts on disk, experts_bf16 = what BF16 would
        take, other), and `warnings`.

        An adapter: `peft_version`, `ranks`, `targets` (kind of target -> pairs in the file),
        `layers`, `bytes`.

    Raises:
        MissingFileError: neither of the two.
        CorruptFileError: a file can't be read.
    """
    path = Path(path)
    if (path / "adapter_config.json").exists():
        return _reported("adapter", path, _adapter)
    if (path / "config.json").exists():
        return _reported("checkpoint", path, _checkpoint)
    raise MissingFileError(
        str(path),
        found="no config.json and no adapter_config.json" if path.is_dir() else "no such directory",
        expected="the directory of a checkpoint or of a PEFT adapter",
        next_step="Pass the directory that holds one of the two files.",
    )


def _reported(kind: str, path: Path, describe: Callable[[Path, dict[str, Any]], None]) -> dict[str, Any]:
    report: dict[str, Any] = {"kind": kind, "path": str(path), "can_run": True, "reason": None}
    try:
        describe(path, report)
    except (CorruptFileError, MissingFileError):
        raise
    except FanfoldError as error:
        report["can_run"] = False
        report["reason"] = str(error)
    return report


def _checkpoint(path: Path, report: dict[str, Any]) -> None:
    checkpoint = Checkpoint(path)
    report["model_type"] = checkpoint.config.model_type
    report["quantization"] = checkpoint.quantization.method
    report["warnings"] = []
    layers: list[dict[str, Any]] = []
    report["layers"] = layers
    bf16 = 0
    for layer in checkpoint.layers:
        entry: dict[str, Any] = {"layer": layer}
        for projection, info in checkpoint.describe(layer).items():
            entry[projection] = _described(info)
            bf16 += 2 * info.num_experts * info.halves * info.n * info.k
        layers.append(entry)
    other = sum(info.nbytes for info in checkpoint.files.infos.values()) - checkpoint.expert_bytes()
    report["bytes"] = {"experts": checkpoint.expert_bytes(), "experts_bf16": bf16, "other": other}
    report["packed"] = [tensors.container for tensors in checkpoint.layers.values()]
    report["unpacked"] = [
        {"module": module, "format": checkpoint.linear(module).format.name} for module in sorted(checkpoint.packed)
    ]
    if not layers:
        report["can_run"], report["reason"] = False, "no experts in the checkpoint"
        return
    up = layers[0]["gate_up"]
    report["experts"] = {
        "layers": len(layers),
        "num_experts": up["shape"][0],
        "hidden": up["shape"][2],
        "intermediate": up["shape"][1],
        "gated": next(iter(checkpoint.layers.values())).gated,
        "activation": None,
    }
    warning = zero_point_warning(checkpoint)
    if warning is not None:
        report["warnings"].append(warning)
    report["experts"]["activation"] = checkpoint.config.activation.kind


def _described(info: ProjectionInfo) -> dict[str, Any]:
    fmt = info.format
    return {
        "format": fmt.name,
        "kind": fmt.kind,
        "bits": fmt.bits,
        "group_size": fmt.group_size,
        "symmetric": fmt.symmetric,
        "zero_point": fmt.zero_point,
        "act_order": fmt.act_order,
        "block": None if fmt.block is None else list(fmt.block),
        "activations": info.activations,
        "shape": [info.num_experts, info.n, info.k],
    }


def _adapter(path: Path, report: dict[str, Any]) -> None:
    adapter = read_adapter(path)
    report["peft_version"] = adapter.config.peft_version
    report["ranks"] = list(adapter.ranks)
    kinds: Counter[str] = Counter()
    layers: set[int] = set()
    for target in adapter.targets:
        layers |= {int(part) for part in target.path.split(".") if part.isdigit()}
        if isinstance(target, ExpertTarget):
            kinds[f"experts.{target.projection}"] += 1
        elif isinstance(target, FusedTarget):
            kinds[f"experts.{target.half} (fused)"] += 1
        else:
            kinds[target.path.rpartition(".")[2]] += 1
    report["targets"] = dict(sorted(kinds.items()))
    report["layers"] = sorted(layers)
    report["bytes"] = adapter.nbytes
