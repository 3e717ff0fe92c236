"""Some experts of a layer, read without a byte of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_checkpoints import same_bits, write_format

from fanfold import load_experts
from fanfold.errors import ArgumentError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.files import CheckpointFiles
from samples import GOLDEN, sample

CHECKPOINTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
SMALL = 64
"""Bytes that are read of experts that were not asked for: the sizes of pack-quantized matrices, 16 a matrix."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_chosen_experts_are_those_of_the_whole_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(sample(name))
    whole = checkpoint.read_experts(1)
    count = checkpoint.num_experts(1)
    assert count == whole.shape.num_experts
    read = [0]
    plain = CheckpointFiles.read

    def counting(files: CheckpointFiles, tensor: str, row: int | None = None) -> torch.Tensor:
        found = plain(files, tensor, row)
        read[0] += found.nbytes
        return found

    monkeypatch.setattr(CheckpointFiles, "read", counting)
    chosen = [count - 1, 0]
    some = checkpoint.read_experts(1, chosen)
    layer = sum(checkpoint.files.infos[name].nbytes for name in checkpoint.layer(1).names())
    assert read[0] <= layer * 2 / count + SMALL * count
    assert some.shape.num_experts == 2
    for found, expected in ((some.gate_up, whole.gate_up), (some.down, whole.down)):
        assert (found.n, found.k, found.activations) == (expected.n, expected.k, expected.activations)
        for field, tensor in found.tensors.items():
            assert same_bits(tensor, expected.tensors[field][chosen])
        assert set(expected.tensors) == set(found.tensors)
        assert (found.bias is None) == (expected.bias is None)
        if found.bias is not None and expected.bias is not None:
            assert same_bits(found.bias, expected.bias[chosen])


def test_they_are_the_experts_of_the_result_in_that_order(tmp_path: Path) -> None:
    path, _ = write_format(tmp_path / "bf16", "bf16")
    whole, some = load_experts(path), load_experts(path, experts=[2, 1])
    x, one = torch.randn(1, 96), torch.ones(1, 1)
    assert torch.equal(some(x, torch.tensor([[0]]), one), whole(x, torch.tensor([[2]]), one))
    assert torch.equal(some(x, torch.tensor([[1]]), one), whole(x, torch.tensor([[1]]), one))


@pytest.mark.parametrize("experts", [[], [0, 0], [3], [-1]])
def test_experts_that_can_not_be_chosen(experts: list[int], tmp_path: Path) -> None:
    path, _ = write_format(tmp_path / "bf16", "bf16")
    with pytest.raises(ArgumentError, match="expected at least one of 0 to 2, each once"):
        load_experts(path, experts=experts)
