"""Adapters of experts over ranks: each rank reads and holds its own pairs; the pool acts on all ranks or on none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from distributed_jobs import adapted, adapted_batch, adapted_model, pool_steps
from ranks import Ranks

import fanfold
from fanfold.lora.files import opened
from samples import GOLDEN, logits, sample

BASE = "gptqmodel_qwen3moe_w4_g32"
ADAPTERS = {
    "single": GOLDEN / "peft_v4_qwen3moe_per_expert",
    "fused": GOLDEN / "peft_qwen3moe_target_parameters",
}
NAMES: list[str | None] = ["fused", None, "single", "fused", None]


def single(names: list[list[str | None]]) -> tuple[list[torch.Tensor], dict[str, int]]:
    """What one process makes of each list, and how many pairs it holds of the last adapter."""
    experts = fanfold.load_experts(sample(BASE), 1)
    pool = fanfold.AdapterPool(experts, slots=2)
    for name, folder in ADAPTERS.items():
        pool.load(name, folder)
    found: list[torch.Tensor] = []
    for rank, listed in enumerate(names):
        with pool.using(listed):
            found.append(experts(*adapted_batch(experts.shape, experts.dtype, len(listed), rank)))
    return found, cast("dict[str, int]", pool.info()[-1]["targets"])


def test_mixed_adapters_have_the_bits_of_one_process(ranks: Ranks) -> None:
    expected, pairs = single([NAMES])
    (base,), _ = single([[None] * len(NAMES)])
    assert (expected[0] != base).any(1).tolist() == [name is not None for name in NAMES]
    found = ranks.run(adapted, sample(BASE), ADAPTERS, [NAMES], {})
    assert all(torch.equal(y, expected[0]) for y, _, _ in found)
    assert pairs["gate"] == 8
    for kind, number in pairs.items():
        assert [here[kind] for _, _, here in found] == [number // ranks.size] * ranks.size


@pytest.mark.parametrize("plan", [{}, {"bound": 40}], ids=["exact sizes", "bound"])
def test_the_adapter_of_a_token_travels_with_it(plan: dict[str, Any], ranks: Ranks) -> None:
    lists: list[list[str | None]] = [NAMES, ["single"] * 3, [], [None, "fused"]][: ranks.size]
    expected, _ = single(lists)
    found = ranks.run(adapted, sample(BASE), ADAPTERS, lists, {"exchange": "all_to_all", **plan})
    for rank, (y, _, _) in enumerate(found):
        assert torch.equal(y, expected[rank])


def test_a_rank_reads_the_pairs_of_its_experts_alone(ranks: Ranks) -> None:
    adapters = dict(reversed(ADAPTERS.items()))
    with opened(adapters["single"]) as file:
        layer = sum(tensor.nbytes for name, tensor in file.tensors.items() if "layers.1.mlp.experts" in name)
    for _, read, _ in ranks.run(adapted, sample(BASE), adapters, [NAMES], {}):
        assert read == layer / ranks.size


def test_a_whole_model_with_adapters(ranks_of: Callable[[int], Ranks]) -> None:
    path = sample("gptq-int4")
    adapters = {"shout": path.parent / "adapter-shout", "python": path.parent / "adapter-python"}
    tokens = torch.arange(18).view(3, 6) + 40
    model = fanfold.load_model(path)
    for name, folder in adapters.items():
        model.adapters.load(name, folder)
    names = ["python", None, "shout"]
    with model.adapters.using(names):
        expected = logits(model, tokens)
    for found in ranks_of(2).run(adapted_model, path, adapters, names, tokens):
        assert torch.equal(found, expected)


def test_all_ranks_load_or_none(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    adapter = ADAPTERS["single"]
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    weights = bytearray((other / "adapter_model.safetensors").read_bytes())
    weights[-2] ^= 1
    (other / "adapter_model.safetensors").write_bytes(weights)
    zero, one = ranks_of(2).run(pool_steps, sample(BASE), adapter, {1: other, 2: ADAPTERS["fused"]})
    for said in (zero, one):
        assert said[0].startswith("RankError: rank 0: ")  # other files
        assert said[0].endswith(": []")
        assert said[1] == "RankError: rank 0: load adapter 'a'; rank 1: load adapter 'b': []"
        assert said[2] == "done: ['a']"
        assert said[5:7] == ["[0]", "True"]  # nothing in the slot that one rank could fill, and the old pairs
        assert said[7:9] == ["done: ['a']", "False"]
        assert said[10] == "done: []"
    cause = "DeviceMemoryError: device: found no room; expected room. Free some."
    assert zero[3:5] == [f"RankError: rank 1 failed: {cause}: ['a']"] * 2
    assert one[3:5] == ["DeviceMemoryError: no room: ['a']"] * 2
    assert zero[9].startswith("RankError: rank 1 failed: AdapterBusyError")
    assert one[9] == "AdapterBusyError: a using block that runs with it: ['a']"
