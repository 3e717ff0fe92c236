from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from format_cases import NAMES, fmt_of, random_groups, random_weight
from torch import Tensor

from fanfold.errors import TensorError
from fanfold.formats import codec

WHERE = "model.layers.0.mlp.experts.3.up_proj"


def quantised(name: str, n: int = 32, k: int = 128) -> dict[str, Tensor]:
    fmt = fmt_of(name)
    return codec.quantize(fmt, random_weight(n, k), random_groups(fmt, k))


@pytest.mark.parametrize("name", NAMES)
def test_infos_are_enough_and_each_missing_required_tensor_is_named(name: str):
    fmt = fmt_of(name)
    infos = {key: SimpleNamespace(dtype=t.dtype, shape=list(t.shape)) for key, t in quantised(name).items()}
    codec.check_matrix(fmt, infos, 32, 128, WHERE)
    for key, field in codec.shapes(fmt, 32, 128).items():
        less = {other: info for other, info in infos.items() if other != key}
        if not field.required:
            codec.check_matrix(fmt, less, 32, 128, WHERE)
            continue
        with pytest.raises(TensorError) as caught:
            codec.check_matrix(fmt, less, 32, 128, WHERE)
        assert caught.value.what.startswith(f"{WHERE}.{codec.codec(fmt.kind).FIELDS[key][0]}")
        assert caught.value.found == "no such tensor"
        assert str(list(field.shape)) in caught.value.expected


@pytest.mark.parametrize("name", NAMES)
def test_each_wrong_shape_and_dtype_is_named_with_both_values(name: str):
    fmt = fmt_of(name)
    tensors = quantised(name)
    for key, tensor in tensors.items():
        suffix = codec.codec(fmt.kind).FIELDS[key][0]
        longer = {**tensors, key: torch.zeros(*tensor.shape, 2)}
        with pytest.raises(TensorError) as caught:
            codec.check_matrix(fmt, longer, 32, 128, WHERE)
        assert caught.value.what.startswith(f"{WHERE}.{suffix}")
        assert caught.value.found == f"shape {[*tensor.shape, 2]}"
        assert f"shape {list(tensor.shape)} for {name}" in caught.value.expected
        other = {**tensors, key: tensor.to(torch.float64)}
        with pytest.raises(TensorError) as caught:
            codec.check_matrix(fmt, other, 32, 128, WHERE)
        assert caught.value.what.startswith(f"{WHERE}.{suffix}")
        assert caught.value.found == "float64"
        assert str(tensor.dtype).removeprefix("torch.") in caught.value.expected


def test_a_tensor_that_the_format_does_not_have_is_named():
    extra = {**quantised("awq4-g32"), "g_idx": torch.zeros(128, dtype=torch.int32)}
    with pytest.raises(TensorError, match=r"up_proj\.g_idx: found a tensor that the format does not have"):
        codec.check_matrix(fmt_of("awq4-g32"), extra, 32, 128, WHERE)


def test_names_of_several_suffixes_and_a_trailing_dot():
    with pytest.raises(TensorError) as caught:
        codec.check_matrix(fmt_of("nvfp4"), {}, 32, 128, WHERE + ".")
    assert caught.value.what == f"{WHERE}.weight_packed (or weight)"


@pytest.mark.parametrize("name", NAMES)
def test_sound_values_pass(name: str):
    codec.check_values(fmt_of(name), quantised(name), WHERE)


def spoil(tensor: Tensor, at: tuple[int, ...], value: float | int) -> Tensor:
    spoiled = tensor.clone()
    if spoiled.dtype == torch.float8_e4m3fn:
        spoiled.view(torch.uint8)[at] = int(value)
    else:
        spoiled[at] = value
    return spoiled


