"""Cells: what they hold, what their values are, and that what is wrong has no time."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from broken import BaseExperts, ScaledExperts

from fanfold.bench import race, run, timing
from fanfold.bench.batches import Routing
from fanfold.bench.cell import Cell, Settings
from fanfold.bench.jobs import LAYERS, layer_shape, weight_formats
from fanfold.bench.run import bench
from fanfold.errors import ArgumentError

README = Path(__file__).parents[2] / "benchmarks" / "README.md"
CPU = torch.device("cpu")
H, I = 64, 32  # noqa: E741
WEIGHTS = 3 * H * I // 2 + 3 * H * I // 32 * 2  # bytes of an expert of gptq4-g32: codes, and fp16 scales


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPLAYS", 5)


def cells(
    formats: Sequence[str] = ("gptq4-g32",),
    tokens: Sequence[int] = (1, 3),
    shapes: Sequence[str] = (f"8,2,{H},{I}",),
    settings: Settings | None = None,
) -> list[Cell]:
    settings = settings or Settings(CPU)
    named = [fmt for name in formats for fmt in weight_formats(name)]
    return list(bench([layer_shape(name) for name in shapes], named, tokens, settings))


def test_one_row() -> None:
    row = cells(tokens=[3])[0].row()
    expected = {
        "schema": 3,
        "shape": "8,2,64,32",
        "experts": 8,
        "top_k": 2,
        "hidden": H,
        "intermediate": I,
        "activation": "silu",
        "bias": False,
        "format": "gptq4-g32",
        "tokens": 3,
        "routing": "uniform",
        "dtype": "bfloat16",
        "seed": 0,
        "adapters": 0,
        "rank": None,
        "popularity": None,
        "adapter_bytes": 0,
        "device": "cpu",
        "implementation": "reference",
        "timing": "calls",
        "copies": 1,
        "calls": 6,
        "replays": 5,
        "floor_us": None,
        "over_floor": None,
        "flops": 2 * 3 * 2 * 3 * H * I,
        "refused": None,
    }
    assert {name: row[name] for name in expected} == expected
    assert 2 <= row["experts_met"] <= 6
    assert 8 / 6 <= row["load"] <= 8 / 2  # 1 to 3 of 6 rows, of 8 experts
    assert row["weight_bytes"] == pytest.approx(WEIGHTS * row["experts_met"])
    assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
    assert row["teraflops"] == pytest.approx(row["flops"] / row["median_us"] * 1e-6)
    assert row["gigabytes_per_second"] == pytest.approx(row["weight_bytes"] / row["median_us"] * 1e-3)
    assert 1e-3 < row["error"] < 2 * row["plain_error"]


def test_the_readme_tells_every_field() -> None:
    text = README.read_text()
    assert [name for name in cells(tokens=[1])[0].row() if f"`{name}`" not in text] == []


def test_order_and_progress() -> None:
    seen: list[tuple[int, int, str]] = []
    shapes = [layer_shape("4,1,64,32"), layer_shape("8,2,64,32")]
    formats = weight_formats("bf16") + weight_formats("nvfp4")
    found = list(bench(shapes, formats, [2, 1], Settings(CPU), lambda *step: seen.append(step)))
    order = [(cell.shape.name, cell.format.name, cell.tokens) for cell in found]
    assert order == [(s.name, f.name, t) for s in shapes for f in formats for t in (2, 1)]
    assert [done for done, _, _ in seen] == list(range(8))
    assert seen[3] == (3, 8, "4,1,64,32 nvfp4 1 tokens")


@pytest.mark.parametrize("routing", ["uniform", "balanced", "power", "hot"])
def test_routings(routing: Routing) -> None:
    (cell,) = cells(tokens=[16], settings=Settings(CPU, routing))
    assert cell.row()["routing"] == routing
    assert cell.times is not None
    if routing == "balanced":
        assert cell.experts_met == 8


def test_adapters() -> None:
    """Three pairs of an expert, of rank 4 stored as 8: 6 * (H + I) * 8 bytes each."""
    (cell,) = cells(tokens=[6], settings=Settings(CPU, adapters=2, rank=4, popularity="identical"))
    row = cell.row()
    assert (row["adapters"], row["rank"], row["popularity"]) == (2, 4, "identical")
    assert cell.experts_met is not None  # all tokens have one adapter: a pair an expert
    assert cell.adapter_bytes == pytest.approx(cell.experts_met * 6 * (H + I) * 8)
    assert cell.flops == 6 * 2 * (2 * 3 * H * I + 2 * 3 * (H + I) * 4)
    assert row["gigabytes_per_second"] == pytest.approx(
        (row["weight_bytes"] + row["adapter_bytes"]) / row["median_us"] * 1e-3
    )
    (base,) = cells(tokens=[6], settings=Settings(CPU, adapters=2, rank=4, popularity="none"))
    (without,) = cells(tokens=[6])
    assert (base.adapter_bytes, base.flops) == (0, without.flops)
    assert cell.check is not None
    assert without.check is not None
    assert cell.check.error != without.check.error


def test_a_layer_that_leaves_out_adapters_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Experts", BaseExperts)
    (cell,) = cells(tokens=[6], settings=Settings(CPU, adapters=2, rank=4))
    assert cell.times is None
    assert cell.refused is not None
    assert "relative error" in cell.refused


def test_what_is_wrong_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is 0.6 % off is run, checked, and never timed."""
    monkeypatch.setattr(run, "Experts", ScaledExperts)
    monkeypatch.setattr(race, "call_times", lambda _: pytest.fail("timed"))
    (cell,) = cells(tokens=[40])
    assert cell.times is None
    assert cell.refused is not None
    assert cell.refused.startswith("wrong: norm off by")
    row = cell.row()
    for name in ("median_us", "p20_us", "p80_us", "over_floor", "teraflops", "gigabytes_per_second"):
        assert row[name] is None
    assert row["norm_off"] > row["plain_error"]


