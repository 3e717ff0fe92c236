"""adapter_model.safetensors: whole, of one of three dtypes, finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_files import QUERY, factors, names, write
from safetensors.torch import save_file

from fanfold.errors import CorruptFileError, MissingFileError, TensorError, UnsupportedError
from fanfold.lora.adapter import read_adapter
from fanfold.lora.files import read_tensors

A, B = names(QUERY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in factors(QUERY, 2, 5, 3).items()}
    file, found = read_tensors(write(tmp_path, tensors))
    assert file == tmp_path / "adapter_model.safetensors"
    assert found.keys() == {A, B}
    assert found[A].dtype == dtype
    assert torch.equal(found[A], tensors[A])
    assert torch.equal(found[B], tensors[B])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float64, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = factors(QUERY, 2, 5, 3)
    tensors[B] = torch.ones(3, 2).to(dtype)
    with pytest.raises(TensorError, match=r"dtype .*expected F32, F16 or BF16") as caught:
        read_tensors(write(tmp_path, tensors))
    assert caught.value.what.endswith(B)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    tensors = factors(QUERY, 2, 5, 3)
    tensors[A][1, 4] = value
    with pytest.raises(TensorError, match=r"1 of 10 values NaN or inf") as caught:
        read_tensors(write(tmp_path, tensors))
    assert caught.value.what.endswith(A)


def test_an_empty_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorError, match=r"shape \[0, 5\]"):
        read_tensors(write(tmp_path, factors(QUERY, 0, 5, 3)))


def test_names_come_sorted(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.ones(1) for number in range(50)}
    assert list(read_tensors(write(tmp_path, tensors))[1]) == sorted(tensors)


@pytest.mark.parametrize("keep", [0, 7, 50, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path, factors(QUERY, 2, 5, 3)) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptFileError, match="a whole safetensors file") as caught:
        read_adapter(tmp_path)
    assert caught.value.what == str(file)


def test_a_corrupt_header(tmp_path: Path) -> None:
    file = write(tmp_path, factors(QUERY, 2, 5, 3)) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F3x"', 1))
    with pytest.raises(CorruptFileError, match="header"):
        read_adapter(tmp_path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    (write(tmp_path, factors(QUERY, 2, 5, 3)) / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(UnsupportedError, match="pickled") as caught:
        read_adapter(tmp_path)
    assert "convert it with safetensors" in caught.value.next_step


def test_a_missing_file(tmp_path: Path) -> None:
    (write(tmp_path, factors(QUERY, 2, 5, 3)) / "adapter_model.safetensors").unlink()
    with pytest.raises(MissingFileError) as caught:
        read_adapter(tmp_path)
    assert caught.value.what == str(tmp_path / "adapter_model.safetensors")


def test_the_file_may_be_overwritten_in_place(tmp_path: Path) -> None:
    tensors = factors(QUERY, 2, 5, 3)
    file, found = read_tensors(write(tmp_path, tensors))
    with file.open("r+b") as opened:
        opened.truncate(0)
    save_file({A: torch.zeros(2, 5)}, file)
    assert torch.equal(found[A], tensors[A])