@pytest.mark.parametrize(
    ("name", "key", "at", "value", "what", "found"),
    [
        ("gptq4-g32", "scales", (3, 5), math.nan, "scales", "nan at [3, 5]"),
        ("gptq4-g32", "scales", (0, 0), math.inf, "scales", "inf at [0, 0]"),
        ("awq4-g32", "scales", (1, 2), -math.inf, "scales", "-inf at [1, 2]"),
        ("packed4-g32", "scale", (31, 3), math.nan, "weight_scale", "nan at [31, 3]"),
        ("nvfp4", "scale", (2, 7), 0x7F, "weight_scale", "nan at [2, 7]"),
        ("nvfp4", "scale", (2, 7), 0xFF, "weight_scale", "nan at [2, 7]"),
        ("nvfp4", "global_scale", (), 0.0, "weight_global_scale", "0.0 at []"),
        ("nvfp4", "global_scale", (), -1.0, "weight_global_scale", "-1.0 at []"),
        ("nvfp4-divisor", "global_scale", (), math.inf, "weight_global_scale", "inf at []"),
        ("nvfp4-divisor", "global_scale", (), math.nan, "weight_global_scale", "nan at []"),
        ("mxfp4", "scale", (9, 1), 255, "weight_scale", "255 at [9, 1]"),
        ("fp8-tensor", "weight", (4, 4), 0x7F, "weight", "nan at [4, 4]"),
        ("fp8-tensor", "scale", (), math.inf, "weight_scale_inv", "inf at []"),
        ("fp8-block128x128", "scale", (0, 0), math.nan, "weight_scale_inv", "nan at [0, 0]"),
        ("bf16", "weight", (1, 1), math.nan, "weight", "nan at [1, 1]"),
        ("fp16", "weight", (1, 2), math.inf, "weight", "inf at [1, 2]"),
        ("gptq4-g64-actorder", "g_idx", (7,), 2, "g_idx", "2 at [7]"),
        ("gptq4-g64-actorder", "g_idx", (7,), -1, "g_idx", "-1 at [7]"),
        ("packed4-g64-asym-actorder", "g_idx", (0,), 99, "weight_g_idx", "99 at [0]"),
    ],
)
def test_each_impossible_value_is_named_with_its_place(
    name: str, key: str, at: tuple[int, ...], value: float, what: str, found: str
):
    tensors = quantised(name)
    tensors[key] = spoil(tensors[key], at, value)
    with pytest.raises(TensorError) as caught:
        codec.check_values(fmt_of(name), tensors, WHERE)
    assert caught.value.what.startswith(f"{WHERE}.{what}")
    assert caught.value.found.startswith(found)
    assert f"(1 such of {tensors[key].numel()})" in caught.value.found


def test_a_g_idx_that_matters_is_refused_without_act_order():
    tensors = quantised("gptq4-g32")
    tensors["g_idx"] = (torch.arange(128) // 32).to(torch.int32)
    codec.check_values(fmt_of("gptq4-g32"), tensors, WHERE)
    tensors["g_idx"][[0, 127]] = tensors["g_idx"][[127, 0]]
    with pytest.raises(TensorError, match=r"found 3 at \[0\] \(2 such of 128\); expected k // 32, as gptq4-g32 has no"):
        codec.check_values(fmt_of("gptq4-g32"), tensors, WHERE)
    one_group = {**quantised("gptq4-channel"), "g_idx": torch.zeros(128, dtype=torch.int32)}
    codec.check_values(fmt_of("gptq4-channel"), one_group, WHERE)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_input_scales_may_be_anything(value: float):
    for name in ("nvfp4", "fp8-tensor"):
        tensors = {**quantised(name), "input_scale": torch.tensor(value)}
        codec.check_matrix(fmt_of(name), tensors, 32, 128, WHERE)
        codec.check_values(fmt_of(name), tensors, WHERE)


def test_a_row_of_zero_scales_is_a_row_of_zeros():
    tensors = quantised("fp8-channel")
    tensors["scale"][3] = 0
    codec.check_values(fmt_of("fp8-channel"), tensors, WHERE)
    assert torch.equal(codec.dequantize(fmt_of("fp8-channel"), tensors, 32, 128)[3], torch.zeros(128))
