"""Directories of shards, JSON files, and reading no more than was asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import parts, same_bits, shard

from fanfold.errors import ConfigError, CorruptFileError, FanfoldError, MissingFileError, TensorError
from fanfold.formats.files import INDEX, SINGLE, CheckpointFiles, read_json, read_json_if_there

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor(7, dtype=torch.int64),
    "c": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
    "nothing": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path, kind: type[FanfoldError]) -> str:
    with pytest.raises(kind) as caught:
        CheckpointFiles(folder)
    return parts(caught.value)


def test_tensors_are_read_bit_for_bit(folder: Path):
    files = CheckpointFiles(folder)
    assert set(files.infos) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert (files.infos[name].dtype, files.infos[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert files.infos[name].nbytes == tensor.nbytes
        assert same_bits(files.read(name), tensor)


def test_one_row_is_read_alone(folder: Path):
    files = CheckpointFiles(folder)
    for row in range(3):
        assert same_bits(files.read("a", row), TENSORS["a"][row])
    assert same_bits(files.read("c", 1), TENSORS["c"][1])


def test_a_tensor_owns_its_memory(folder: Path):
    first = CheckpointFiles(folder).read("a")
    first.zero_()
    (folder / SINGLE).unlink()
    assert first.untyped_storage().nbytes() == 48
    assert torch.equal(first, torch.zeros(3, 4))


def test_headers_alone_are_read_at_first(folder: Path, monkeypatch: pytest.MonkeyPatch):
    reads: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "fanfold.formats.files._fill", lambda file, data: reads.append((file.tell(), len(data))) or True
    )
    files = CheckpointFiles(folder)
    assert reads == []
    files.read("c")
    files.read("a", 2)
    assert reads == [(files.infos["c"].offset, 6), (files.infos["a"].offset + 32, 16)]


def test_unknown_name(folder: Path):
    with pytest.raises(TensorError) as caught:
        CheckpointFiles(folder).read("d")
    assert f"{folder}: d: found no such tensor" in parts(caught.value)


@pytest.mark.parametrize("length", [0, 4, 40])
def test_a_file_that_is_cut_meanwhile_is_an_error(folder: Path, length: int):
    files = CheckpointFiles(folder)
    os.truncate(folder / SINGLE, length)
    with pytest.raises(CorruptFileError) as caught:
        files.read("a")
    assert f"{SINGLE}: a: found a file that changed since its header was read" in parts(caught.value)


def test_a_file_that_is_replaced_meanwhile_is_an_error(folder: Path):
    files = CheckpointFiles(folder)
    other = {name: tensor.flip(0) if tensor.dim() else tensor for name, tensor in TENSORS.items() if name != "e4m3"}
    save_file({**other, "e4m3": TENSORS["e4m3"]}, folder / "new")
    (folder / "new").replace(folder / SINGLE)
    with pytest.raises(CorruptFileError, match="changed since"):
        files.read("a")


def test_a_file_that_vanishes_meanwhile_is_an_error(folder: Path):
    files = CheckpointFiles(folder)
    (folder / SINGLE).unlink()
    with pytest.raises(CorruptFileError) as caught:
        files.read("a")
    assert "found No such file or directory; expected a readable file" in parts(caught.value)


@pytest.mark.parametrize("shards", [2, 3, 6])
def test_shards_hold_the_same_tensors(folder: Path, shards: int):
    shard(folder, shards)
    files = CheckpointFiles(folder)
    assert len({info.file for info in files.infos.values()}) == shards
    for name, tensor in TENSORS.items():
        assert same_bits(files.read(name), tensor)


def test_the_index_may_name_the_single_file(folder: Path):
    write_index(folder, dict.fromkeys(TENSORS, SINGLE))
    assert same_bits(CheckpointFiles(folder).read("a"), TENSORS["a"])


def test_of_two_copies_the_index_says_which_counts(tmp_path: Path):
    for number, file in enumerate(("one.safetensors", "two.safetensors")):
        save_file({"a": torch.full((2,), float(number)), f"own{number}": torch.zeros(1)}, tmp_path / file)
    for number, file in enumerate(("one.safetensors", "two.safetensors")):
        write_index(tmp_path, {"a": file, "own0": "one.safetensors", "own1": "two.safetensors"})
        assert CheckpointFiles(tmp_path).read("a").tolist() == [number, number]
    write_index(tmp_path, {"own0": "one.safetensors", "own1": "two.safetensors"})
    text = refused(tmp_path, TensorError)
    assert "two.safetensors: a: found the tensor also in one.safetensors" in text


def test_no_such_directory(tmp_path: Path):
    assert f"{tmp_path / 'x'}: found no directory" in refused(tmp_path / "x", MissingFileError)
    assert "found no directory" in refused(Path("a\0b"), MissingFileError)
    assert "found no directory" in refused(Path("x" * 5000), MissingFileError)
    (tmp_path / "file").write_text("")
    assert "found a file; expected a checkpoint directory" in refused(tmp_path / "file", MissingFileError)


def test_no_weights(tmp_path: Path):
    assert f"found no {SINGLE} and no {INDEX}" in refused(tmp_path, MissingFileError)
    (tmp_path / SINGLE).mkdir()
    assert f"found no {SINGLE} and no {INDEX}" in refused(tmp_path, MissingFileError)


def test_only_pickles(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    text = refused(tmp_path, MissingFileError)
    assert "found only pickled weights (pytorch_model.bin)" in text
    assert "fanfold opens no pickles" in text


def test_a_single_file_of_another_name(tmp_path: Path):
    save_file(TENSORS, tmp_path / "model-00001-of-00002.safetensors")
    text = refused(tmp_path, MissingFileError)
    assert f"found model-00001-of-00002.safetensors, but no {SINGLE}" in text
    assert f"Fetch {INDEX}" in text


def test_a_missing_shard(folder: Path):
    shard(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    text = refused(folder, MissingFileError)
    assert f"found no model-00002-of-00003.safetensors; expected all 3 shards that {INDEX} names" in text
    assert "Fetch the missing shards." in text


def test_a_tensor_that_its_shard_does_not_hold(folder: Path):
    write_index(folder, {**dict.fromkeys(TENSORS, SINGLE), "lost": SINGLE})
    assert f"{SINGLE}: lost: found no such tensor; expected the tensor, as {INDEX} says" in refused(folder, TensorError)


def test_weights_beside_an_index_that_does_not_name_them(folder: Path):
    weights = load_file(folder / SINGLE)
    shard(folder, 2)
    save_file(weights, folder / SINGLE)
    text = refused(folder, ConfigError)
    assert f"{SINGLE} beside them; expected one set of weights" in text


@pytest.mark.parametrize(
    ("weight_map", "found"),
    [
        ({"a": "../model.safetensors"}, "'a' in '../model.safetensors'"),
        ({"a": "/model.safetensors"}, "'a' in '/model.safetensors'"),
        ({"a": ".."}, "'a' in '..'"),
        ({"a": ""}, "'a' in ''"),
        ({"a": 3}, "'a' in 3"),
        ({"a": None}, "'a' in None"),
        ({"a": "x\0y"}, r"'a' in 'x\x00y'"),
        ({"a": "\ud800"}, r"'a' in '\ud800'"),
        ({"a": "x" * 5000}, "'a' in 'xxx"),
        ({"\x1b[2J": "model.safetensors"}, r"'\x1b[2J' in 'model.safetensors'"),
        ({}, "{}"),
        ([], "[]"),
        (None, "None"),
        ("model.safetensors", "'model.safetensors'"),
    ],
)
def test_an_index_that_names_no_files_of_the_directory(folder: Path, weight_map: object, found: str):
    write_index(folder, weight_map)
    text = refused(folder, CorruptFileError)
    assert f"{INDEX}: weight_map: found {found}" in text
    assert "expected tensor names and names of files in this directory" in text
    assert text.isprintable()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "no JSON (Expecting value"),
        (b"{", "no JSON (Expecting property name"),
        (b"\xff", "no JSON ('utf-8' codec"),
        (b"[1, 2]", "a list"),
        (b"null", "a NoneType"),
        (b"3", "a int"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "no JSON (maximum recursion depth"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "objects nested without end"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON (Exceeds the limit"),
    ],
)
def test_json_that_is_no_object(tmp_path: Path, content: bytes, found: str):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        read_json(file)
    assert f"config.json: found {found}" in parts(caught.value)


def test_json_that_is_not_there(tmp_path: Path):
    assert read_json_if_there(tmp_path / "config.json") is None
    with pytest.raises(MissingFileError, match=r"config\.json: found nothing; expected a JSON file"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CorruptFileError, match="found Is a directory; expected a readable file"):
        read_json(tmp_path / "config.json")
