from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from format_cases import NAMES, fmt_of, random_groups, random_weight
from torch import Tensor

from fanfold.errors import ArgumentError, TensorError, UnsupportedError
from fanfold.formats import codec
from fanfold.formats.stack import stack
from fanfold.spec import WeightFormat

Experts = list[list[dict[str, Tensor]]]


def experts_of(name: str, experts: int = 3, halves: int = 2, n: int = 32, k: int = 128) -> Experts:
    fmt = fmt_of(name)
    seeds = [[10 * e + p for p in range(halves)] for e in range(experts)]
    return [[codec.quantize(fmt, random_weight(n, k, s), random_groups(fmt, k, s)) for s in row] for row in seeds]


def refused(fmt: WeightFormat, experts: Any, **options: Any) -> TensorError:
    with pytest.raises(TensorError) as caught:
        stack(fmt, experts, **options)
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_format_stacks_without_permutation(name: str, halves: int):
    fmt = fmt_of(name)
    experts = experts_of(name, halves=halves)
    projection = stack(fmt, experts, k=128)
    assert (projection.num_experts, projection.halves, projection.n, projection.k) == (3, halves, 32, 128)
    assert projection.bias is None
    for e, row in enumerate(experts):
        for p, matrix in enumerate(row):
            assert set(projection.tensors) == set(matrix)
            for key, tensor in matrix.items():
                found = projection.tensors[key][e, p]
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(found.double(), tensor.double())
            assert torch.equal(codec.dequantize_expert(projection, e, p), codec.dequantize(fmt, matrix, 32, 128))


def test_the_bytes_are_those_of_the_files():
    experts = experts_of("gptq4-g32-asym-v1")
    expected = sum(t.nbytes for row in experts for matrix in row for t in matrix.values())
    assert stack(fmt_of("gptq4-g32-asym-v1"), experts).nbytes == expected


def test_scalars_of_one_element_are_stacked_as_scalars():
    experts = experts_of("nvfp4-divisor")
    for row in experts:
        for matrix in row:
            matrix["global_scale"] = matrix["global_scale"].reshape(1)
            matrix["input_scale"] = torch.tensor([3.0])
    projection = stack(fmt_of("nvfp4-divisor"), experts)
    assert projection.tensors["global_scale"].shape == (3, 2)
    assert projection.tensors["input_scale"].tolist() == [[3.0, 3.0]] * 3


@pytest.mark.parametrize(("name", "key"), [("gptq4-g32", "scales"), ("awq4-g32", "scales"), ("packed4-g32", "scale")])
def test_fp32_scales_of_integers_are_rounded_to_fp16(name: str, key: str):
    experts = experts_of(name)
    for row in experts:
        for matrix in row:
            matrix[key] = matrix[key].float() * 1.0001
    projection = stack(fmt_of(name), experts, k=128)
    assert projection.tensors[key].dtype == torch.float16
    for e, row in enumerate(experts):
        assert torch.equal(projection.tensors[key][e, 1], row[1][key].half())


def test_fp32_scales_of_fp8_stay_fp32():
    assert stack(fmt_of("fp8-channel"), experts_of("fp8-channel")).tensors["scale"].dtype == torch.float32


def test_fp32_scales_beyond_fp16_are_refused():
    experts = experts_of("gptq4-g32")
    experts[1][0]["scales"] = experts[1][0]["scales"].float()
    experts[1][0]["scales"][2, 3] = 70000.0
    error = refused(fmt_of("gptq4-g32"), experts)
    assert (error.what, error.found) == ("expert 1 half 0.scales", "70000.0")
    assert "65504" in error.expected


