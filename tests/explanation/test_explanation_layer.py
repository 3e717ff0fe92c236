"""explain: figures by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fanfold
from fanfold import explain
from fanfold.bench.adapters import pair_bytes, pair_flops
from fanfold.bench.batches import random_routing
from fanfold.bench.jobs import LayerShape
from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.explanation import matrix_bytes
from fanfold.spec import ExpertShape, WeightFormat
from samples import random_projection, sample

E, H, INNER = 8, 512, 256
# Bytes of one matrix of 131,072 weights: codes, then scales (of GPTQ and FP8 in 16 bits), zero points, global scale.
ONE_MATRIX = {
    "bf16": (262144, 262144),
    "gptq4-g128": (65536 + 2048, 65536 + 2048),
    "gptq4-g128-asym-v1": (65536 + 2048 + 512, 65536 + 2048 + 512),
    "nvfp4": (65536 + 8192 + 4, 65536 + 8192 + 4),
    "mxfp4": (65536 + 4096, 65536 + 4096),
    "fp8-block128x128": (131072 + 2 * 8, 131072 + 2 * 8),
    "fp8-channel": (131072 + 2 * INNER, 131072 + 2 * H),
}


@pytest.mark.parametrize("name", ONE_MATRIX)
def test_bytes_by_hand(name: str) -> None:
    gate, down = ONE_MATRIX[name]
    fmt = WeightFormat.parse(name)
    assert (matrix_bytes(fmt, INNER, H), matrix_bytes(fmt, H, INNER)) == (gate, down)
    for rows, experts in ((1, 1), (5, 5), (8, 8), (4096, 8), (0, 0)):
        assert explain((E, H, INNER), name, 90, rows)["weight_bytes"] == experts * (2 * gate + down)


@pytest.mark.parametrize("name", ["bf16", "gptq4-g128", "nvfp4", "mxfp4", "packed8-channel"])
def test_bytes_are_those_of_real_experts(name: str) -> None:
    projection = random_projection(name, 2, 2, 32, 128)
    beside = sum(t.nbytes for field, t in projection.tensors.items() if field in ("input_scale", "qzeros"))
    assert projection.nbytes - beside == 4 * matrix_bytes(projection.format, 32, 128)


def test_a_few_rows_on_an_h200_are_bound_by_reading() -> None:
    found = explain(ExpertShape(E, H, INNER), WeightFormat.parse("gptq4-g128"), 90, 4)
    read = 4 * 3 * (65536 + 2048)
    assert (
        found.items()
        >= {
            "shape": {"num_experts": E, "hidden": H, "intermediate": INNER},
            "format": "gptq4-g128",
            "arch": "sm_90",
            "dtype": "bfloat16",
            "activation_format": "plain",
            "never_run": [],
            "rows": 4,
            "tokens": 4,
            "top_k": 1,
            "adapters": 0,
            "rank": None,
            "chosen": "grouped_int4_sm90",
            "weight_bytes": read,
            "flops": 2 * 4 * 3 * H * INNER,
            "floor_us": pytest.approx(read / 4.4e6),
            "floor_of": "H200",
        }.items()
    )
    assert "a check, not an engine" in found["rejected"]["reference"]


def test_many_rows_are_bound_by_the_matrix_units() -> None:
    found = explain((E, H, INNER), "gptq4-g128", "sm_90", 100_000)
    assert found["floor_us"] == pytest.approx(2 * 100_000 * 3 * H * INNER / 770e6)


def test_experts_without_a_gate_have_two_products() -> None:
    found = explain(ExpertShape(E, H, INNER, gated=False), "bf16", 90, 1)
    assert found["weight_bytes"] == 2 * 262144
    assert found["flops"] == 2 * 2 * H * INNER


def test_the_cpu_has_no_floor() -> None:
    found = explain((E, H, INNER), "mxfp4", "cpu", 16)
    assert found["chosen"] == "reference"
    assert found["rejected"] == {"grouped_int4_sm90": "needs a Hopper GPU (sm_90)", "grouped": "needs an NVIDIA GPU"}
    assert (found["floor_us"], found["floor_of"]) == (None, None)
    assert explain((E, H, INNER), "mxfp4", 120, 16)["floor_us"] is None


def test_the_format_of_a_checkpoint_is_understood() -> None:
    up = fanfold.inspect(sample("gptq-int4"))["layers"][0]["gate_up"]
    experts, intermediate, hidden = up["shape"]
    assert explain((experts, hidden, intermediate), up["format"], "cpu", 8)["format"] == "gptq4-g128-v1"


def test_adapters_by_hand() -> None:
    """3 tokens of 2 experts, 2 adapters of rank 12, which are stored as 16: 6 rows meet 6 of 16 pairs at most."""
    base = explain((E, H, INNER), "gptq4-g128", 90, 6, 2)
    found = explain((E, H, INNER), "gptq4-g128", 90, 6, 2, adapters=2, rank=12)
    one = 3 * (H + INNER)
    assert found["parts"]["pairs"] == {"bytes": 6 * one * 16 * 2, "flops": 2 * 6 * one * 12}
    assert (found["pair_bytes"], found["weight_bytes"]) == (6 * one * 32, base["weight_bytes"])
    assert found["flops"] == base["flops"] + 144 * one
    assert found["floor_us"] == pytest.approx((base["weight_bytes"] + 6 * one * 32) / 4.4e6)
    # hidden and result 3 rows of H; h and y2 6 rows of I and of H, written and read; gate and up with adapters too
    numbers = 2 * 3 * H + 2 * 6 * INNER + 2 * 6 * H
    assert base["parts"]["activations"]["bytes"] == 2 * numbers
    assert found["parts"]["activations"]["bytes"] == 2 * (numbers + 2 * 2 * 6 * INNER)
    assert "pairs" not in base["parts"]


def test_pairs_are_those_of_bench() -> None:
    shape = LayerShape("", ExpertShape(E, H, INNER), 2)
    found = explain(shape.experts, "mxfp4", 90, 2, 2, adapters=5, rank=20)["parts"]["pairs"]
    assert found["bytes"] == 2 * pair_bytes(shape, 20, torch.bfloat16)
    assert found["flops"] == 2 * pair_flops(shape, 20)


def test_uniform_routing_meets_as_many_experts_as_it_says() -> None:
    experts, top_k, tokens = 16, 4, 5
    found = explain((experts, H, INNER), "nvfp4", 90, tokens * top_k, top_k)
    met = [len(random_routing("uniform", tokens, experts, top_k, seed)[0].unique()) for seed in range(400)]
    assert found["uniform"]["experts"] == pytest.approx(sum(met) / len(met), rel=0.02)
    assert found["uniform"]["experts"] == pytest.approx(16 * (1 - 0.75**5))
    share = found["uniform"]["experts"] / experts
    assert found["uniform"]["floor_us"] == pytest.approx(found["floor_us"] * share)


WRONG: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "rows": (((E, H, INNER), "bf16", 90, -1), ArgumentError, "rows: found -1"),
    "rows of no token": (((E, H, INNER), "bf16", 90, 7, 2), ArgumentError, "rows: found 7, top_k 2"),
    "top_k": (((E, H, INNER), "bf16", 90, 7, 0), ArgumentError, "top_k 0"),
    "adapters": (((E, H, INNER), "bf16", 90, 1, 1, -1), ArgumentError, "adapters, rank: found -1, 16"),
    "rank": (((E, H, INNER), "bf16", 90, 1, 1, 2, 513), ArgumentError, "adapters, rank: found 2, 513"),
    "arch": (((E, H, INNER), "bf16", "h200", 1), ArgumentError, "arch: found 'h200'"),
    "format": (((E, H, INNER), "int4", 90, 1), UnsupportedError, "found 'int4'"),
    "sizes": (((E, H, 0), "bf16", 90, 1), ArgumentError, r"ExpertShape\.intermediate: found 0"),
    "too few sizes": (((E, H), "bf16", 90, 1), ArgumentError, "shape: found"),
    "no sizes": ((8, "bf16", 90, 1), ArgumentError, "shape: found 8"),
    "packing": (((E, 100, INNER), "mxfp4", 90, 1), UnsupportedError, "100"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_questions(case: str) -> None:
    arguments, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        explain(*arguments)


@pytest.mark.parametrize("arch", [80, 86, 89, 100, 120])
def test_what_nobody_has_run_is_marked(arch: int) -> None:
    assert explain((E, H, INNER), "gptq4-g128", arch, 4)["never_run"] == [f"kernels on sm_{arch}: compiled, never run"]
    found = explain((E, H, INNER), "nvfp4", arch, 4)["never_run"]
    block_scaled = f"block-scaled instructions of torch.ops.fanfold.nvfp4_* on sm_{arch}: compiled, never run"
    assert found[1:] == ([block_scaled] if arch >= 100 else [])


def test_what_has_run_is_not_marked() -> None:
    for arch in (90, "cpu"):
        assert explain((E, H, INNER), "nvfp4", arch, 4)["never_run"] == []
    assert explain((E, H, INNER), "bf16", 103, 4)["never_run"] == ["kernels on sm_103: neither compiled here nor run"]
    assert explain((E, H, INNER), "bf16", 75, 4)["never_run"] == []  # nothing runs there
