"""Whatever a directory holds, reading it gives experts or an error of fanfold: no other exception, hang or crash."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_checkpoints import config_of, expert_tensors, same_bits, write

from fanfold.errors import FanfoldError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize_expert
from fanfold.formats.evidence import zero_point_warning
from fanfold.formats.quantization import GPTQ_SIDE, MODELOPT_SIDE
from fanfold.spec import ExpertWeights, WeightFormat

NAMES = ["gptq4-g32-asym-v1-actorder", "awq4-g32-asym", "packed4-g32-asym", "nvfp4", "mxfp4", "fp8-block32x32", "bf16"]
SIZES = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
MODEL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 2}
FUSED = {
    "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.ones(2, 64, 2, 16, dtype=torch.uint8),
    "model.layers.0.mlp.experts.gate_up_proj_scales": torch.full((2, 64, 2), 120, dtype=torch.uint8),
    "model.layers.0.mlp.experts.gate_up_proj_bias": torch.ones(2, 64),
    "model.layers.0.mlp.experts.down_proj_blocks": torch.ones(2, 64, 1, 16, dtype=torch.uint8),
    "model.layers.0.mlp.experts.down_proj_scales": torch.full((2, 64, 1), 120, dtype=torch.uint8),
}
fuzz = settings(
    deadline=timedelta(seconds=5),
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def files_of(name: str) -> dict[str, bytes]:
    """The files of a good checkpoint, by name; side files as their tools write them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if name == "fused":
            write(path, FUSED, {"quant_method": "mxfp4"}, **MODEL, model_type="gpt_oss", swiglu_limit=7.0)
        else:
            fmt = WeightFormat.parse(name)
            quantization = config_of(fmt)
            side: dict[str, Any] = {}
            if fmt.kind == "gptq":
                side[GPTQ_SIDE] = quantization
            if quantization and quantization["quant_method"] == "modelopt":
                side[MODELOPT_SIDE] = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
            write(path, expert_tensors(fmt, experts=2, names=SIZES), quantization, side, **MODEL)
        return {file.name: file.read_bytes() for file in path.iterdir()}


GOOD = {name: files_of(name) for name in [*NAMES, "fused"]}


def read(files: dict[str, bytes]) -> dict[int, ExpertWeights] | FanfoldError:
    """The experts of all layers, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            checkpoint = Checkpoint(folder)
            for module in checkpoint.packed:
                checkpoint.read_linear(module, torch.bfloat16)
            found: dict[int, ExpertWeights] = {}
            for layer in checkpoint.layers:
                described, found[layer] = checkpoint.describe(layer), checkpoint.read_experts(layer)
                for key, projection in (("gate_up", found[layer].gate_up), ("down", found[layer].down)):
                    assert (described[key].n, described[key].k) == (projection.n, projection.k)
                    assert described[key].num_experts == projection.num_experts
            zero_point_warning(checkpoint)
            _ = checkpoint.config.activation
        except FanfoldError as caught:
            return sound(caught)
    for experts in found.values():
        for projection in (experts.gate_up, experts.down):
            weight = dequantize_expert(projection, projection.num_experts - 1, projection.halves - 1)
            assert weight.shape == (projection.n, projection.k)
            assert not bool(torch.isnan(weight).any())
    return found


def sound(error: FanfoldError) -> FanfoldError:
    """The error, each part of which says something, and which can be printed."""
    assert all((error.what, error.found, error.expected, error.next_step))
    assert str(error).isprintable()
    assert len(str(error)) < 5000
    return error


def same(left: dict[int, ExpertWeights], right: dict[int, ExpertWeights]) -> bool:
    if left.keys() != right.keys():
        return False
    for layer, experts in left.items():
        for ours, theirs in ((experts.gate_up, right[layer].gate_up), (experts.down, right[layer].down)):
            if ours.format != theirs.format or ours.tensors.keys() != theirs.tensors.keys():
                return False
            if not all(same_bits(tensor, theirs.tensors[field]) for field, tensor in ours.tensors.items()):
                return False
    return True


EXPECTED = {name: read(files) for name, files in GOOD.items()}


@pytest.mark.parametrize("name", GOOD)
def test_the_good_ones_are_read(name: str):
    experts = EXPECTED[name]
    assert isinstance(experts, dict), experts
    assert experts[0].shape.num_experts == 2
    assert experts[0].gate_up.format.name == ("mxfp4" if name == "fused" else name).replace(
        "-asym-v1-actorder", "-asym-v1-actorder"
    )


WILD = [None, True, False, 0, -1, 1, 2, 3, 4, 5, 16, 32, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan")]
WILD += [
    float("inf"),
    "",
    "4",
    "gptq",
    "gptq_v2",
    "nvfp4",
    "FP8",
    "FP8_PB_WO",
    "re:(",
    "re:.*",
    "Linear",
    "\ud800",
    "\0",
]
WILD += [
    "x" * 3000,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    [128, 128],
    [1, 1],
    ["lm_head"],
    {"-:.*": {}},
    {"+:.*": {"bits": 8}},
]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.sampled_from(WILD) | st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def edited(value: Any, path: tuple[Any, ...], new: Any, remove: bool) -> Any:
    """A copy with the value at `path` replaced or removed."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if remove and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = edited(value[path[0]], path[1:], new, remove)
    return copy


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("name", GOOD)
@fuzz
@given(data=st.data())
def test_configs(name: str, data: st.DataObject):
    """Any value at any place of any JSON file; a field of any name added."""
    files = dict(GOOD[name])
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        file = data.draw(st.sampled_from(sorted(f for f in files if f.endswith(".json"))), label="file")
        content = json.loads(files[file])
        path = data.draw(st.sampled_from(sorted(places(content), key=str)), label="path")
        kind = data.draw(st.sampled_from(["replace", "remove", "add"]), label="kind")
        new = data.draw(values, label="value")
        target = content
        for key in path:
            target = target[key]
        if kind == "add" and isinstance(target, dict):
            names = [
                "quantization_config",
                "text_config",
                "dynamic",
                "format",
                "num_experts",
                "weight_block_size",
                "ignore",
            ]
            names += ["desc_act", "sym", "swiglu_limit", "modules_to_not_convert", "modules_in_block_to_quantize"]
            content = edited(
                content, path, {**target, data.draw(st.sampled_from(names) | st.text(max_size=8)): new}, False
            )
        else:
            content = edited(content, path, new, kind == "remove")
        files[file] = dumped(content)
    found, expected = read(files), EXPECTED[name]
    if isinstance(found, dict) and isinstance(expected, dict) and found:
        # Another reading of the words is right where the config now says so; the words are those of the file.
        for ours, theirs in ((found[0].gate_up, expected[0].gate_up), (found[0].down, expected[0].down)):
            assert (ours.n, ours.k, ours.num_experts, ours.halves) == (
                theirs.n,
                theirs.k,
                theirs.num_experts,
                theirs.halves,
            )
            codes = next(iter({"qweight", "packed", "weight"} & set(ours.tensors)))
            assert same_bits(ours.tensors[codes], theirs.tensors[codes])


