"""Checkpoints over ranks: each reads its own experts, packed as they lie on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed_jobs import generate_own, load_layer, load_whole
from ranks import Ranks

import fanfold
from fanfold.distributed import ExpertPlan, Placement, load_experts
from fanfold.distributed.digest import SAMPLE, SAMPLES, digest
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.formats.checkpoint import Checkpoint
from samples import logits, numbers, random_routing, sample

LAYERS = ["gptqmodel_qwen3moe_w4_g32_descact", "ct_qwen3moe_nvfp4", "native_gptoss_mxfp4"]
JSON = 20_000
"""Bytes of config files, some of them read twice."""


def header_bytes(path: Path) -> int:
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors"))


def beside_tensors(path: Path) -> int:
    """What every rank reads beside tensors: headers, samples for the digest, configs."""
    return header_bytes(path) + (len(list(path.glob("*.safetensors"))) + 1) * SAMPLES * SAMPLE + JSON


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bits_of_one_process_and_a_rank_reads_its_share(name: str, ranks: Ranks) -> None:
    path = sample(name)
    whole = fanfold.load_experts(path, 1)
    count = whole.shape.num_experts
    expected = whole(numbers(3, whole.shape.hidden).to(whole.dtype), *random_routing(3, 2, count))
    checkpoint = Checkpoint(path)
    experts = sum(checkpoint.files.infos[tensor].nbytes for tensor in checkpoint.layer(1).names())
    for y, read, held in ranks.run(load_layer, path, {}):
        assert torch.equal(y, expected)
        assert held == count // ranks.size
        assert read <= experts / ranks.size + beside_tensors(path)


def test_a_model_has_the_logits_of_one_process_and_a_rank_reads_its_share(ranks: Ranks) -> None:
    path = sample("gptq-int4")
    tokens = torch.arange(12).view(2, 6) + 40
    expected = logits(fanfold.load_model(path), tokens)
    checkpoint = Checkpoint(path)
    rest = sum(info.nbytes for info in checkpoint.files.infos.values()) - checkpoint.expert_bytes()
    assert checkpoint.expert_bytes() / 2 > 1_000_000 > JSON
    for found, read, formats in ranks.run(load_whole, path, tokens, ranks.size == 4):
        assert torch.equal(found, expected)
        assert read <= checkpoint.expert_bytes() / ranks.size + rest + beside_tensors(path)
        assert formats == ["gptq4-g128-v1"] * 4


def test_a_placement_of_ones_own(ranks_of: Callable[[int], Ranks]) -> None:
    path = sample("ct_qwen3moe_nvfp4")
    whole = fanfold.load_experts(path, 1)
    expected = whole(numbers(3, whole.shape.hidden).to(whole.dtype), *random_routing(3, 2, 8))
    plan = {"placements": {1: Placement(((7, 0, 3), (1, 2, 4, 5, 6, 0)))}}
    found = ranks_of(2).run(load_layer, path, plan)
    assert [held for _, _, held in found] == [3, 6]
    assert all(torch.equal(y, expected) for y, _, _ in found)


@pytest.mark.parametrize(
    ("placements", "found"),
    [({}, "none"), ({1: Placement.even(8, 4)}, "8 experts on 4 ranks"), ({1: Placement.even(6, 2)}, "6 experts")],
)
def test_a_plan_that_does_not_fit(placements: dict[int, Placement], found: str) -> None:
    with pytest.raises(ArgumentError, match=f"layer 1: found {found}"):
        ExpertPlan(placements=placements).placement(1, 8, 2)


def test_without_a_process_group() -> None:
    with pytest.raises(UnavailableError, match="init_process_group") as caught:
        load_experts(sample("ct_qwen3moe_nvfp4"))
    assert "torchrun" in caught.value.next_step


def test_copies_have_one_digest_and_another_value_another(tmp_path: Path) -> None:
    file = tmp_path / "a" / "w"
    file.parent.mkdir()
    file.write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "b").mkdir()
    copy = Path(shutil.copy(file, tmp_path / "b" / "w"))
    assert digest([file]) == digest([copy])
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    copy.write_bytes(changed)
    assert digest([file]) != digest([copy])
    copy.write_bytes(changed[:-1])
    assert len({digest([file]), digest([copy]), digest([tmp_path / "none"]), digest([])}) == 4


def test_ranks_generate_from_prompts_of_their_own_until_the_last_has_ended(ranks_of: Callable[[int], Ranks]) -> None:
    path = sample("gptq-int4")
    prompts, lengths = [torch.arange(40, 46)[None], torch.arange(50, 58).view(2, 4)], [2, 5]
    found = ranks_of(2).run(generate_own, path, prompts, lengths)
    model = fanfold.load_model(path)
    for tokens, prompt, length in zip(found, prompts, lengths, strict=True):
        alone = model.generate(prompt, max_new_tokens=length, do_sample=False)
        assert torch.equal(tokens[:, : alone.shape[1]], alone)