def test_what_a_format_cannot_hold_is_refused_and_the_rest_runs() -> None:
    found = cells(["gptq4-g32", "nvfp4", "bf16"], [1, 2], ["4,2,64,20"])
    refused = [cell.refused for cell in found]
    assert refused[4:] == [None, None]
    assert all(reason is not None and "K = 20" in reason for reason in refused[:4])
    assert found[0].row()["implementation"] is None
    assert found[4].times is not None


def test_unknown_implementation() -> None:
    with pytest.raises(ArgumentError, match="implementation"):
        cells(settings=Settings(CPU, implementation="fast"))


@pytest.mark.parametrize(
    ("gpu", "tokens", "floor"),
    [
        # 8 rows at most of 128 experts, all others idle: 8 of 2.5 MB at 4.4 TB/s
        ("NVIDIA H200", 1, 8 * 3 * 2048 * 768 * (0.5 + 2 / 128) / 4.4e6),
        # 4096 tokens: 2 * 4096 * 8 * 3 * 2048 * 768 operations at 770 TF/s
        ("NVIDIA H200", 4096, 2 * 4096 * 8 * 3 * 2048 * 768 / 770e6),
        ("NVIDIA H100", 1, None),
    ],
)
def test_floors(monkeypatch: pytest.MonkeyPatch, gpu: str, tokens: int, floor: float | None) -> None:
    """Of the experts that a batch meets, on the GPU whose rates are known."""
    monkeypatch.setattr(run, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    shape = LAYERS["qwen3-30b"]
    (fmt,) = weight_formats("gptq4-g128")
    cell = Cell(shape, fmt, tokens, Settings(CPU))
    batches = [run.random_batch(shape, tokens, "uniform", torch.bfloat16, CPU, seed) for seed in range(2)]
    found = run.work(cell, batches)
    assert found["floor_us"] == (None if floor is None else pytest.approx(floor))
    assert found["experts_met"] == min(128, 8 * tokens)


@pytest.mark.parametrize(
    ("name", "tokens", "copies"),
    [
        ("qwen3-30b", 1, 12),  # 19.5 MB a call: 11 others make 214 MB
        ("qwen3-30b", 4096, 3),
        ("mixtral-8x7b", 1, 3),
        ("8,2,64,32", 1, 16),  # no number of copies would do
    ],
)
def test_copies_keep_weights_out_of_the_cache(name: str, tokens: int, copies: int) -> None:
    (fmt,) = weight_formats("gptq4-g128" if "-" in name else "gptq4-g32")
    assert run.copies_needed(layer_shape(name), fmt, tokens) == copies


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gptq4-g128", "bf16"])
def test_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(torch.device("cuda", 0))
    found = cells([name], [1, 64], ["16,4,1024,512"], settings)
    for cell in found:
        assert cell.refused is None
        assert cell.implementation not in (None, "reference")
        assert (cell.copies, cell.calls) == (16, 16)
        assert cell.times is not None
        assert 1 < cell.times.median_us < 1e4
    with_adapters = Settings(torch.device("cuda", 0), adapters=3, rank=12)
    assert [cell.refused for cell in cells([name], [1, 64], ["16,4,1024,512"], with_adapters)] == [None, None]
    monkeypatch.setattr(run, "Experts", ScaledExperts)
    assert all(cell.times is None for cell in cells([name], [64], ["16,4,1024,512"], settings))