def test_a_g_idx_that_says_nothing_is_dropped_and_one_that_does_is_refused():
    experts = experts_of("gptq4-g32")
    experts[0][0]["g_idx"] = (torch.arange(128) // 32).to(torch.int32)
    assert "g_idx" not in stack(fmt_of("gptq4-g32"), experts).tensors
    experts[0][0]["g_idx"] = experts[0][0]["g_idx"].flip(0)
    error = refused(fmt_of("gptq4-g32"), experts)
    assert error.what == "expert 0 half 0.g_idx"
    assert error.expected == "k // 32, as gptq4-g32 has no act-order"


def test_biases_are_stacked():
    bias = [[torch.full((32,), 10.0 * e + p) for p in (0, 1)] for e in range(3)]
    projection = stack(fmt_of("mxfp4"), experts_of("mxfp4"), bias=bias)
    assert projection.bias is not None
    assert projection.bias.shape == (3, 2, 32)
    assert projection.bias[2, 1, 0] == 21.0


def test_an_empty_list_is_refused():
    with pytest.raises(ArgumentError, match="experts: found an empty list"):
        stack(fmt_of("gptq4-g32"), [])


def test_lists_of_unlike_lengths_are_refused_with_all_lengths():
    experts = experts_of("gptq4-g32", experts=4)
    del experts[2][1]
    with pytest.raises(ArgumentError) as caught:
        stack(fmt_of("gptq4-g32"), experts)
    assert "[2, 2, 1, 2]" in caught.value.found
    with pytest.raises(ArgumentError, match=r"\[0, 0\]"):
        stack(fmt_of("gptq4-g32"), [[], []])
    with pytest.raises(ArgumentError, match=r"\[3\]"):
        stack(fmt_of("gptq4-g32"), experts_of("gptq4-g32", experts=1, halves=3))


def test_biases_of_unlike_lengths_are_refused_with_all_lengths():
    one = torch.zeros(32)
    for bias in ([[one, one]] * 2, [[one, one], [one], [one, one]]):
        with pytest.raises(ArgumentError) as caught:
            stack(fmt_of("mxfp4"), experts_of("mxfp4"), bias=bias)
        assert str([len(row) for row in bias]) in caught.value.found
        assert "3 experts with 2 each" in caught.value.expected


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (torch.zeros(31), "float32 [31]"),
        (torch.zeros(32, dtype=torch.int32), "int32 [32]"),
        (torch.full((32,), math.nan), "values that are not finite"),
    ],
)
def test_a_bad_bias_is_named(bad: Tensor, found: str):
    bias = [[torch.zeros(32), torch.zeros(32)] for _ in range(3)]
    bias[1][1] = bad
    error = refused(fmt_of("mxfp4"), experts_of("mxfp4"), bias=bias)
    assert error.what == "expert 1 half 1.bias"
    assert error.found == found
    assert error.expected == "finite floating-point numbers [32]"


def test_unlike_bias_dtypes_are_refused():
    bias = [[torch.zeros(32), torch.zeros(32)] for _ in range(3)]
    bias[2][0] = bias[2][0].bfloat16()
    error = refused(fmt_of("mxfp4"), experts_of("mxfp4"), bias=bias)
    assert (error.what, error.found) == ("expert 2 half 0.bias", "bfloat16 on cpu")


@pytest.mark.parametrize(("bits", "kind"), [(5, "gptq"), (1, "gptq"), (3, "awq"), (6, "packed")])
def test_unsupported_bits_are_refused(bits: int, kind: Any):
    with pytest.raises(UnsupportedError, match=f"{kind} bits: found {bits}"):
        stack(WeightFormat(kind, bits, 32), experts_of("gptq4-g32"))


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_group_size_0_is_refused(kind: Any):
    with pytest.raises(UnsupportedError, match=f"{kind} group_size: found 0; expected a positive number, or -1"):
        stack(WeightFormat(kind, 4, 0), experts_of("gptq4-g32"))


def other(name: str, n: int = 32, k: int = 128) -> dict[str, Tensor]:
    return experts_of(name, 1, 1, n, k)[0][0]


@pytest.mark.parametrize(
    ("replacement", "array", "found", "expected"),
    [
        (other("gptq4-g32", k=160), "qweight", "[20, 32]", "[16, 32]"),  # another k
        (other("gptq4-g32", n=40), "qweight", "[16, 40]", "[16, 32]"),  # another n
        (other("gptq4-g64"), "scales", "[2, 32]", "[4, 32]"),  # another group size
        (other("gptq8-g32"), "qweight", "[32, 32]", "[16, 32]"),  # other bits
        (other("gptq2-g32"), "qweight", "[8, 32]", "[16, 32]"),
    ],
    ids=["k", "n", "group", "8 bits", "2 bits"],
)
def test_an_expert_unlike_the_others_is_named(replacement: dict[str, Tensor], array: str, found: str, expected: str):
    experts = experts_of("gptq4-g32")
    experts[2][1] = replacement
    error = refused(fmt_of("gptq4-g32"), experts)
    assert error.what == f"expert 2 half 1.{array}"
    assert error.found == f"shape {found}"
    assert error.expected == f"shape {expected} for gptq4-g32"


@pytest.mark.parametrize("name", ["gptq4-g32", "awq4-g32", "packed4-g32", "nvfp4", "mxfp4", "fp8-block32x48", "bf16"])
def test_sizes_that_the_caller_states_are_held(name: str):
    for sizes in ({"n": 40, "k": 128}, {"n": 32, "k": 256}):
        assert refused(fmt_of(name), experts_of(name), **sizes).what.startswith("expert 0 half 0.")


