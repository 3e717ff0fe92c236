"""Adapters read a site at a time: the right values, little memory, few copies; files that change meanwhile."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import CPU, EXPERTS, QUERY, FakeExperts, FakeSite, config, factors, names, sites, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fanfold.errors import CorruptFileError, FanfoldError, TensorError
from fanfold.lora import bind, read_adapter
from fanfold.lora.adapter import Projection, opened_adapter
from fanfold.lora.convert import convert
from fanfold.lora.files import FILE_NAME, opened
from fanfold.lora.prepare import prepare
from fanfold.spec import ExpertShape, LoraPair

SHAPE = ExpertShape(12, 6, 4)  # names sort as 0, 1, 10, 11, 2, ...
SIZES: dict[str, tuple[int, int]] = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}


def whole(layers: int, rank: int = 8) -> dict[str, Tensor]:
    """A pair for every expert and projection."""
    found: dict[str, Tensor] = {}
    for layer in range(layers):
        for expert in range(SHAPE.num_experts):
            for name, (inputs, outputs) in SIZES.items():
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                found |= factors(module, rank, inputs, outputs, seed=len(found))
    return found


class Copies(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, 8])
def test_a_site_at_a_time_gives_what_reading_everything_gives(tmp_path: Path, rank: int, dtype: torch.dtype) -> None:
    written = whole(5, rank)
    places = sites(5, SHAPE, {})
    for site in places.values():
        site.dtype = dtype
    path = write(tmp_path / "a", written, r=rank)
    found = prepare(path, places, 64)
    expected = {at: convert(pairs, places[at]) for at, pairs in bind(read_adapter(path), places).items()}
    assert found.keys() == expected.keys()
    for at, pairs in found.items():
        assert not isinstance(pairs, LoraPair)
        assert len(pairs) == 36
        for (projection, expert), pair in pairs.items():
            a, b = names(f"{at}.{expert}.{projection}_proj")
            assert torch.equal(pair.a, written[a].to(dtype))
            assert torch.equal(pair.b, written[b].to(dtype))
            assert torch.equal(pair.b, expected[at][projection, expert].b)


def test_fused_factors_are_taken_apart_as_they_are_read(tmp_path: Path) -> None:
    experts, rank = SHAPE.num_experts, 3
    written = factors(f"{EXPERTS}.base_layer", experts * rank, 6, 8) | factors(EXPERTS, experts * rank, 4, 6)
    path = write(
        tmp_path / "a", written, r=rank, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    place = FakeExperts(EXPERTS, shape=SHAPE)
    found, bound = prepare(path, {EXPERTS: place}, 64)[EXPERTS], bind(read_adapter(path), {EXPERTS: place})[EXPERTS]
    assert not isinstance(found, LoraPair)
    assert not isinstance(bound, LoraPair)
    assert found.keys() == bound.keys()
    for key, pair in bound.items():
        assert torch.equal(found[key].a, pair.a)
        assert torch.equal(found[key].b, pair.b)


def test_experts_of_a_projection_are_moved_by_one_copy(tmp_path: Path) -> None:
    place = FakeExperts(EXPERTS, shape=SHAPE)
    pairs = bind(read_adapter(write(tmp_path / "a", whole(1), r=8)), {EXPERTS: place})[EXPERTS]
    with Copies() as copies:
        convert(pairs, place)
    assert copies.seen["copy_"] == 6  # A and B of three projections


def test_pairs_with_gaps_between_them_are_all_moved() -> None:
    """Of 12 experts' A those of 0, 1, 2, 5, 6, 9: runs of 0 1 2, of 5 6, and 9."""
    a, b = torch.randn(12, 8, 6), torch.randn(12, 4, 8)
    pairs: dict[tuple[Projection, int], LoraPair] = {
        ("up", expert): LoraPair(a[expert], b[expert], 1.0) for expert in (9, 0, 5, 1, 6, 2)
    }
    found = convert(pairs, FakeSite(EXPERTS))
    assert not isinstance(found, LoraPair)
    assert list(found) == list(pairs)
    for (_, expert), pair in found.items():
        assert torch.equal(pair.a, a[expert])
        assert torch.equal(pair.b, b[expert])


