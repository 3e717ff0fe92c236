"""Checkpoint: a directory as experts of layers, quantised Linears, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fanfold.errors import MissingExpertsError, TensorError
from fanfold.formats.config import ModelConfig
from fanfold.formats.experts import LayerTensors, ProjectionInfo, find_experts, read_projection
from fanfold.formats.files import CheckpointFiles, read_json
from fanfold.formats.fused import describe_fused, read_fused
from fanfold.formats.matrix import Matrix, find_matrix, is_plain_order, read_dense
from fanfold.formats.names import expert_name
from fanfold.formats.quantization import Quantization, read_quantization
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

# What follows a module's name where its weight is packed; `weight` alone is plain.
PACKED = frozenset({"qweight", "weight_packed", "weight_scale", "weight_scale_inv"})


class Checkpoint:
    """A checkpoint directory, its headers and configs read, its tensors not.

    Attributes:
        path: the directory.
        files: tensors by name.
        config: what config.json says of experts.
        quantization: what the quantiser's config says of modules.
        layers: layer number -> the tensors of its experts.
        packed: names of modules outside the experts whose weight is packed -> their tensors.
        plain: names of all other tensors.

    Raises:
        MissingFileError, CorruptFileError, ConfigError, UnsupportedError, TensorError: see files.py, quantization.py.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = CheckpointFiles(self.path)
        config_file = self.path / "config.json"
        self.config = ModelConfig.of(str(config_file), read_json(config_file))
        self.quantization: Quantization = read_quantization(self.path, self.config)
        self.layers: dict[int, LayerTensors] = {}
        rest: dict[str, dict[str, str]] = {}
        for name in self.files.infos:
            parsed = expert_name(name)
            if parsed is None:
                module, _, suffix = name.rpartition(".")
                rest.setdefault(module, {})[suffix] = name
                continue
            tensors = self.layers.setdefault(parsed.layer, LayerTensors(parsed.container, parsed.layer))
            if tensors.container != parsed.container:
                raise TensorError(
                    f"{self.path}: {name}",
                    found=f"experts of layer {parsed.layer} in {parsed.container}",
                    expected=f"all of them in {tensors.container}",
                    next_step="A checkpoint holds one set of experts a layer.",
                )
            if parsed.expert is None:
                tensors.fused.setdefault(parsed.projection, {})[parsed.suffix] = name
            else:
                tensors.per_expert.setdefault((parsed.projection, parsed.expert), {})[parsed.suffix] = name
        self.layers = dict(sorted(self.layers.items()))
        self.packed: dict[str, dict[str, str]] = {m: s for m, s in rest.items() if PACKED & set(s)}
        self.plain: list[str] = [
            name for m, s in rest.items() for suffix, name in s.items() if m not in self.packed or suffix == "bias"
        ]

    def layer(self, layer: int) -> LayerTensors:
        """The expert tensors of one layer.

        Raises:
            MissingExpertsError: the checkpoint has none for it.
        """
        if layer not in self.layers:
            raise MissingExpertsError(
                f"{self.path}: layer {layer}",
                found=f"experts in layers {', '.join(map(str, self.layers)) or '(none)'}",
                expected="experts in that layer",
                next_step="Pass one of these layers, or fetch the missing shards.",
            )
        return self.layers[layer]

    def describe(self, layer: int) -> dict[str, ProjectionInfo]:
        """Format and sizes of `gate_up` and `down`; of the weights only the g_idx of expert 0 is read.

        Raises:
            MissingExpertsError, TensorError, UnsupportedError: as `read_experts`, as far as headers tell.
        """
        tensors = self.layer(layer)
        if tensors.fused:
            names = {"gate_up": "gate_up" if tensors.gated else "up", "down": "down"}
            return {
                key: describe_fused(self.files, self.quantization.scheme, self.config, tensors, name)
                for key, name in names.items()
            }
        rows = {"gate_up": self._find(tensors, self._up(tensors)), "down": self._find(tensors, ("down",))}
        return {
            key: ProjectionInfo(self._ordered(found), len(found), len(found[0]), found[0][0].n, found[0][0].k)
            for key, found in rows.items()
        }

    def read_experts(self, layer: int) -> ExpertWeights:
        """The packed experts of one layer, on the CPU.

        Raises:
            MissingExpertsError: experts or projections are absent.
            TensorError: tensors of wrong shapes, dtypes or values, or sizes unlike those of config.json.
            UnsupportedError: a format that is not run.
        """
        tensors = self.layer(layer)
        scheme = self.quantization.scheme
        if tensors.fused:
            up = "gate_up" if tensors.gated else "up"
            gate_up = read_fused(self.files, scheme, self.config, tensors, up)
            down = read_fused(self.files, scheme, self.config, tensors, "down")
        else:
            gate_up = read_projection(self.files, self._find(tensors, self._up(tensors)))
            down = read_projection(self.files, self._find(tensors, ("down",)))
        self._check_sizes(tensors, gate_up, down)
        return ExpertWeights(gate_up, down)

    def expert_bytes(self) -> int:
        """Bytes on disk of all expert tensors."""
        return sum(self.files.infos[name].nbytes for tensors in self.layers.values() for name in tensors.names())

    def linear(self, module: str) -> Matrix:
        """One of `packed`, as its header describes it."""
        return find_matrix(self.files, self.quantization.scheme, module, self.packed[module])

    def read_linear(self, module: str, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] of one of `packed`, dequantised in fp32 and rounded to `dtype`."""
        return read_dense(self.files, self.linear(module), dtype)

    def _up(self, tensors: LayerTensors) -> tuple[str, ...]:
        return ("gate", "up") if tensors.gated else ("up",)

    def _find(self, tensors: LayerTensors, projections: tuple[str, ...]) -> list[tuple[Matrix, ...]]:
        return find_experts(self.files, self.quantization.scheme, tensors, projections, self.config.num_experts)

    def _ordered(self, rows: list[tuple[Matrix, ...]]) -> WeightFormat:
        matrix = rows[0][0]
        if "g_idx" not in matrix.fields:
            return matrix.format
        plain = is_plain_order(matrix.format, self.files.read(matrix.fields["g_idx"]))
        return replace(matrix.format, act_order=not plain)

    def _check_sizes(self, tensors: LayerTensors, gate_up: ProjectionWeights, down: ProjectionWeights) -> None:
        hidden = self.config.hidden_size
        sizes: Mapping[str, tuple[int, int | None]] = {
            "down's inputs (I)": (down.k, gate_up.n),
            "gate_up's inputs (H)": (gate_up.k, hidden),
            "down's outputs (H)": (down.n, hidden),
        }
        for what, (found, expected) in sizes.items():
            if expected is not None and found != expected:
                raise TensorError(
                    f"{self.path}: {tensors.container}: {what}",
                    found=str(found),
                    expected=str(expected),
                    next_step="Compare bits and hidden_size in config.json with the file.",
                )
