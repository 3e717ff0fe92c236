"""Checkpoint: a directory as experts of layers, quantised Linears, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fanfold.errors import ArgumentError, MissingExpertsError, TensorError, UnsupportedError
from fanfold.formats.config import ModelConfig
from fanfold.formats.experts import LayerTensors, ProjectionInfo, find_experts
from fanfold.formats.files import CheckpointFiles, read_json
from fanfold.formats.fused import find_fused
from fanfold.formats.matrix import DENSE, Matrix, find_matrix, read_dense
from fanfold.formats.names import expert_name, in_experts, is_draft
from fanfold.formats.quantization import Quantization, read_quantization
from fanfold.spec.activation_format import PLAIN
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

# What follows a module's name where its weight is packed. `weight` alone is plain, unless its dtype says otherwise.
PACKED = frozenset({"qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv"})
REFETCH = "config.json and the weights are of different checkpoints: fetch both again."


class Projection(Protocol):
    """One projection of a layer, found by its headers."""

    @property
    def info(self) -> ProjectionInfo:
        """Format and sizes, as far as headers tell."""
        ...

    def of(self, experts: Sequence[int]) -> Projection:
        """Some experts alone, in that order."""
        ...

    def describe(self, files: CheckpointFiles) -> ProjectionInfo:
        """The same, with `act_order`."""
        ...

    def read(self, files: CheckpointFiles) -> ProjectionWeights:
        """The packed stack."""
        ...


class Checkpoint:
    """A checkpoint directory, its headers and configs read, its tensors not.

    Attributes:
        path: the directory.
        files: tensors by name.
        config: what config.json says of experts.
        quantization: what the quantiser's config says of modules.
        layers: layer number -> the tensors of its experts.
        packed: names of modules outside the experts whose weight is packed -> their tensors.
        plain: names of all other tensors of the model.
        draft: names of the tensors of layers that predict further tokens, which are no part of the model proper.

    Raises:
        MissingFileError, CorruptFileError, ConfigError, UnsupportedError, TensorError: see files.py, quantization.py.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = CheckpointFiles(self.path)
        config_file = self.path / "config.json"
        self.config = ModelConfig.of(str(config_file), read_json(config_file))
        self.quantization: Quantization = read_quantization(self.path, self.config)
        self.draft: list[str] = [name for name in self.files.infos if is_draft(name)]
        layers: dict[int, LayerTensors] = {}
        rest: dict[str, dict[str, str]] = {}
        for name in self.files.infos:
            if not is_draft(name) and not self._file_under_experts(name, layers):
                module, _, suffix = name.rpartition(".")
                rest.setdefault(module, {})[suffix] = name
        self.layers = dict(sorted(layers.items()))
        self.packed: dict[str, dict[str, str]] = {m: s for m, s in rest.items() if self._is_packed(s)}
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
            ConfigError, MissingExpertsError, TensorError, UnsupportedError: as `read_experts`, as far as headers tell.
        """
        gate_up, down = self._find(layer)
        found = {"gate_up": gate_up.describe(self.files), "down": down.describe(self.files)}
        return {name: replace(info, activations=self._activations(layer, name)) for name, info in found.items()}

    def num_experts(self, layer: int) -> int:
        """E of a layer, as its tensors have it."""
        tensors = self.layer(layer)
        fused = [self.files.infos[name].shape[0] for suffixes in tensors.fused.values() for name in suffixes.values()]
        return max([*fused, *(expert + 1 for _, expert in tensors.per_expert)])

    def read_experts(self, layer: int, experts: Sequence[int] | None = None) -> ExpertWeights:
        """The packed experts of one layer, on the CPU.

        Beside them, one matrix is in memory at a time (of fused experts: one expert).

        Args:
            layer: its number.
            experts: those to read, in that order, and no bytes of others; None for all. All have to be there.

        Raises:
            ArgumentError: `experts` is empty, or names one twice or one that the layer does not have.
            ConfigError: the config says plain of packed tensors, or the reverse.
            MissingExpertsError: experts or projections are absent.
            TensorError: tensors of wrong shapes, dtypes or values, or sizes unlike those of config.json.
            UnsupportedError: a format that is not run.
        """
        gate_up, down = self._find(layer)
        if experts is not None:
            self._check_chosen(layer, experts, gate_up.info.num_experts)
            gate_up, down = gate_up.of(experts), down.of(experts)
        return ExpertWeights(
            replace(gate_up.read(self.files), activations=self._activations(layer, "gate_up")),
            replace(down.read(self.files), activations=self._activations(layer, "down")),
        )

    def expert_bytes(self) -> int:
        """Bytes on disk of all expert tensors."""
        return sum(self.files.infos[name].nbytes for tensors in self.layers.values() for name in tensors.names())

    def linear(self, module: str) -> Matrix:
        """One of `packed`, as its header describes it.

        Raises:
            ConfigError, TensorError, UnsupportedError: as `find_matrix`.
        """
        return find_matrix(self.files, self.quantization.scheme, module, self.packed[module])

    def read_linear(self, module: str, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] of one of `packed`, dequantised in fp32 and rounded to `dtype`."""
        return read_dense(self.files, self.linear(module), dtype)

    def _file_under_experts(self, name: str, layers: dict[int, LayerTensors]) -> bool:
        """Puts an expert's tensor into its layer; False where it is none.

        Raises:
            TensorError: a tensor inside the experts that is not known, or a second one for the same place.
        """
        parsed = expert_name(name)
        if parsed is None:
            if not in_experts(name):
                return False
            raise TensorError(
                f"{self.path}: {name}",
                found="a tensor among the experts whose name is not known",
                expected="N.gate_proj, N.up_proj, N.down_proj (or w1, w3, w2), gate_up_proj, up_proj or down_proj",
                next_step="Experts stored like this are not read yet; nothing is ignored silently.",
            )
        tensors = layers.setdefault(parsed.layer, LayerTensors(parsed.container, parsed.layer))
        if parsed.expert is None:
            suffixes = tensors.fused.setdefault(parsed.projection, {})
        else:
            suffixes = tensors.per_expert.setdefault((parsed.projection, parsed.expert), {})
        rivals = [] if tensors.container == parsed.container else [tensors.container]
        if tensors.fused and tensors.per_expert:
            rivals += next(iter((tensors.per_expert if parsed.expert is None else tensors.fused).values())).values()
        rivals += [suffixes[parsed.suffix]] if parsed.suffix in suffixes else []
        if rivals:
            raise TensorError(
                f"{self.path}: {name}",
                found=f"the same experts in {rivals[0]}",
                expected="one set of experts a layer",
                next_step="Remove the tensors that do not belong to this model.",
            )
        suffixes[parsed.suffix] = name
        return True

    def _is_packed(self, suffixes: dict[str, str]) -> bool:
        """Whether a module outside the experts has a packed weight, as far as it can be told from its tensors."""
        weight = suffixes.get("weight")
        dense = weight is None or self.files.infos[weight].dtype in DENSE
        return not dense or not PACKED.isdisjoint(suffixes)

    def _activations(self, layer: int, projection: str) -> str:
        """What the config says of the activations of gate_up or down; plain where it says nothing of their weights.

        Raises:
            UnsupportedError: not the same of all experts.
        """
        tensors, scheme = self.layer(layer), self.quantization
        found: dict[str, str] = {}
        for of, suffixes in (*tensors.fused.items(), *((of, s) for (of, _), s in tensors.per_expert.items())):
            suffix, name = next(iter(suffixes.items()))
            module = name.removesuffix(f".{suffix}")
            if (of == "down") == (projection == "down"):
                stated = PLAIN if scheme.scheme(module) is None else scheme.activations(module)
                found.setdefault(stated, module)
        if len(found) > 1:
            raise UnsupportedError(
                f"{self.config.path}: activations of {tensors.container}",
                found=", ".join(f"{stated} for {module}" for stated, module in found.items()),
                expected="the same for all experts of a projection",
                next_step="Requantise the model with one scheme for all experts.",
            )
        return next(iter(found), PLAIN)

    def _find(self, layer: int) -> tuple[Projection, Projection]:
        """gate_up and down of one layer, of sizes that fit each other and config.json.

        Raises:
            ConfigError, MissingExpertsError, TensorError, UnsupportedError: see `read_experts`.
        """
        tensors = self.layer(layer)
        scheme, config = self.quantization.scheme, self.config
        gate_up: Projection
        down: Projection
        if tensors.fused:
            up = "gate_up" if config.gated else "up"
            self._check_projections(tensors, {up, "down"})
            gate_up = find_fused(self.files, scheme, config, tensors, up)
            down = find_fused(self.files, scheme, config, tensors, "down")
        else:
            halves = ("gate", "up") if config.gated else ("up",)
            self._check_projections(tensors, {*halves, "down"})
            gate_up = find_experts(self.files, scheme, tensors, halves, config.num_experts)
            down = find_experts(self.files, scheme, tensors, ("down",), config.num_experts)
        self._check_sizes(tensors, gate_up.info, down.info)
        return gate_up, down

    def _check_chosen(self, layer: int, experts: Sequence[int], count: int) -> None:
        if not experts or len(set(experts)) != len(experts) or min(experts) < 0 or max(experts) >= count:
            raise ArgumentError(
                f"{self.path}: experts of layer {layer}",
                found=str(list(experts)),
                expected=f"at least one of 0 to {count - 1}, each once",
                next_step="Leave `experts` out to read all of them.",
            )

    def _check_projections(self, tensors: LayerTensors, expected: set[str]) -> None:
        extra = sorted(tensors.projections - expected)
        if extra:
            raise TensorError(
                f"{self.path}: {tensors.container}",
                found=f"{', '.join(extra)} projections",
                expected=f"{', '.join(sorted(expected))}, as experts of {self.config.model_type or 'this model'} have",
                next_step=REFETCH,
            )

    def _check_sizes(self, tensors: LayerTensors, gate_up: ProjectionInfo, down: ProjectionInfo) -> None:
        hidden = self.config.hidden_size
        for what, found, expected in (
            ("gate_up's inputs (H)", gate_up.k, hidden),
            ("down's outputs (H)", down.n, hidden),
            ("down's outputs (H)", down.n, gate_up.k),
            ("down's inputs (I)", down.k, gate_up.n),
            ("experts of down", down.num_experts, gate_up.num_experts),
        ):
            if expected is not None and found != expected:
                raise TensorError(
                    f"{self.path}: {tensors.container}: {what}",
                    found=str(found),
                    expected=str(expected),
                    next_step="Compare bits and the sizes in config.json with the file.",
                )
