"""adapter_config.json: the fields that count, and every one that is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from lora_files import EXPERTS, config

from fanfold.errors import ConfigError, CorruptFileError, FanfoldError, MissingFileError, UnsupportedError
from fanfold.lora.config import AdapterConfig, read_config


def read(folder: Path, **fields: Any) -> AdapterConfig:
    (folder / "adapter_config.json").write_text(json.dumps(config(**fields)))
    return read_config(folder)


def test_fields(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        r=16,
        lora_alpha=32,
        use_rslora=True,
        rank_pattern={"q_proj": 4},
        alpha_pattern={"down_proj": 8.5},
        target_parameters=["mlp.experts.gate_up_proj"],
        lora_dropout=0.1,
    )
    assert found == AdapterConfig(
        16, 32.0, True, {"q_proj": 4}, {"down_proj": 8.5}, ("mlp.experts.gate_up_proj",), "0.21.2"
    )


def test_nulls_are_absent(tmp_path: Path) -> None:
    nulls = dict.fromkeys(
        ["rank_pattern", "alpha_pattern", "target_parameters", "peft_version", "modules_to_save", "use_bdlora"]
    )
    assert read(tmp_path, **nulls) == AdapterConfig(2, 4.0)


@pytest.mark.parametrize(
    ("version", "generation"),
    [("0.21.2", (0, 21)), ("0.19.0rc1", (0, 19)), ("1.0.dev0", (1, 0)), ("0.18rc1", (0, 18)), (None, (0, 17))],
)
def test_generation(tmp_path: Path, version: str | None, generation: tuple[int, int]) -> None:
    assert read(tmp_path, peft_version=version).generation == generation


def test_scale_is_alpha_over_r(tmp_path: Path) -> None:
    assert read(tmp_path, r=16, lora_alpha=8).scale_of("model.layers.0.q_proj") == 0.5


def test_a23_rslora_scale_is_alpha_over_sqrt_r_with_patterns(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        r=16,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={r"experts\.0\.gate_proj": 4},
        alpha_pattern={"down_proj": 32},
    )
    assert found.scale_of("model.layers.0.self_attn.q_proj") == 2.0  # 8 / sqrt(16), not 8 / 16
    assert found.scale_of(f"{EXPERTS}.0.gate_proj") == 4.0  # 8 / sqrt(4)
    assert found.scale_of(f"{EXPERTS}.7.down_proj") == 8.0  # 32 / sqrt(16)
    assert found.scale_of(f"{EXPERTS}.10.gate_proj") == 2.0  # the pattern does not end in the middle of a name


def test_patterns_match_from_a_dot_to_the_end_and_the_first_one_counts(tmp_path: Path) -> None:
    found = read(tmp_path, rank_pattern={"proj": 3, r"self_attn\.\w_proj": 5, "q_proj": 7, r".*\.gate_up_proj": 9})
    assert found.rank_of("model.layers.0.self_attn.q_proj") == 5
    assert found.rank_of("q_proj") == 7
    assert found.rank_of("model.layers.0.self_attn.q_proj.extra") == 2
    assert found.rank_of(f"{EXPERTS}.gate_up_proj") == 9
    assert found.rank_of(f"{EXPERTS}.down_proj") == 2


def test_targeted_parameters(tmp_path: Path) -> None:
    found = read(tmp_path, target_parameters=["gate.weight", "experts.down_proj", f"{EXPERTS}.gate_up_proj"])
    assert found.targets_parameter("model.layers.3.mlp.gate.weight")
    assert found.targets_parameter("model.layers.3.mlp.experts.down_proj")
    assert found.targets_parameter(f"{EXPERTS}.gate_up_proj")
    assert not found.targets_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert not found.targets_parameter("model.layers.3.mlp.shared_expert_gate.weight")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA"),
    ({"lora_bias": True}, "bias behind lora_B"),
    ({"modules_to_save": ["lm_head"]}, "replaces whole modules"),
    ({"bias": "all"}, "found 'all'"),
    ({"bias": "lora_only"}, "found 'lora_only'"),
    ({"fan_in_fan_out": True}, "transposed"),
    ({"use_qalora": True}, "use_qalora: found True"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: found [1, 2]"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"trainable_token_indices": [5]}, "embedding"),
    ({"layer_replication": [[0, 4], [2, 5]]}, "repeats layers"),
    ({"peft_type": "LOHA"}, "found 'LOHA'; expected LORA"),
    ({"arrow_config": {"top_k": 2}}, "arrow_config"),
    ({"kasa_config": {"beta": 1}}, "kasa_config"),
    ({"use_some_new_variant": True}, "use_some_new_variant"),
    ({"init_lora_weights": "pissa_niter_4"}, "leaves the base weights alone"),
    ({"init_lora_weights": "OLoRA"}, "leaves the base weights alone"),
    ({"init_lora_weights": "loftq"}, "leaves the base weights alone"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_unsupported_fields_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(tmp_path, **fields)
    assert text in str(caught.value)
    assert next(iter(fields)) in caught.value.what
    assert str(tmp_path / "adapter_config.json") in caught.value.what


def test_fields_that_only_trained_it_are_accepted(tmp_path: Path) -> None:
    read(
        tmp_path,
        init_lora_weights="gaussian",
        loftq_config={"loftq_bits": 4},
        runtime_config={"ephemeral_gpu_offload": True},
        layers_to_transform=[0],
        megatron_core="megatron.core",
        qalora_group_size=16,
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r: found 0; expected a whole number >= 1"),
    ({"r": -4}, "r: found -4"),
    ({"r": None}, "r: found nothing"),
    ({"r": 4.0}, "r: found 4.0"),
    ({"r": True}, "r: found True"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj']: found 0"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern: found ['q_proj']"),
    ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern['q_proj(']"),
    ({"rank_pattern": {"a{99999999999}": 4}}, "expected a regular expression"),
    ({"lora_alpha": math.nan}, "lora_alpha: found nan; expected a finite number"),
    ({"lora_alpha": math.inf}, "lora_alpha: found inf"),
    ({"lora_alpha": 10**400}, "lora_alpha: found 1000"),
    ({"lora_alpha": "16"}, "lora_alpha: found '16'"),
    ({"lora_alpha": None}, "lora_alpha: found nothing"),
    ({"alpha_pattern": {"q_proj": math.nan}}, "alpha_pattern['q_proj']: found nan"),
    ({"use_rslora": "yes"}, "use_rslora: found 'yes'"),
    ({"peft_version": "new"}, "peft_version: found 'new'"),
    ({"peft_version": 0.18}, "peft_version: found 0.18"),
    ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters: found 'mlp"),
    ({"target_parameters": [1]}, "target_parameters: found [1]"),
    ({"peft_type": None}, "peft_type: found nothing"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG, ids=[str(fields)[:60] for fields, _ in WRONG])
def test_impossible_fields_are_named(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **fields)
    assert text in str(caught.value)
    assert str(tmp_path / "adapter_config.json") in caught.value.what


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b'{"r": 2,', CorruptFileError, "a readable JSON file"),
        (b"", CorruptFileError, "a readable JSON file"),
        (b"\xff\xfe\x00", CorruptFileError, "a readable JSON file"),
        (b"[" * 100_000, CorruptFileError, "a readable JSON file"),
        (b'{"r": 1' + b"0" * 5000 + b"}", CorruptFileError, "a readable JSON file"),
        (b"[1, 2]", ConfigError, "top level: found [1, 2]"),
        (b"null", ConfigError, "top level: found nothing"),
    ],
    ids=["cut", "empty", "not-text", "deep", "long-number", "list", "null"],
)
def test_corrupt_json(tmp_path: Path, content: bytes, error: type[FanfoldError], text: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(error) as caught:
        read_config(tmp_path)
    assert text in str(caught.value)


def test_missing_config(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MissingFileError) as caught:
            read_config(folder)
        assert caught.value.what == str(folder / "adapter_config.json")
        assert "save_pretrained" in caught.value.next_step
