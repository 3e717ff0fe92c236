"""Headers of safetensors files, sound and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoints import parts

from fanfold.errors import CorruptFileError, FanfoldError, UnsupportedError
from fanfold.formats.header import LARGEST, TensorInfo, header_length, parse_header

FILE = Path("model.safetensors")
GOOD = {
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
}


def parsed(header: Any, data: int = 16) -> dict[str, TensorInfo]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(FILE, text, 8 + len(text) + data)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD[name], **fields}}


def test_a_header_as_the_library_writes_it(tmp_path: Path):
    tensors = {
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 5),
        "bytes": torch.zeros(3, dtype=torch.uint8),
        "e4m3": torch.zeros(2, 2).to(torch.float8_e4m3fn),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    raw = file.read_bytes()
    length = header_length(file, raw[:8], len(raw))
    infos = parse_header(file, raw[8 : 8 + length], len(raw))
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    for name, info in infos.items():
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes() if tensors[name].numel() else b""
        assert raw[info.offset : info.offset + info.nbytes] == data


def test_tensors_come_in_the_order_of_their_data():
    infos = parsed({"z": GOOD["a"], "a": GOOD["b"], "__metadata__": {"format": "pt"}})
    assert list(infos) == ["z", "a"]
    start = infos["z"].offset
    assert (infos["z"].nbytes, infos["a"].offset - start) == (12, 12)
    assert infos["z"] == TensorInfo(torch.bfloat16, (2, 3), FILE, start)


@pytest.mark.parametrize(
    ("size", "length", "text"),
    [
        (0, 0, "found 0 bytes; expected a safetensors file"),
        (7, 0, "found 7 bytes"),
        (8, 1, "found a header of 1 bytes in a file of 8"),
        (100, 93, "found a header of 93 bytes in a file of 100"),
        (100, 2**63, f"found a header of {2**63} bytes"),
        (2 * LARGEST, LARGEST + 1, f"its header at most {LARGEST} bytes"),
    ],
)
def test_lengths_that_can_not_be(size: int, length: int, text: str):
    with pytest.raises(CorruptFileError) as caught:
        header_length(FILE, length.to_bytes(8, "little")[:size], size)
    assert text in parts(caught.value)
    assert caught.value.what == "model.safetensors"


BROKEN: list[tuple[Any, type[FanfoldError], str]] = [
    (b"{", CorruptFileError, "a header that is no JSON"),
    (b"\xff\xfe{}", CorruptFileError, "a header that is no JSON"),
    (b"[" * 50_000, CorruptFileError, "a header that is"),
    ([], CorruptFileError, "a header that is list; expected an object of tensors"),
    (None, CorruptFileError, "a header that is NoneType"),
    ({"a": 3}, CorruptFileError, "a: found 3; expected an object of dtype, shape and data_offsets"),
    (changed("a", dtype="F4"), UnsupportedError, "a: found dtype 'F4'; expected one of BOOL"),
    (changed("a", dtype=None), UnsupportedError, "a: found dtype None"),
    (changed("a", dtype=["F32"]), UnsupportedError, "a: found dtype ['F32']"),
    (changed("a", shape=None), CorruptFileError, "a: found shape = None; expected a list of sizes"),
    (changed("a", shape=[2, -3]), CorruptFileError, "a: found shape = [2, -3]"),
    (changed("a", shape=[2, True]), CorruptFileError, "a: found shape = [2, True]"),
    (changed("a", shape=[2, 3.0]), CorruptFileError, "a: found shape = [2, 3.0]"),
    (changed("a", shape=[0, 2**70]), CorruptFileError, "a: found shape = [0, "),
    (changed("a", shape=[2**40, 2**40]), CorruptFileError, f"a: found 12 bytes of data; expected {2**81} for BF16"),
    (changed("a", shape=[2, 4]), CorruptFileError, "a: found 12 bytes of data; expected 16 for BF16 [2, 4]"),
    (changed("b", data_offsets=[12]), CorruptFileError, "b: found data_offsets = [12]; expected two numbers"),
    (changed("b", data_offsets=[16, 12]), CorruptFileError, "b: found -4 bytes of data; expected 4 for F32 []"),
    (changed("b", data_offsets=[13, 17]), CorruptFileError, "b: found data from byte 13 on; expected from byte 12"),
    (changed("b", data_offsets=[8, 12]), CorruptFileError, "b: found data from byte 8 on; expected from byte 12"),
    ({"a": GOOD["a"]}, CorruptFileError, "as its header says"),
    ({"\ud800": GOOD["a"]}, CorruptFileError, r"found a tensor called '\ud800'; expected printable names"),
    ({"a\n": GOOD["a"]}, CorruptFileError, r"found a tensor called 'a\n'"),
    ({"": GOOD["a"]}, CorruptFileError, "found a tensor called ''"),
    ({"a" * 501: GOOD["a"]}, CorruptFileError, "at most 500 characters"),
]


@pytest.mark.parametrize(("header", "kind", "text"), BROKEN)
def test_broken_headers(header: Any, kind: type[FanfoldError], text: str):
    with pytest.raises(kind) as caught:
        parsed(header)
    assert text in parts(caught.value)
    assert caught.value.what.startswith("model.safetensors")


@pytest.mark.parametrize("data", [0, 15, 17])
def test_data_of_another_length(data: int):
    with pytest.raises(CorruptFileError, match="as its header says"):
        parsed(GOOD, data)