def test_buffers_hold_a_site_each_and_are_used_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a", whole(5), r=8)
    with opened_adapter(path) as (adapter, file):
        seen: set[tuple[int, int]] = set()
        for pairs in bind(adapter, sites(5, SHAPE, {})).values():
            assert not isinstance(pairs, LoraPair)
            tensors = [tensor for pair in pairs.values() for tensor in (pair.a, pair.b)]
            storage = file.values(file.fetch(tensors, CPU), CPU)[0].untyped_storage()
            seen.add((storage.data_ptr(), storage.nbytes()))
    assert len(seen) == 2
    assert {nbytes for _, nbytes in seen} == {36 * 8 * (6 + 4) * 4}  # a fifth of the file


def test_tensors_that_lie_at_odd_places(tmp_path: Path) -> None:
    """The format lets an fp32 tensor begin at any byte."""
    first, second = torch.randn(1, 3).bfloat16(), torch.randn(5, 1)
    a, b = names(QUERY)
    header = {
        a: {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, 6]},
        b: {"dtype": "F32", "shape": [5, 1], "data_offsets": [6, 26]},
    }
    text = json.dumps(header).encode()
    data = first.view(torch.uint8).numpy().tobytes() + second.numpy().tobytes()
    (tmp_path / FILE_NAME).write_bytes(struct.pack("<Q", len(text)) + text + data)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config(r=1)))
    (target,) = read_adapter(tmp_path).targets
    assert torch.equal(target.a, first)
    assert torch.equal(target.b, second)


def change(file: Path, how: str) -> None:
    """As another process does that writes the adapter anew."""
    before = file.stat()
    with file.open("r+b") as opened_again:
        if how == "cut":
            opened_again.truncate(before.st_size - 400)
        else:
            opened_again.seek(before.st_size - 4)
            opened_again.write(struct.pack("<f", 0.5))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000))  # clocks of file systems are coarse


@pytest.mark.parametrize("how", ["written", "cut"])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, how: str, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", whole(2), r=8)
    calls: list[int] = []

    def slowly(pairs: Any, site: Any) -> Any:
        if len(calls) == turn:
            change(path / FILE_NAME, how)
        calls.append(1)
        return convert(pairs, site)

    monkeypatch.setattr("fanfold.lora.prepare.convert", slowly)
    with pytest.raises(CorruptFileError, match="a file that changed while it was read") as caught:
        prepare(path, sites(2, SHAPE, {}), 64)
    assert FILE_NAME in caught.value.what
    monkeypatch.setattr("fanfold.lora.prepare.convert", convert)
    if how == "written":
        assert len(prepare(path, sites(2, SHAPE, {}), 64)) == 2


def test_a_file_that_takes_the_place_of_an_open_one(tmp_path: Path) -> None:
    """Renaming is how to replace a file: what was opened stays whole."""
    path = write(tmp_path / "a", factors(QUERY, 2, 5, 3))
    other = write(tmp_path / "b", factors(QUERY, 2, 5, 3, seed=1))
    with opened(path) as file:
        (other / FILE_NAME).rename(path / FILE_NAME)
        read = file.read_apart(file.tensors.values())
        file.check_unchanged()
    for name, tensor in zip(file.tensors, read, strict=True):
        assert torch.equal(tensor, factors(QUERY, 2, 5, 3)[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_bad_tensor_of_a_site_is_named(tmp_path: Path, value: float) -> None:
    written = whole(2)
    bad = [names(f"model.layers.1.mlp.experts.{number}.up_proj")[1] for number in (10, 2)]
    for name in bad:
        written[name][0, 1:3] = value
    path = write(tmp_path / "a", written, r=8)
    with pytest.raises(TensorError, match=r"2 of 32 values NaN or inf") as caught:
        prepare(path, sites(2, SHAPE, {}), 64)
    assert caught.value.what.endswith(bad[0])
    with pytest.raises(FanfoldError, match=bad[0]):
        read_adapter(path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [3, 8])
def test_a_gpu_gets_what_a_cpu_gets(tmp_path: Path, rank: int, dtype: torch.dtype) -> None:
    path = write(tmp_path / "a", whole(2, rank), r=rank)
    on_cpu, on_gpu = sites(2, SHAPE, {}), sites(2, SHAPE, {})
    for site in (*on_cpu.values(), *on_gpu.values()):
        site.dtype = dtype
    for site in on_gpu.values():
        site.device = torch.device("cuda", 0)
    expected, found = prepare(path, on_cpu, 64), prepare(path, on_gpu, 64)
    for at, pairs in expected.items():
        assert not isinstance(pairs, LoraPair)
        for key, pair in pairs.items():
            other = found[at][key]
            assert other.a.is_cuda
            assert torch.equal(other.a.cpu(), pair.a)
            assert torch.equal(other.b.cpu(), pair.b)
            assert other.b.stride() == pair.b.stride()