def test_b14_scales_with_too_many_rows_are_refused():
    fmt = fmt_of("gptq4-g128")
    experts = experts_of("gptq4-g128")
    experts[1][0]["scales"] = torch.ones(2, 32, dtype=torch.float16)
    error = refused(fmt, experts)
    assert (error.what, error.found) == ("expert 1 half 0.scales", "shape [2, 32]")
    assert error.expected == "shape [1, 32] for gptq4-g128"
    assert "ever inferred" in error.next_step
    all_of_g64 = experts_of("gptq4-g64")
    assert refused(fmt, all_of_g64).what == "expert 0 half 0.scales"


def test_c12_per_expert_scales_of_another_number_are_refused():
    # two global scales in one matrix: a list over another number of experts
    experts = experts_of("nvfp4")
    experts[0][1]["input_scale"] = torch.ones(2)
    error = refused(fmt_of("nvfp4"), experts)
    assert (error.what, error.found) == ("expert 0 half 1.input_global_scale (or input_scale)", "shape [2]")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_array_is_named(name: str):
    fmt = fmt_of(name)
    for key, field in codec.shapes(fmt, 32, 128).items():
        if field.required:
            for e in (0, 2):
                experts = experts_of(name)
                del experts[e][0][key]
                error = refused(fmt, experts, k=128)
                assert error.what.startswith(f"expert {e} half 0.")
                assert error.found in ("no such tensor", "no such array")


def test_an_optional_array_that_only_some_experts_have_is_named():
    experts = experts_of("gptq4-g32")
    del experts[1][1]["qzeros"]
    error = refused(fmt_of("gptq4-g32"), experts)
    assert (error.what, error.found) == ("expert 1 half 1.qzeros", "no such array")
    assert error.expected == "int32 on cpu, as expert 0 half 0 has"
    nvfp4 = experts_of("nvfp4")
    nvfp4[2][0]["input_scale"] = torch.tensor(1.0)
    error = refused(fmt_of("nvfp4"), nvfp4)
    assert (error.what, error.found) == ("expert 2 half 0.input_scale", "float32 on cpu")
    assert error.expected == "no such array, as expert 0 half 0 has"


def test_unlike_dtypes_and_devices_are_named():
    experts = experts_of("gptq4-g32")
    experts[1][0]["scales"] = experts[1][0]["scales"].bfloat16()
    error = refused(fmt_of("gptq4-g32"), experts)
    assert (error.what, error.found) == ("expert 1 half 0.scales", "bfloat16 on cpu")
    wrong = experts_of("gptq4-g32")
    wrong[0][1]["qweight"] = wrong[0][1]["qweight"].to(torch.int64)
    assert refused(fmt_of("gptq4-g32"), wrong).found == "int64"


def test_an_unknown_array_is_named():
    experts = experts_of("gptq4-g32")
    experts[0][0]["workspace"] = torch.zeros(3)
    error = refused(fmt_of("gptq4-g32"), experts)
    assert error.what == "expert 0 half 0.workspace"
    assert "qweight" in error.expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gptq4-g32", "scales", math.nan),
        ("nvfp4", "global_scale", 0.0),
        ("gptq4-g64-actorder", "g_idx", 2),
        ("bf16", "weight", math.inf),
    ],
)
def test_impossible_values_are_named(name: str, key: str, value: float):
    experts = experts_of(name)
    experts[1][1][key].flatten()[0] = value
    assert refused(fmt_of(name), experts).what.startswith("expert 1 half 1.")


def test_packed_words_do_not_tell_k():
    with pytest.raises(ArgumentError, match="k: found None; expected the number of inputs, for packed4-g32"):
        stack(fmt_of("packed4-g32"), experts_of("packed4-g32"))
    assert stack(fmt_of("packed4-g32"), experts_of("packed4-g32", k=124), k=124).k == 124


def test_what_is_no_matrix_tells_no_sizes():
    experts = experts_of("gptq4-g32")
    experts[0][0]["qweight"] = torch.zeros(4, dtype=torch.int32)
    error = refused(fmt_of("gptq4-g32"), experts)
    assert (error.what, error.found) == ("expert 0 half 0.qweight", "shape [4]")


def test_sizes_that_the_packing_can_not_hold_are_refused():
    with pytest.raises(UnsupportedError, match="K = 44"):
        stack(fmt_of("gptq4-g32"), experts_of("gptq4-g32"), 32, 44)
    with pytest.raises(UnsupportedError, match="neither v1 nor v2"):
        stack(replace(fmt_of("gptq4-g32"), symmetric=False), experts_of("gptq4-g32"))
