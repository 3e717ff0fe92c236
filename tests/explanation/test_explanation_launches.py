"""launches: the configs that layers run with, in the order of their steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fanfold import explain
from fanfold.explanation.layer import explain_job
from fanfold.kernels.combine.config import columns
from fanfold.kernels.grouped.configs import config_for
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.kernels.lora.config import config_for as fold_config_for
from fanfold.kernels.lora.sizes import FEW_ROWS, row_tile
from fanfold.spec import ExpertShape, WeightFormat
from fanfold.spec.job import LayerJob
from fanfold.spec.launch import LaunchConfig
from user_tables import H200, user_folder, write

QWEN = 128, 2048, 768


def steps(answer: dict[str, Any]) -> list[str]:
    return [step["step"] for step in answer["launches"]]


def step(answer: dict[str, Any], name: str) -> dict[str, Any]:
    return next(step for step in answer["launches"] if step["step"] == name)


def test_layers_of_the_table_run_with_its_rows_and_have_its_times() -> None:
    for row in read_table():
        name = "gptq4-g128" if row.format == "int4" else row.format
        shape = row.experts, row.hidden, row.intermediate
        found = explain(shape, name, 90, row.tokens * row.top_k, row.top_k)
        assert steps(found) == ["plan", "gate_up", "down", "sum"][row.tokens == 1 :]
        for projection, config in (("gate_up", row.gate_up), ("down", row.down)):
            ran = step(found, projection)
            assert (ran["config"], ran["from"], ran["changed"]) == (config.name, config.name, [])
            assert ran["settings"]["chained"] == row.chained
        assert found["expected_us"] == row.us
        assert found["table"]["same_layer"]
        assert (found["table"]["tokens"], found["table"]["run"]) == (row.tokens, row.run)
        assert found["uniform"]["floor_us"] < row.us["layer"]


@pytest.mark.parametrize(
    ("name", "tokens", "top_k", "adapters"),
    [
        ("gptq4-g128", 17, 8, 0),  # another number of tokens
        ("gptq4-g128", 16, 4, 0),  # another layer
        ("gptq4-g128", 16, 8, 1),
        ("gptq4-g64", 16, 8, 0),
        ("gptq4-g128-actorder", 16, 8, 0),
        ("mxfp4", 16, 8, 0),
    ],
)
def test_no_time_is_expected_of_what_was_not_measured(name: str, tokens: int, top_k: int, adapters: int) -> None:
    found = explain(QWEN, name, 90, tokens * top_k, top_k, adapters)
    assert found["chosen"] == "grouped_int4_sm90"
    assert found["expected_us"] is None


def test_a_config_that_does_not_fit_says_why() -> None:
    """Of the nearest layer, K of down in steps of 256: 192 inputs of down, padded to 256, have no two of them."""
    found = explain((128, 2048, 192), "gptq4-g64", 90, 128, 8)
    assert not found["table"]["same_layer"]
    down = step(found, "down")
    assert down["config"] != down["from"]
    assert "at least two steps of block_k" in down["changed"]


def test_adapters_leave_the_products_as_they_are() -> None:
    """So rows of the base have the bits of a layer without a pool."""
    for shape, name in (((8, 4096, 14336), "gptq4-g128"), (QWEN, "bf16")):
        alone, adapted = (explain(shape, name, 90, 2, 2, adapters) for adapters in (0, 3))
        for product in ("gate_up", "down"):
            assert step(adapted, product) == step(alone, product)


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("name", ["bf16", "gptq3-g128", "fp8-block128x128", "gptq8-g32-actorder"])
@pytest.mark.parametrize(("tokens", "top_k", "adapters"), [(1, 8, 0), (50, 8, 0), (3000, 4, 0), (300, 8, 2)])
def test_the_portable_product(name: str, arch: int, tokens: int, top_k: int, adapters: int) -> None:
    found = explain(QWEN, name, arch, tokens * top_k, top_k, adapters)
    assert found["chosen"] == "grouped"
    fmt = WeightFormat.parse(name.removesuffix("-actorder"))  # sorted when loaded
    for projection, k, fused in (("gate_up", 2048, True), ("down", 768, False)):
        wanted = config_for(fmt, k, torch.bfloat16, arch, tokens * top_k, 128, fused)
        assert step(found, projection)["config"] == wanted.name
        memory = "227 KiB" if arch == 90 else "99 KiB"
        family = "dense" if name == "bf16" else "packed"
        assert step(found, projection)["from"].startswith(f"configs.py, {memory}: {family}, ")
    assert ("order of x" in steps(found)) == ("order of h" in steps(found)) == (fmt.name != name)
    assert step(found, "sum")["settings"] == {"columns": columns(tokens)}
    assert found["table"] is None


def test_a_single_token_folds_in_the_product() -> None:
    """Down only where K is in one part, as in no row of int4 with one token."""
    assert step(explain(QWEN, "gptq4-g128", 90, 8, 8), "down")["settings"]["parts"] == 3
    found = explain(QWEN, "gptq4-g128", 90, 8, 8, adapters=3)
    assert steps(found) == ["gate_up shrink", "gate_up", "down", "down fold", "sum"]
    found = explain(QWEN, "nvfp4", 90, 8, 8, adapters=3, rank=100)
    assert steps(found) == ["gate_up shrink", "gate_up", "down shrink", "down", "sum"]
    assert step(found, "down shrink")["config"] == step(found, "gate_up shrink")["config"]


def test_steps_with_adapters() -> None:
    few = explain(QWEN, "gptq4-g128-actorder", 90, FEW_ROWS, 8, 4, rank=32)
    wanted = ["plan", "order of x", "gate_up", "gate_up fold", "down", "down fold", "sum"]
    assert steps(few) == wanted
    many = explain(QWEN, "bf16", 90, 8 * FEW_ROWS, 8, 4, rank=64)
    between = ["gate_up", "gate_up shrink", "gate_up expand", "down", "down shrink", "down expand"]
    assert steps(many) == ["plan", "adapter plan", *between, "sum"]
    assert steps(explain(QWEN, "bf16", 90, 8, 8, 4)) == ["gate_up", "gate_up fold", "down", "down fold", "sum"]
    for answer, name, tile, rank in (
        (few, "gate_up fold", 8, 32),
        (many, "down expand", row_tile(8 * FEW_ROWS, 128, 4), 64),
    ):
        settings = dict(step(answer, name)["settings"])
        assert settings.pop("tile") == tile
        assert settings == vars(fold_config_for(rank, tile, torch.bfloat16, 90))


def test_nothing_is_launched() -> None:
    assert explain(QWEN, "bf16", "cpu", 8)["launches"] == []
    assert explain(QWEN, "bf16", 90, 0)["launches"] == []
    old = explain(QWEN, "bf16", 70, 8)
    assert (old["chosen"], old["launches"]) == (None, [])


def test_activations_in_another_format_are_made_before_each_product() -> None:
    fmt = WeightFormat.parse("fp8-channel")
    job = LayerJob(ExpertShape(*QWEN), fmt, fmt, "silu", torch.bfloat16, "fp8")
    found = explain_job(job, 90, 16, 8)
    assert steps(found) == ["plan", "x to fp8", "gate_up", "h to fp8", "down", "sum"]
    config = config_for(fmt, 2048, torch.bfloat16, 90, 128, 128, fused=True, w8a8=True)
    assert step(found, "gate_up")["config"] == config.name
    assert "w8a8" in step(found, "gate_up")["from"]
    assert step(found, "x to fp8")["kernel"] == "kernels/grouped/quantize"
    nvfp4 = replace(job, gate_up=WeightFormat.parse("nvfp4"), down=WeightFormat.parse("nvfp4"))
    row = next(row for row in read_table() if row.format == "nvfp4")
    shape = ExpertShape(row.experts, row.hidden, row.intermediate)
    for activations, expected in (("plain", row.us), ("nvfp4", None)):
        asked = replace(nvfp4, shape=shape, activation_format=activations)
        assert explain_job(asked, 90, row.tokens, row.top_k)["expected_us"] == expected


def test_the_users_tables(tmp_path: Path) -> None:
    """A row of the portable product, and the time that it was measured at."""
    up, down = LaunchConfig(32, 64, 16, 4, 3, False, 16), LaunchConfig(64, 64, 16, 4, 3, False, 16)
    before = explain(QWEN, "fp8-channel", 90, 128, 8)
    with user_folder(tmp_path):
        path = write("grouped", ("fp8-channel", 128, 8, 2048, 768, 16), up, down)
        found = explain(QWEN, "fp8-channel", 90, 128, 8)
        assert [step(found, name)["config"] for name in ("gate_up", "down")] == [up.name, down.name]
        assert step(found, "down")["from"] == down.name
        about = {"table": "grouped.json", "path": str(path), "gpu": H200, "tokens": 16, "run": 0, "same_layer": True}
        assert about.items() <= found["table"].items()
        assert found["expected_us"] == {"layer": 12.5, "floor": 4.0}
        for other in ({"arch": 89}, {"adapters": 1}, {"rows": 256}):
            assert explain(QWEN, "fp8-channel", **{"arch": 90, "rows": 128, "top_k": 8, **other})["expected_us"] is None
    assert explain(QWEN, "fp8-channel", 90, 128, 8) == before
