"""Recorded routings: written and read, drawn token by token, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fanfold.bench.batches import random_batch
from fanfold.bench.jobs import layer_shape
from fanfold.bench.recorded import Recorded, read, write
from fanfold.errors import ArgumentError, CorruptFileError, MissingFileError

SHAPE = layer_shape("8,2,64,32")
IDS = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [1, 0]])


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    path = tmp_path / "routing.safetensors"
    write(path, {4: IDS, 2: IDS + 0, 11: IDS.flip(0)})
    return read(path)


def test_what_is_written_is_read(recorded: Recorded) -> None:
    assert sorted(recorded.layers) == [2, 4, 11]
    assert recorded.layers[11].dtype == torch.int32
    assert torch.equal(recorded.layers[11].long(), IDS.flip(0))
    assert str(recorded) == f"recorded:{recorded.path}"


def test_tokens_follow_each_other_and_layers_take_turns(recorded: Recorded) -> None:
    starts: set[int] = set()
    for seed in range(12):
        ids = recorded.draw(SHAPE, 7, seed)
        layer = recorded.layers[(2, 4, 11)[seed % 3]]
        start = int((layer == ids[0]).all(-1).nonzero()[0])
        starts.add(start)
        assert torch.equal(ids, layer[(torch.arange(7) + start) % 5])
        assert torch.equal(ids, recorded.draw(SHAPE, 7, seed))
    assert len(starts) > 2


def test_a_batch_has_its_experts(recorded: Recorded) -> None:
    batch = random_batch(SHAPE, 5, recorded, torch.bfloat16, torch.device("cpu"), 0)
    assert torch.equal(batch.topk_ids, recorded.draw(SHAPE, 5, 0))
    assert batch.topk_ids.dtype == torch.int32
    assert torch.allclose(batch.topk_weights.sum(-1), torch.ones(5))


@pytest.mark.parametrize("name", ["8,4,64,32", "7,2,64,32"])
def test_another_model(recorded: Recorded, name: str) -> None:
    with pytest.raises(ArgumentError, match="found 2 experts a token, 8 experts or more, in layer 2"):
        recorded.draw(layer_shape(name), 1, 0)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(MissingFileError, match="fanfold routing CHECKPOINT --text FILE --record"):
        read(path)
    path.write_bytes(b"no header")
    with pytest.raises(CorruptFileError, match=r"x\.safetensors"):
        read(path)
    for name, tensor in (
        ("layers.0.topk_ids", torch.zeros(2, 2)),
        ("layers.0.topk_ids", torch.zeros(2, dtype=torch.int32)),
        ("layers.0.topk_ids", torch.full((2, 2), -1, dtype=torch.int32)),
        ("layers.0xtopk_ids", torch.zeros(2, 2, dtype=torch.int32)),
        ("weight", torch.zeros(2, 2, dtype=torch.int32)),
    ):
        save_file({name: tensor}, path)
        with pytest.raises(CorruptFileError, match=rf"found {name}, \w+ \["):
            read(path)
    save_file({}, path)
    with pytest.raises(CorruptFileError, match="no tensors"):
        read(path)
    with pytest.raises(ArgumentError, match="a file that can be written"):
        write(tmp_path / "missing" / "x.safetensors", {0: IDS})
