"""One matrix of a checkpoint: found by its headers, read, checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import NAMES, random_groups
from safetensors.torch import save_file
from small_checkpoints import matrix_tensors, parts, same_bits, suffix_of
from torch import Tensor

from fanfold.errors import ConfigError, FanfoldError, TensorError, UnsupportedError
from fanfold.formats.codec import codec, dequantize, quantize
from fanfold.formats.files import CheckpointFiles
from fanfold.formats.matrix import Matrix, find_matrix, read_dense, read_matrix
from fanfold.spec import WeightFormat

MODULE = "model.layers.0.self_attn.q_proj"
N, K = 32, 64


def located(folder: Path, fmt: WeightFormat | None, tensors: dict[str, Tensor]) -> tuple[CheckpointFiles, Matrix]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    files = CheckpointFiles(folder)
    suffixes = {name.removeprefix(MODULE + "."): name for name in tensors}
    return files, find_matrix(files, lambda module: fmt if module == MODULE else None, MODULE, suffixes)


def refusal(folder: Path, kind: type[FanfoldError], fmt: WeightFormat | None, tensors: dict[str, Tensor]) -> str:
    with pytest.raises(kind) as caught:
        read_matrix(*located(folder, fmt, tensors))
    text = parts(caught.value)
    assert text.startswith(f"{folder}: {MODULE}")
    return text


def packed(name: str, **others: Tensor | None) -> tuple[WeightFormat, dict[str, Tensor]]:
    """The format and its tensors, some replaced or (None) left out."""
    fmt = WeightFormat.parse(name)
    tensors: dict[str, Any] = matrix_tensors(fmt, MODULE, N, K)
    tensors |= {f"{MODULE}.{suffix}": tensor for suffix, tensor in others.items()}
    return fmt, {key: tensor for key, tensor in tensors.items() if tensor is not None}


def scheme_format(fmt: WeightFormat) -> WeightFormat | None:
    return None if fmt.dense else fmt


@pytest.mark.parametrize("name", [name.replace("g64", "g32") for name in NAMES])
def test_every_format_is_found_and_read(tmp_path: Path, name: str):
    fmt, tensors = packed(name)
    files, matrix = located(tmp_path, scheme_format(fmt), tensors)
    assert (matrix.n, matrix.k, matrix.bias, matrix.module) == (N, K, None, MODULE)
    assert not matrix.format.act_order
    read_format, read = read_matrix(files, matrix)
    assert read_format == fmt
    for field, tensor in read.items():
        stored = tensors[f"{MODULE}.{suffix_of(fmt, field)}"]
        assert same_bits(tensor, stored.reshape(tensor.shape))
    expected = dequantize(fmt, {f: tensors[f"{MODULE}.{suffix_of(fmt, f)}"] for f in read}, N, K)
    assert torch.equal(read_dense(files, matrix, torch.float32), expected)
    assert torch.equal(read_dense(files, matrix, torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["gptq4-g32-v1", "packed4-g32"])
def test_b12_g_idx_absent_or_saying_nothing(tmp_path: Path, name: str):
    key = "g_idx" if name.startswith("gptq") else "weight_g_idx"
    for g_idx in (None, (torch.arange(K) // 32).to(torch.int32)):
        fmt, tensors = packed(name, **{key: g_idx})
        read_format, read = read_matrix(*located(tmp_path, fmt, tensors))
        assert read_format == fmt
        assert "g_idx" not in read


def test_g_idx_of_minus_one_is_none_in_compressed_tensors_alone(tmp_path: Path):
    unset = torch.full((K,), -1, dtype=torch.int32)
    fmt, tensors = packed("packed4-g32", weight_g_idx=unset)
    assert read_matrix(*located(tmp_path, fmt, tensors))[0] == fmt
    fmt, tensors = packed("gptq4-g32-v1", g_idx=unset)
    assert "g_idx: found -1 at [0] (64 such of 64); expected groups in [0, 2)" in refusal(
        tmp_path, TensorError, fmt, tensors
    )


@pytest.mark.parametrize("name", ["gptq4-g32-v1-actorder", "packed4-g32-actorder"])
def test_act_order_that_the_config_states_needs_g_idx(tmp_path: Path, name: str):
    key = "g_idx" if name.startswith("gptq") else "weight_g_idx"
    fmt, tensors = packed(name, **{key: None})
    assert f"{key}: found no such tensor; expected int32 [64]" in refusal(tmp_path, TensorError, fmt, tensors)


def test_act_order_that_only_the_file_tells(tmp_path: Path):
    ordered = WeightFormat.parse("gptq4-g32-v1-actorder")
    g_idx = random_groups(ordered, K)
    tensors = matrix_tensors(ordered, MODULE, N, K, g_idx=g_idx)
    read_format, read = read_matrix(*located(tmp_path, WeightFormat.parse("gptq4-g32-v1"), tensors))
    assert read_format == ordered
    assert torch.equal(read["g_idx"], g_idx if g_idx is not None else torch.empty(0))


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor", "fp8-tensor"])
def test_one_scale_in_any_spelling(tmp_path: Path, name: str, shape: list[int]):
    fmt, tensors = packed(name)
    key = f"{MODULE}.{suffix_of(fmt, 'scale' if name == 'fp8-tensor' else 'global_scale')}"
    expected = read_dense(*located(tmp_path, fmt, tensors), torch.float32)
    tensors[key] = tensors[key].reshape(shape)
    assert torch.equal(read_dense(*located(tmp_path, fmt, tensors), torch.float32), expected)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("extra", ["input_scale", "activation_scale"])
def test_fp8_scales_under_either_name(tmp_path: Path, scale: str, extra: str):
    fmt = WeightFormat.parse("fp8-channel")
    weights = quantize(fmt, torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    tensors = {f"{MODULE}.weight": weights["weight"], f"{MODULE}.{scale}": weights["scale"]}
    tensors[f"{MODULE}.{extra}"] = torch.tensor(0.5)
    _, read = read_matrix(*located(tmp_path, fmt, tensors))
    assert torch.equal(read["scale"], weights["scale"])
    assert read["input_scale"].item() == 0.5


@pytest.mark.parametrize("shape", [[2, 4], [2, 1, 4, 1]])
def test_fp8_blocks_that_the_scales_tell(tmp_path: Path, shape: list[int]):
    stated = WeightFormat.parse("fp8-block16x16")
    weights = quantize(stated, torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    tensors = {f"{MODULE}.weight": weights["weight"], f"{MODULE}.weight_scale": weights["scale"].reshape(shape)}
    files, matrix = located(tmp_path, WeightFormat("fp8", 8), tensors)
    assert matrix.format == stated
    assert torch.equal(read_dense(files, matrix, torch.float32), dequantize(stated, weights, N, K))


def test_biases_and_tensors_beside(tmp_path: Path):
    fmt, tensors = packed("gptq4-g32-v1", bias=torch.zeros(N), k_scale=torch.ones(1), output_scale=torch.ones(1))
    _, matrix = located(tmp_path, fmt, tensors)
    assert matrix.bias == f"{MODULE}.bias"
    assert set(matrix.fields) == {"qweight", "qzeros", "scales"}
    for bias, found in ((torch.zeros(N + 1), "float32 [33]"), (torch.zeros(N, dtype=torch.int32), "int32 [32]")):
        fmt, tensors = packed("gptq4-g32-v1", bias=bias)
        assert f".bias: found {found}; expected bfloat16, float16 or float32 [32]" in refusal(
            tmp_path, TensorError, fmt, tensors
        )


def test_packed_where_the_config_says_nothing(tmp_path: Path):
    _, tensors = packed("gptq4-g32-v1")
    text = refusal(tmp_path, ConfigError, None, tensors)
    assert "found qweight (int32), qzeros (int32), scales (float16); expected a plain weight" in text
    _, tensors = packed("fp8-tensor", weight_scale_inv=None)
    assert "found weight (float8_e4m3fn); expected" in refusal(tmp_path, ConfigError, None, tensors)
    text = refusal(tmp_path, ConfigError, None, {f"{MODULE}.bias": torch.zeros(3)})
    assert "found no weight; expected a plain weight" in text


@pytest.mark.parametrize("name", ["gptq4-g32-v1", "fp8-block16x16", "nvfp4-divisor"])
def test_plain_where_the_config_says_packed(tmp_path: Path, name: str):
    tensors = {f"{MODULE}.weight": torch.zeros(N, K, dtype=torch.bfloat16)}
    text = refusal(tmp_path, ConfigError, WeightFormat.parse(name), tensors)
    assert f"found a plain weight (bf16); expected {name} tensors, as the quantization config states" in text
    assert "must except it (ignore, modules_to_not_convert, or -: in dynamic)" in text
    text = refusal(tmp_path, ConfigError, WeightFormat("fp8", 8), tensors)
    assert "expected fp8 tensors" in text


def nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).flatten()[-1] = 0x7F
    elif tensor.dtype == torch.uint8:
        tensor.flatten()[-1] = 255
    else:
        tensor.flatten()[-1] = float("nan")
    return tensor


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


@pytest.mark.parametrize(
    ("name", "suffix", "change", "kind", "text"),
    [
        ("gptq4-g32-v1", "scales", nan, TensorError, "scales: found nan at [1, 31] (1 such of 64); expected finite"),
        ("gptq4-g32-v1", "scales", filled(float("inf")), TensorError, "scales: found inf at [0, 0] (64 such of 64)"),
        ("awq4-g32", "scales", nan, TensorError, "scales: found nan"),
        ("packed4-g32", "weight_scale", nan, TensorError, "weight_scale: found nan"),
        ("nvfp4", "weight_scale", nan, TensorError, "weight_scale: found nan at [31, 3]"),
        ("nvfp4", "weight_scale_2", filled(0), TensorError, "weight_scale_2): found 0.0 at []"),
        ("nvfp4", "weight_scale_2", filled(-1), TensorError, "expected a positive, finite number"),
        (
            "nvfp4-divisor",
            "weight_global_scale",
            nan,
            TensorError,
            "weight_global_scale (or weight_scale_2): found nan",
        ),
        ("mxfp4", "weight_scale", nan, TensorError, "weight_scale: found 255 at [31, 1]"),
        ("fp8-channel", "weight", nan, TensorError, "weight: found nan at [31, 63] (1 such of 2048)"),
        (
            "fp8-channel",
            "weight_scale_inv",
            nan,
            TensorError,
            "weight_scale_inv (or weight_scale): found nan at [31, 0]",
        ),
        ("bf16", "weight", nan, TensorError, "weight: found nan at [31, 63]"),
        ("gptq4-g32-v1", "scales", None, TensorError, "scales: found no such tensor; expected float16 or"),
        ("gptq4-g32-asym-v1", "qzeros", None, TensorError, "qzeros: found no such tensor; expected int32 [2, 4]"),
        ("awq4-g32-asym", "qzeros", None, TensorError, "qzeros: found no such tensor; expected int32 [2, 4]"),
        ("packed4-g32-asym", "weight_zero_point", None, TensorError, "weight_zero_point: found no such tensor"),
        ("gptq4-g32-v1", "qweight", None, TensorError, "qweight: found no such tensor; expected a tensor of gptq4"),
        ("packed4-g32", "weight_shape", None, TensorError, "weight_shape: found no such tensor"),
        ("nvfp4", "weight_scale_2", None, TensorError, "weight_scale_2): found no such tensor"),
        ("fp8-channel", "weight_scale_inv", None, TensorError, "weight_scale): found no such tensor"),
        ("gptq4-g32-v1", "scales", lambda t: t[:1], TensorError, "scales: found shape [1, 32]; expected shape [2, 32]"),
        ("gptq4-g32-v1", "qweight", lambda t: t.float(), TensorError, "qweight: found float32; expected int32"),
        ("gptq3-g32-v1", "qweight", lambda t: t[:4], UnsupportedError, "found K = 42; expected K a positive multiple"),
        ("gptq4-g32-v1", "qweight", lambda t: t[0], TensorError, "qweight: found shape [32]"),
        ("packed4-g32", "weight_shape", lambda t: t + 8, TensorError, "weight_packed: found shape [32, 8]"),
        ("packed4-g32", "weight_shape", lambda t: t * 0, TensorError, "weight_shape: found [0, 0]; expected the sizes"),
        ("packed4-g32", "weight_shape", lambda t: t - 2**40, TensorError, "weight_shape: found [-10995"),
        ("packed4-g32", "weight_shape", lambda t: t * 2**40, TensorError, "weight_packed: found shape [32, 8]"),
        ("packed4-g32", "weight_shape", lambda t: t.float(), TensorError, "weight_shape: found float32 [2]"),
        ("packed4-g32", "weight_shape", lambda t: t.repeat(9), TensorError, "weight_shape: found int64 [18]"),
        (
            "nvfp4",
            "weight_scale",
            lambda t: t.T,
            TensorError,
            "weight_scale: found shape [4, 32]; expected shape [32, 4]",
        ),
        (
            "mxfp4",
            "weight_packed",
            lambda t: t[:, :-1],
            UnsupportedError,
            "found K = 62; expected K a positive multiple",
        ),
        (
            "fp8-block16x16",
            "weight_scale_inv",
            lambda t: t[:1],
            TensorError,
            "found shape [1, 4]; expected shape [2, 4]",
        ),
    ],
)
def test_broken(tmp_path: Path, name: str, suffix: str, change: Any, kind: type[FanfoldError], text: str):
    fmt, tensors = packed(name)
    key = f"{MODULE}.{suffix}"
    broken = {**tensors, key: change(tensors[key])} if change else {k: t for k, t in tensors.items() if k != key}
    assert text in refusal(tmp_path, kind, scheme_format(fmt), broken)


def test_unknown_suffixes(tmp_path: Path):
    fmt, tensors = packed("gptq4-g32-v1", weight_foo=torch.zeros(1))
    text = refusal(tmp_path, TensorError, fmt, tensors)
    assert ".weight_foo: found a tensor unknown to gptq4-g32-v1; expected among qweight, qzeros, scales, g_idx" in text
    assert "nothing is ignored silently" in text


def test_two_spellings_of_one_field(tmp_path: Path):
    fmt, tensors = packed("fp8-channel", weight_scale=torch.ones(N, 1))
    text = refusal(tmp_path, TensorError, fmt, tensors)
    assert ".weight_scale" in text
    assert "expected one tensor for scale" in text


def test_g_idx_out_of_range(tmp_path: Path):
    fmt, tensors = packed("gptq4-g32-v1", g_idx=torch.full((K,), 2, dtype=torch.int32))
    assert "g_idx: found 2 at [0]" in refusal(tmp_path, TensorError, fmt, tensors)
    fmt, tensors = packed("gptq4-g32-v1", g_idx=torch.zeros(K - 1, dtype=torch.int32))
    assert "g_idx: found shape [63]" in refusal(tmp_path, TensorError, fmt, tensors)


def test_group_sizes_beyond_k_are_one_group(tmp_path: Path):
    channel, tensors = packed("gptq4-channel-v1")
    expected = read_dense(*located(tmp_path, channel, tensors), torch.float32)
    large = WeightFormat("gptq", 4, group_size=2**31 - 1, zero_point="v1")
    g_idx = torch.zeros(K, dtype=torch.int32)
    files, matrix = located(tmp_path, large, {**tensors, f"{MODULE}.g_idx": g_idx})
    assert torch.equal(read_dense(files, matrix, torch.float32), expected)


def test_fields_of_every_codec_are_distinct():
    for kind in ("gptq", "awq", "packed", "nvfp4", "mxfp4", "fp8", "bf16"):
        names = [suffix for suffixes in codec(kind).FIELDS.values() for suffix in suffixes]
        assert len(names) == len(set(names))
