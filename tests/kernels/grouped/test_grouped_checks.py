"""Wrong arguments of the grouped product, each in turn: one error that names it, before any launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from grouped_jobs import job_of, projection

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.kernels.common.device import arch_of
from fanfold.kernels.grouped.configs import all_configs, config_for, pinned_config
from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up
from fanfold.spec import Activation, WeightFormat
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.work import WorkList

CONFIG = LaunchConfig(32, 32, 16, 4, 2)


def arguments(name: str = "gptq4-g32", halves: int = 2) -> dict[str, Any]:
    job = job_of(torch.zeros(5, 96, dtype=torch.float16), torch.zeros(5, 2).int(), 3, 16)
    weights = projection(name, 3, halves, 32, 96, "cpu")
    weights = replace(weights, bias=torch.zeros(3, halves, 32))
    return dict(
        x=job.x,
        weights=weights,
        work=job.work,
        sorted_rows=job.route.sorted_rows,
        top_k=2,
        config=CONFIG,
        activation=None,
    )


def with_tensor(
    given: dict[str, Any], name: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, Any]:
    tensors = dict(given["weights"].tensors)
    changed = change(tensors.pop(name))
    return {"weights": replace(given["weights"], tensors=tensors if changed is None else {**tensors, name: changed})}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "x of another K": (lambda a: {"x": a["x"][:, :64]}, r"x: found float16 \[5, 64\].*\[rows, 96\]"),
    "x of integers": (lambda a: {"x": a["x"].int()}, r"x: found int32"),
    "x of three axes": (lambda a: {"x": a["x"][None]}, r"x: found float16 \[1, 5, 96\]"),
    "x transposed": (lambda a: {"x": torch.zeros(96, 5).half().T}, r"x: found strides"),
    "x of more tokens": (lambda a: {"x": torch.zeros(6, 96).half()}, r"sorted_rows: found 10 rows; expected 6 tokens"),
    "sorted_rows int64": (lambda a: {"sorted_rows": a["sorted_rows"].long()}, r"sorted_rows: found int64"),
    "sorted_rows short": (lambda a: {"sorted_rows": a["sorted_rows"][:9]}, r"sorted_rows: found 9 rows"),
    "top_k 0": (lambda a: {"top_k": 0}, r"sorted_rows"),
    "another tile": (lambda a: {"work": WorkList(a["work"].slots, 32)}, r"work: found tiles of 32 rows; expected 16"),
    "slots short": (lambda a: {"work": WorkList(a["work"].slots[:-1], 16)}, r"work.slots: found int32 \[2, 4\]"),
    "slots long": (lambda a: {"work": WorkList(torch.zeros(4, 4).int(), 16)}, r"work.slots: found int32 \[4, 4\]"),
    "slots int64": (lambda a: {"work": WorkList(a["work"].slots.long(), 16)}, r"work.slots: found int64"),
    "x elsewhere": (lambda a: {"x": a["x"].to("meta")}, r"found cpu; expected meta, where x is"),
    "gate without a gate": (lambda a: {"activation": Activation("relu2")}, r"activation: found relu2 with 2 halves"),
    "scale on a sum of groups": (
        lambda a: {"config": replace(CONFIG, block_k=64, scale_on_sum=True)},
        r"config: found scale_on_sum with block_k 64",
    ),
    "no scales": (lambda a: with_tensor(a, "scales", lambda t: None), r"scales: found no such tensor"),
    "scales short": (
        lambda a: with_tensor(a, "scales", lambda t: t[:, :, :2]),
        r"scales: found float16 \[3, 2, 2, 32\]",
    ),
    "words of another width": (lambda a: with_tensor(a, "qweight", lambda t: t[:, :, :6]), r"qweight: found int32"),
    "words int64": (lambda a: with_tensor(a, "qweight", lambda t: t.long()), r"qweight: found int64"),
    "words transposed": (
        lambda a: with_tensor(a, "qweight", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)),
        r"qweight: found strides",
    ),
    "bias short": (
        lambda a: {"weights": replace(a["weights"], bias=torch.zeros(3, 2, 31))},
        r"weights.bias: found float32 \[3, 2, 31\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_wrong_argument_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fanfold.kernels.grouped import launch

    monkeypatch.setattr(launch, "arch_of", lambda device: 0)
    change, message = WRONG[case]
    given = arguments()
    with pytest.raises(ArgumentError, match=message):
        grouped_gate_up(**{**given, **change(given)})


def test_down_names_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(halves=1)
    del given["top_k"], given["activation"]
    h = given.pop("x")
    with pytest.raises(ArgumentError, match=r"grouped_down: h: found 5 rows for 10 sorted rows"):
        grouped_down(h, **given)


def test_too_large_a_matrix_is_refused() -> None:
    given = arguments("fp16")
    huge = torch.empty(3, 2, 2**16, 2**16, dtype=torch.float16, device="meta")
    weights = replace(given["weights"], n=2**16, k=2**16, tensors={"weight": huge}, bias=None)
    x = torch.empty(5, 2**16, dtype=torch.float16, device="meta")
    with pytest.raises(ArgumentError, match=r"65536 x 65536 elements a matrix; expected at most 2147483647"):
        grouped_gate_up(**{**given, "weights": weights, "x": x})


def test_the_cpu_without_interpreter_is_no_machine_for_kernels() -> None:
    with pytest.raises(UnavailableError, match=r"tensors on cpu; expected an NVIDIA GPU.*reference"):
        arch_of(torch.device("cpu"))


@pytest.mark.parametrize(
    "name", ["bf16", "gptq4-g128", "gptq4-g64", "gptq4-g32", "gptq4-g48", "nvfp4", "fp8-block128x128"]
)
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_configs_follow_rows_and_groups(name: str, arch: int) -> None:
    fmt = WeightFormat.parse(name)
    chosen = [config_for(fmt, 2048, torch.bfloat16, arch, rows, 128) for rows in (8, 128, 2048, 4096, 131072)]
    assert [config.block_t for config in chosen] == [16, 16, 32, 64, 128]
    run = {"gptq4-g128": 128, "gptq4-g64": 64, "fp8-block128x128": 128}.get(name)
    for config, _ in all_configs(fmt, 2048, torch.bfloat16, arch):
        assert config.scale_on_sum == (run is not None and config.block_t <= 64)
        assert not config.scale_on_sum or (run is not None and run % config.block_k == 0)
        assert config.smallest_t is None or config.block_t // config.smallest_t in (2, 4)
    for fused in (False, True):
        pinned = pinned_config(fmt, 2048, torch.bfloat16, arch, fused)
        of_tables = [
            (replace(config, smallest_t=None), f) for config, f in all_configs(fmt, 2048, torch.bfloat16, arch)
        ]
        assert (pinned, fused) in of_tables
        assert pinned.smallest_t is None


@pytest.mark.parametrize("arch", [80, 90])
def test_fused_and_unfused_scale_the_same_sums(arch: int) -> None:
    """Steps that are summed by themselves are equally long, so that the bits are equal."""
    names = ("gptq4-g128", "gptq4-g64", "gptq3-g128", "fp8-block128x128")
    for name, w8a8 in [(name, False) for name in names] + [("fp8-block128x128", True), ("fp8-block64x64", True)]:
        for rows in (8, 2048, 4096):
            fmt = WeightFormat.parse(name)
            unfused, fused = (
                config_for(fmt, 2048, torch.bfloat16, arch, rows, 128, fused, w8a8) for fused in (False, True)
            )
            assert (unfused.block_k, unfused.scale_on_sum, unfused.block_t) == (fused.block_k, True, fused.block_t)


def test_configs_of_8_bit_activations() -> None:
    fmt = WeightFormat.parse("fp8-block128x128")
    chosen = [config_for(fmt, 2048, torch.bfloat16, 90, rows, 128, w8a8=True) for rows in (8, 2048, 8192, 32768)]
    assert [config.block_t for config in chosen] == [16, 32, 64, 128]
    assert all(config.scale_on_sum and config.block_k == 128 for config in chosen)
    assert config_for(WeightFormat.parse("fp8-block64x64"), 2048, torch.bfloat16, 90, 8, 8, w8a8=True).block_k == 64


def test_fp32_activations_have_one_config() -> None:
    for rows in (1, 10**6):
        assert config_for(WeightFormat.parse("nvfp4"), 2048, torch.float32, 90, rows, 8).block_t == 16
