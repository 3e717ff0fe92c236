"""The user's tables for the portable product: which rows count, and that they change no more than speed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fanfold.errors import ConfigError
from fanfold.kernels.grouped.configs import config_for, pinned_config
from fanfold.kernels.grouped.tuned import GroupedConfigs, layer_configs, read_table
from fanfold.layers.reference import layer
from fanfold.spec import ExpertShape, WeightFormat
from fanfold.spec.launch import LaunchConfig
from graphs import dirty_memory, same_bits
from samples import SILU, numbers, on, random_experts, random_routing, relative_error
from user_tables import user_folder, write

INT4, SHAPE = WeightFormat.parse("gptq4-g128"), ExpertShape(64, 1024, 512)
UP, DOWN = LaunchConfig(32, 32, 32, 4, 2, False, 8), LaunchConfig(64, 32, 32, 8, 2, False, 32)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with user_folder(tmp_path):
        yield tmp_path


def configs(tokens: int = 16, fmt: WeightFormat = INT4, **options: Any) -> GroupedConfigs:
    named: dict[str, Any] = {"shape": SHAPE, "dtype": torch.bfloat16, "arch": 90, "top_k": 4, **options}
    return layer_configs(fmt, fmt, tokens=tokens, **named)


def analytic(fmt: WeightFormat, k: int, rows: int, fused: bool, **options: Any) -> LaunchConfig:
    return config_for(fmt, k, torch.bfloat16, 90, rows, SHAPE.num_experts, fused, **options)


def test_without_a_table_configs_are_analytic(folder: Path) -> None:
    found = configs()
    assert found == GroupedConfigs(analytic(INT4, 1024, 64, True), analytic(INT4, 512, 64, False), None)


def test_a_row_serves_four_times_more_tokens_or_fewer(folder: Path) -> None:
    path = write("grouped", ("gptq4-g128", 64, 4, 1024, 512, 16), UP, DOWN)
    other = LaunchConfig(32, 64, 16, 4, 2, False, 16)
    write("grouped", ("gptq4-g128", 64, 4, 1024, 512, 64), other, other)
    for tokens, up in ((4, UP), (16, UP), (31, UP), (33, other), (256, other)):
        assert configs(tokens).gate_up == up
    found = configs()
    assert found.down == DOWN
    assert found.row is not None
    assert (found.row.header.path, found.row.us) == (path, {"layer": 12.5, "floor": 4.0})
    for tokens in (0, 3, 257):
        assert configs(tokens).row is None


def test_a_row_is_for_one_layer_format_and_gpu(folder: Path) -> None:
    write("grouped", ("gptq4-g128", 64, 4, 1024, 512, 16), UP, DOWN)
    assert configs(gpu="NVIDIA H200").row is not None
    assert configs(fmt=WeightFormat.parse("gptq4-g128-actorder")).row is not None  # sorted by group at load
    others: list[dict[str, Any]] = [
        {"gpu": "NVIDIA H100"},
        {"arch": 89},
        {"top_k": 2},
        {"shape": ExpertShape(64, 512, 1024)},
        {"shape": ExpertShape(64, 1024, 512, gated=False)},
        {"fmt": WeightFormat.parse("gptq4-g64")},
        {"dtype": torch.float32},
        {"w8a8": True, "fmt": WeightFormat.parse("fp8-channel")},
    ]
    write("grouped", ("fp8-channel", 64, 4, 1024, 512, 16), UP, DOWN)
    for other in others:
        assert configs(**other).row is None, other


def test_pinned_configs_ask_no_table(folder: Path) -> None:
    before = configs(pinned=True)
    write("grouped", ("gptq4-g128", 64, 4, 1024, 512, 16), UP, DOWN)
    assert configs(pinned=True) == before
    assert before.gate_up == pinned_config(INT4, 1024, torch.bfloat16, 90, fused=True)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a field short": (lambda row: row.pop("us"), r"layers\[0\]: found fields"),
    "two tiles": (lambda row: row["down"].update(block_t=16, smallest_t=16), r"down.block_t: found 16; expected 32"),
    "no power of two": (lambda row: row["down"].update(block_n=48), r"down: LaunchConfig.block_n: found 48"),
    "no experts": (lambda row: row.update(experts=0), r"layers\[0\].experts: found 0"),
    "a time of text": (lambda row: row["us"].update(layer="1"), r"us.layer: found '1'; expected float"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_is_none(case: str, folder: Path) -> None:
    path = write("grouped", ("gptq4-g128", 64, 4, 1024, 512, 16), UP, DOWN)
    table = json.loads(path.read_text())
    change, message = WRONG[case]
    change(table["layers"][0])
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=message):
        read_table(path)


@pytest.mark.parametrize("name", ["fp16", "gptq4-g32"])
def test_a_table_changes_results_within_tolerance_alone(
    name: str, device: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And in batch-invariant mode not a bit; a line says what is missing until the table is there."""
    from fanfold.kernels.common.device import arch_of, gpu_name
    from fanfold.layers.implementations.grouped import Grouped

    weights = random_experts(name, 4, 64, 32)
    x, (ids, scores) = numbers(5, 64, dtype=torch.float16), random_routing(5, 2, 4)
    given = [part.to(device) for part in (x, ids, scores)]
    where = torch.device(device)

    def outputs() -> list[torch.Tensor]:
        made = [Grouped.prepared(on(weights, device), SILU, pinned, "plain") for pinned in (False, True)]
        dirty_memory(device)
        return [one.run(*given) for one in made]

    with caplog.at_level(logging.INFO, "fanfold"):
        before = outputs()
    assert [f"--shape 4,2,64,32 --format {name}`" in record.getMessage() for record in caplog.records] == [True]
    up, down = LaunchConfig(16, 16, 32, 4, 1, False, 16), LaunchConfig(32, 16, 32, 4, 2, False, 32)
    write("grouped", (name, 4, 2, 64, 32, 8), up, down, gpu_name(where), f"sm_{arch_of(where)}")
    after = outputs()
    exact = layer(x.float(), ids, scores, weights, SILU)
    plain = layer(x, ids, scores, weights, SILU)
    assert relative_error(after[0].cpu(), exact) < 2 * relative_error(plain, exact)
    gpu, fmt = gpu_name(where), weights.down.format
    shape = {"shape": weights.shape, "top_k": 2, "tokens": 5}
    used = layer_configs(fmt, fmt, **shape, dtype=torch.float16, arch=arch_of(where), gpu=gpu)
    assert (used.gate_up, used.down) == (up, down)
    assert same_bits(after[1], before[1])
    assert len(caplog.records) == 1
