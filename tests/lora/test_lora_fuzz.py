"""Damaged adapter directories: a right result or an error of fanfold, never anything else."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_files import EXPERTS, QUERY, config, factors, names, sites
from safetensors.torch import save

from fanfold.errors import FanfoldError
from fanfold.lora import bind, read_adapter
from fanfold.spec import ExpertShape

FIELDS = [
    *("r", "lora_alpha", "peft_type", "peft_version", "use_rslora", "use_dora", "bias", "rank_pattern"),
    *("alpha_pattern", "target_parameters", "target_modules", "modules_to_save", "init_lora_weights"),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
PATTERNS = st.sampled_from(["q_proj", ".*", "(", "*", "a{3,1}", "(?i)x", "\\", "[", "x++"]) | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PATTERNS, inner, max_size=4), max_leaves=8
)
TENSORS = factors(QUERY, 2, 6, 8) | factors(f"{EXPERTS}.base_layer", 6, 6, 8) | factors(EXPERTS, 6, 4, 6)
TARGETS = config(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
WHOLE = save(TENSORS)

pytestmark = pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")


def read(fields: object, weights: bytes) -> None:
    """Reads and binds; only an error of fanfold may come out."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FanfoldError):
        (Path(folder) / "adapter_config.json").write_text(json.dumps(fields))
        (Path(folder) / "adapter_model.safetensors").write_bytes(weights)
        adapter = read_adapter(folder)
        assert len(adapter.targets) >= 1
        bind(adapter, sites(1, ExpertShape(3, 6, 4), {"self_attn.q_proj": (6, 8)}))


def framed(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_random_weights(weights: bytes) -> None:
    read(TARGETS, weights)
    read(TARGETS, struct.pack("<Q", len(weights) // 2) + weights)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), st.integers(0, len(WHOLE)))
def test_damaged_weights(position: int, flip: int, length: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[position] ^= flip
    read(TARGETS, bytes(damaged))
    read(TARGETS, bytes(damaged[:length]))


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([*names(QUERY), *names(EXPERTS), *names(f"{EXPERTS}.0.w1"), "__metadata__", "x"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "F4", "F8_E8M0", "I64", "BOOL", "?"]),
                "shape": st.lists(st.integers(-1, 9) | st.just(2**62), max_size=4),
                "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2),
            }
        ),
        max_size=4,
    ),
    st.binary(max_size=64),
)
def test_random_headers(header: dict[str, Any], body: bytes) -> None:
    read(config(), framed(header, body))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from(["F32", "F16", "BF16"]), min_size=2, max_size=2),
    st.lists(st.integers(0, 12), min_size=4, max_size=4),
    st.binary(max_size=8),
)
def test_random_sizes_of_a_whole_file(dtypes: list[str], sizes: list[int], noise: bytes) -> None:
    header: dict[str, Any] = {}
    body = b""
    for name, dtype, shape in zip(names(QUERY), dtypes, (sizes[:2], sizes[2:]), strict=True):
        nbytes = shape[0] * shape[1] * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + nbytes]}
        body += (noise * (nbytes // max(len(noise), 1) + 1) + bytes(nbytes))[:nbytes]
    read(config(), framed(header, body))


@settings(deadline=None, max_examples=300)
@given(JSON | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=10), JSON, max_size=6))
def test_random_configs(fields: object) -> None:
    read(fields, WHOLE)
    if isinstance(fields, dict):
        read({**TARGETS, **fields}, WHOLE)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(["rank_pattern", "alpha_pattern"]), st.dictionaries(PATTERNS, SCALARS)))
def test_random_patterns(fields: dict[str, Any]) -> None:
    read({**TARGETS, **fields}, WHOLE)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["base_model", "model", "layers", "0", "experts", "base_layer", "w1", "lora_A", "weight", ""])
    )
)
def test_random_names(parts: list[str]) -> None:
    name = ".".join(["base_model.model", *parts])
    read(TARGETS, save({**TENSORS, name: torch.ones(2, 6)}))


def test_the_undamaged_files_are_accepted() -> None:
    read(TARGETS, WHOLE)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(TARGETS))
        (Path(folder) / "adapter_model.safetensors").write_bytes(WHOLE)
        assert len(bind(read_adapter(folder), sites(1, ExpertShape(3, 6, 4), {"self_attn.q_proj": (6, 8)}))) == 2