@fuzz
@given(content=st.binary(max_size=300) | st.binary(max_size=60).map(lambda b: len(b).to_bytes(8, "little") + b))
def test_random_bytes_as_weights(content: bytes):
    assert isinstance(read({**GOOD["bf16"], "model.safetensors": content}), FanfoldError | dict)


@fuzz
@given(header=values, rest=st.binary(max_size=40))
def test_random_json_as_header(header: Any, rest: bytes):
    text = dumped(header)
    found = read({**GOOD["bf16"], "model.safetensors": len(text).to_bytes(8, "little") + text + rest})
    assert isinstance(found, FanfoldError) or found == {}


@pytest.mark.parametrize("name", GOOD)
@fuzz
@given(data=st.data())
def test_headers(name: str, data: st.DataObject):
    """Any value at any place of the header, the rest of the file as it was."""
    raw = GOOD[name]["model.safetensors"]
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    path = data.draw(st.sampled_from(sorted(places(header), key=str)), label="path")
    wild = st.sampled_from([*WILD, "F32", "BF16", "I32", "U8", "F8_E4M3", "F4", [64, 32], [2**62, 4], [0, 2**62]])
    text = dumped(
        edited(header, path, data.draw(wild | values, label="value"), data.draw(st.booleans(), label="remove"))
    )
    found = read({**GOOD[name], "model.safetensors": len(text).to_bytes(8, "little") + text + raw[8 + length :]})
    if isinstance(found, dict) and found:
        assert isinstance(EXPECTED[name], dict)
        assert found[0].shape == EXPECTED[name][0].shape  # type unchanged: nothing but names of dtypes of one size


@pytest.mark.parametrize("name", GOOD)
@fuzz
@given(data=st.data())
def test_bytes(name: str, data: st.DataObject):
    """Bytes changed anywhere, the file cut anywhere."""
    raw = bytearray(GOOD[name]["model.safetensors"])
    for _ in range(data.draw(st.integers(0, 3), label="changes")):
        raw[data.draw(st.integers(0, len(raw) - 1), label="at")] = data.draw(st.integers(0, 255), label="byte")
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw)), label="length")]
    found = read({**GOOD[name], "model.safetensors": bytes(raw)})
    if bytes(raw) == GOOD[name]["model.safetensors"]:
        assert isinstance(found, dict)
        assert isinstance(EXPECTED[name], dict)
        assert same(found, EXPECTED[name])


@fuzz
@given(index=values, weight_map=values, data=st.data())
def test_indexes(index: Any, weight_map: Any, data: st.DataObject):
    files = dict(GOOD["bf16"])
    if data.draw(st.booleans()):
        names = list(
            json.loads(files["model.safetensors"][8 : 8 + int.from_bytes(files["model.safetensors"][:8], "little")])
        )
        whole = {name: "model.safetensors" for name in names if name != "__metadata__"}
        name = data.draw(st.sampled_from(sorted(whole)) | st.text(max_size=8))
        weight_map = {**whole, name: weight_map}
        index = {"weight_map": weight_map}
    files["model.safetensors.index.json"] = dumped(index)
    found = read(files)
    if isinstance(found, dict):
        assert isinstance(EXPECTED["bf16"], dict)
        assert same(found, EXPECTED["bf16"])
