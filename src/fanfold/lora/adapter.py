"""read_adapter: a PEFT directory into plain data, every tensor of it used or refused by name.

Where the factors go in a model, and how fused ones are taken apart, is decided when it is bound (bind.py).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from fanfold.errors import ConfigError, TensorError
from fanfold.lora.config import AdapterConfig, read_config
from fanfold.lora.files import AdapterFile, opened, read_tensors
from fanfold.lora.keys import EXPERT, FUSED_PARAMETERS, Factors, group_keys, take_copies

Projection = Literal["gate", "up", "down"]
# The spellings of a projection: transformers v4 Mixtral, and everything else.
PROJECTIONS: dict[str, Projection] = {
    "w1": "gate",
    "gate_proj": "gate",
    "w2": "down",
    "down_proj": "down",
    "w3": "up",
    "up_proj": "up",
}


@dataclass(frozen=True, eq=False)
class Target:
    """One (A, B, scale) as the file has it.

    Attributes:
        key: what PEFT adapted, without `base_model.model.`: a module, or a parameter for fused experts.
        path: the module a site must be found for: the module itself, or the container of the experts.
        a: lora_A, 2-D, r rows (fused: r rows an expert).
        b: lora_B, 2-D, as many columns as A has rows.
        rank: r.
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    key: str
    path: str
    a: Tensor
    b: Tensor
    rank: int
    scale: float


@dataclass(frozen=True, eq=False)
class ModuleTarget(Target):
    """A plain module: attention, router, shared expert, dense MLP, lm_head. A [r, in], B [out, r].

    Attributes:
        copy: the base's weight [out, in] as the adapter was trained on, where PEFT saved it (for lm_head it does).
    """

    copy: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExpertTarget(Target):
    """One projection of one expert, kept as a Linear (transformers v4). A [r, in], B [out, r]."""

    expert: int
    projection: Projection


@dataclass(frozen=True, eq=False)
class FusedTarget(Target):
    """A stacked parameter of all E experts. A [r*E, in] expert-major, B [out, r*E] rank-major, or reversed.

    layout.py says which way round, and takes it apart.
    """

    half: Literal["gate_up", "down"]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as its directory holds it.

    Attributes:
        path: the directory.
        config: the facts of adapter_config.json.
        targets: every pair of the file.
        nbytes: bytes of all A and B in the file.
    """

    path: Path
    config: AdapterConfig
    targets: tuple[Target, ...]
    nbytes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that occur, ascending."""
        return tuple(sorted({target.rank for target in self.targets}))


def read_adapter(path: str | Path) -> Adapter:
    """Reads adapter_config.json and adapter_model.safetensors of a PEFT LoRA adapter.

    Tensors are fp32, fp16 or bf16, on the CPU, and own their memory (the file may be overwritten afterwards).

    Args:
        path: the directory that PEFT's save_pretrained wrote.

    Raises:
        MissingFileError: the directory or one of the two files is not there.
        CorruptFileError: a file can't be read.
        ConfigError: a field of adapter_config.json is missing, impossible, or contradicts the tensors.
        UnsupportedError: the adapter is not plain LoRA (DoRA, biases, whole modules, embeddings, .bin files).
        TensorError: a key is unknown or lacks its partner; a tensor has a wrong shape or dtype, NaN or inf.
    """
    folder = Path(path)
    config = read_config(folder)
    file, tensors = read_tensors(folder)
    return _adapter(folder, config, file, tensors, take_copies(tensors))


@contextmanager
def opened_adapter(path: str | Path) -> Generator[tuple[Adapter, AdapterFile]]:
    """An adapter whose tensors have no values yet, and the file, open inside the block, that gives them.

    Copies of base weights are read at once.

    Raises:
        FanfoldError: what read_adapter raises, but for NaN and inf in A and B: `AdapterFile.values` finds those.
    """
    folder = Path(path)
    config = read_config(folder)
    with opened(folder) as file:
        tensors = dict(file.tensors)
        copies = {module: file.read_apart([copy])[0] for module, copy in take_copies(tensors).items()}
        yield _adapter(folder, config, file.path, tensors, copies), file


def _adapter(
    folder: Path, config: AdapterConfig, file: Path, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> Adapter:
    groups = group_keys(file, tensors)
    targets: list[Target] = []
    for module, by_depth in groups.items():
        if module.rpartition(".")[2] == "experts":
            targets += _fused(file, config, module, by_depth)
        else:
            targets.append(_plain(file, config, module, by_depth[0], copies.get(module)))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Adapter(folder, config, tuple(targets), nbytes)


def _plain(file: Path, config: AdapterConfig, module: str, factors: Factors, copy: Tensor | None) -> Target:
    # a router targeted as "gate.weight" has the keys of a Linear, but its patterns match the parameter's name
    parameter = f"{module}.weight"
    key = parameter if config.targets_parameter(parameter) else module
    rank = config.rank_of(key)
    _check_shapes(file, module, factors, rank, stacked=False)
    expert = EXPERT.fullmatch(module)
    if expert is None:
        return ModuleTarget(module, module, factors.a, factors.b, rank, config.scale_of(key), copy)
    projection = PROJECTIONS[expert["projection"]]
    number = int(expert["number"])
    return ExpertTarget(
        module, expert["container"], factors.a, factors.b, rank, config.scale_of(key), number, projection
    )


def _fused(file: Path, config: AdapterConfig, module: str, by_depth: Mapping[int, Factors]) -> list[FusedTarget]:
    # PEFT wraps the targeted parameters in the order of named_parameters: the first one lies innermost
    names = [name for name in FUSED_PARAMETERS if config.targets_parameter(f"{module}.{name}")]
    if sorted(by_depth) != list(range(len(names))):
        raise ConfigError(
            f"{file}: {module}",
            found=f"{len(by_depth)} pairs, and target_parameters that name {names or 'none of them'}",
            expected="one pair for each parameter that adapter_config.json targets there",
            next_step="Save it again with PEFT; the keys alone do not say which parameter they belong to.",
        )
    targets: list[FusedTarget] = []
    for name, depth in zip(names, sorted(by_depth, reverse=True), strict=True):
        key = f"{module}.{name}"
        rank = config.rank_of(key)
        factors = by_depth[depth]
        _check_shapes(file, key, factors, rank, stacked=True)
        half = "down" if name == "down_proj" else "gate_up"
        targets.append(FusedTarget(key, module, factors.a, factors.b, rank, config.scale_of(key), half))
    return targets


def _check_shapes(file: Path, key: str, factors: Factors, rank: int, *, stacked: bool) -> None:
    a, b = factors.a, factors.b
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise TensorError(
            f"{file}: {key}",
            found=f"lora_A {list(a.shape)}, lora_B {list(b.shape)}",
            expected="lora_A [rows, in] and lora_B [out, rows]",
            next_step="Save the adapter again with PEFT.",
        )
    rows = a.shape[0]
    if rows % rank != 0 if stacked else rows != rank:
        raise ConfigError(
            f"{file}: {key}",
            found=f"lora_A with {rows} rows",
            expected=f"{'a multiple of ' if stacked else ''}{rank}, the rank in adapter_config.json",
            next_step="Correct r or rank_pattern, or save the adapter again with PEFT.",
        )
