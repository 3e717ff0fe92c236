"""read_adapter: every pair of a directory, with its rank, scale and kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import EXPERTS, GOLDEN, QUERY, TINY, factors, names, write

from fanfold.errors import ConfigError, MissingFileError, TensorError, UnsupportedError
from fanfold.lora import read_adapter
from fanfold.lora.adapter import ExpertTarget, FusedTarget, ModuleTarget

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
E, H, I, R = 3, 5, 4, 2  # noqa: E741


def fused(gate_up: str = f"{EXPERTS}.base_layer", down: str = EXPERTS) -> dict[str, torch.Tensor]:
    return factors(gate_up, R * E, H, 2 * I, 1) | factors(down, R * E, I, H, 2)


def test_a_linear(tmp_path: Path) -> None:
    tensors = factors(QUERY, 2, 5, 3)
    adapter = read_adapter(str(write(tmp_path, tensors, lora_alpha=3)))
    (target,) = adapter.targets
    assert isinstance(target, ModuleTarget)
    assert (target.key, target.path, target.rank, target.scale) == (QUERY, QUERY, 2, 1.5)
    assert torch.equal(target.a, tensors[names(QUERY)[0]])
    assert torch.equal(target.b, tensors[names(QUERY)[1]])
    assert adapter.path == tmp_path
    assert adapter.nbytes == 4 * (2 * 5 + 3 * 2)
    assert adapter.ranks == (2,)


@pytest.mark.parametrize(
    ("name", "projection"),
    [
        ("gate_proj", "gate"),
        ("up_proj", "up"),
        ("down_proj", "down"),
        ("w1", "gate"),
        ("w3", "up"),
        ("w2", "down"),
    ],
)
def test_an_expert(tmp_path: Path, name: str, projection: str) -> None:
    module = f"model.layers.3.block_sparse_moe.experts.11.{name}"
    (target,) = read_adapter(write(tmp_path, factors(module, 2, 5, 3))).targets
    assert isinstance(target, ExpertTarget)
    assert target.path == "model.layers.3.block_sparse_moe.experts"
    assert (target.key, target.expert, target.projection) == (module, 11, projection)


def test_two_fused_parameters_the_inner_one_is_gate_up(tmp_path: Path) -> None:
    tensors = fused()
    # the order in the config says nothing: PEFT wraps in the order of named_parameters
    adapter = read_adapter(write(tmp_path, tensors, r=R, target_parameters=BOTH[::-1]))
    by_half = {target.half: target for target in adapter.targets if isinstance(target, FusedTarget)}
    assert len(adapter.targets) == 2
    assert torch.equal(by_half["gate_up"].a, tensors[names(f"{EXPERTS}.base_layer")[0]])
    assert torch.equal(by_half["down"].b, tensors[names(EXPERTS)[1]])
    assert {target.path for target in adapter.targets} == {EXPERTS}
    assert {target.key for target in adapter.targets} == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}


@pytest.mark.parametrize(
    ("parameter", "half"),
    [
        ("mlp.experts.gate_up_proj", "gate_up"),
        ("experts.gate_up_proj", "gate_up"),
        ("gate_up_proj", "gate_up"),
        ("down_proj", "down"),
        (f"{EXPERTS}.down_proj", "down"),
        ("mlp.experts.up_proj", "gate_up"),
    ],
)
def test_a21_one_fused_parameter_is_told_by_the_config(tmp_path: Path, parameter: str, half: str) -> None:
    adapter = read_adapter(write(tmp_path, factors(EXPERTS, 6, 5, 5), target_parameters=[parameter]))
    (target,) = adapter.targets
    assert isinstance(target, FusedTarget)
    assert target.half == half


def test_a23_fused_scale_and_rank_match_the_parameter_name(tmp_path: Path) -> None:
    tensors = factors(f"{EXPERTS}.base_layer", 4 * E, H, 2 * I) | factors(EXPERTS, R * E, I, H)
    adapter = read_adapter(
        write(
            tmp_path,
            tensors,
            r=R,
            lora_alpha=8,
            target_parameters=["gate_up_proj", "down_proj"],
            rank_pattern={r".*\.gate_up_proj": 4},
            alpha_pattern={r"experts\.gate_up_proj": 6},
            use_rslora=True,
        )
    )
    found = {target.key.rpartition(".")[2]: (target.rank, target.scale) for target in adapter.targets}
    assert found == {"gate_up_proj": (4, 6 / 2), "down_proj": (2, 8 / 2**0.5)}
    assert adapter.ranks == (2, 4)


def test_a_router_parameter_is_a_plain_module_whose_patterns_match_its_weight(tmp_path: Path) -> None:
    gate = "model.layers.0.mlp.gate"
    patterns: dict[str, Any] = {"rank_pattern": {r"gate\.weight": 3}, "alpha_pattern": {"gate": 30}}
    adapter = read_adapter(write(tmp_path, factors(gate, 3, 5, 4), target_parameters=["gate.weight"], **patterns))
    (target,) = adapter.targets
    assert isinstance(target, ModuleTarget)
    assert (target.path, target.rank, target.scale) == (gate, 3, 4 / 3)


def test_the_rank_of_the_file_must_be_the_rank_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_A with 2 rows; expected 4, the rank") as caught:
        read_adapter(write(tmp_path, factors(QUERY, 2, 5, 3), r=4))
    assert QUERY in caught.value.what
    with pytest.raises(ConfigError, match=r"lora_A with 6 rows; expected a multiple of 4"):
        read_adapter(write(tmp_path, fused(), r=4, target_parameters=BOTH))


@pytest.mark.parametrize("shapes", [((2, 5), (3, 4)), ((2,), (3, 2)), ((2, 5, 1), (3, 2)), ((2, 5), (3, 2, 1, 1))])
def test_factors_that_do_not_go_together(tmp_path: Path, shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = {name: torch.ones(shape) for name, shape in zip(names(QUERY), shapes, strict=True)}
    with pytest.raises(TensorError, match=r"expected lora_A \[rows, in\] and lora_B \[out, rows\]"):
        read_adapter(write(tmp_path, tensors))


@pytest.mark.parametrize("parameters", [None, BOTH[:1], [*BOTH, "mlp.experts.up_proj"], ["gate.weight"]])
def test_stacked_pairs_unlike_the_targeted_parameters(tmp_path: Path, parameters: list[str] | None) -> None:
    with pytest.raises(ConfigError, match="2 pairs, and target_parameters that name") as caught:
        read_adapter(write(tmp_path, fused(), target_parameters=parameters))
    assert EXPERTS in caught.value.what


def test_one_stacked_pair_of_two_is_refused(tmp_path: Path) -> None:
    for module in (EXPERTS, f"{EXPERTS}.base_layer"):
        with pytest.raises(ConfigError, match="1 pairs"):
            read_adapter(write(tmp_path, factors(module, 6, 5, 4), target_parameters=BOTH))


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_adapter(tmp_path / "nowhere")


def test_dora_sample_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="DoRA"):
        read_adapter(GOLDEN / "peft_v4_qwen3moe_per_expert_dora")


SAMPLES = {
    # folder: number of targets, ranks, scales
    GOLDEN / "peft018_gptoss_target_parameters": (4, (4,), {2.0}),
    GOLDEN / "peft_gptoss_target_parameters": (4, (4,), {2.0}),
    GOLDEN / "peft_mixtral_target_parameters": (4, (4,), {2.0}),
    GOLDEN / "peft_mixtral_v4style_target_modules": (4, (4, 8), {2.0}),
    GOLDEN / "peft_qwen3moe_all_linear": (14, (4, 8), {2.0}),
    GOLDEN / "peft_qwen3moe_target_parameters": (4, (4,), {2.0}),
    GOLDEN / "peft_qwen3moe_v4style_target_modules": (4, (4, 8), {2.0}),
    GOLDEN / "peft_v4_mixtral_per_expert": (24, (4,), {2.0}),
    GOLDEN / "peft_v4_qwen3moe_per_expert": (48, (4,), {2.0}),
    GOLDEN / "peft_v4_qwen3moe_per_expert_rslora_patterns": (52, (4, 8), {8 / 2, 16 / 2, 8 / 8**0.5}),
    TINY / "adapter-python": (192, (8,), {2.0}),
    TINY / "adapter-scripture": (8, (16,), {2.0}),
    TINY / "adapter-shout": (8, (4,), {4.0}),
}


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda folder: folder.name)
def test_samples(folder: Path) -> None:
    adapter = read_adapter(folder)
    scales = {target.scale for target in adapter.targets}
    assert (len(adapter.targets), adapter.ranks, scales) == SAMPLES[folder]
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size - 100_000 < adapter.nbytes < size


def test_every_sample_is_listed() -> None:
    there = {path.parent for path in [*GOLDEN.glob("peft*/*.json"), *TINY.glob("adapter-*/*.json")]}
    assert there == {*SAMPLES, GOLDEN / "peft_v4_qwen3moe_per_expert_dora"}
