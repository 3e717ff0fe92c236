"""NAME=VALUE arguments."""

import io
from pathlib import Path

import pytest

from fanfold.cli.pairs import adapter_folders, prompt_rows
from fanfold.errors import AdapterExistsError, ArgumentError, UnknownAdapterError


def test_adapters_by_name() -> None:
    found = adapter_folders(["alice=adapters/a", "bob=b=c"])
    assert found == {"alice": Path("adapters/a"), "bob": Path("b=c")}


@pytest.mark.parametrize("pair", ["alice", "=folder", " =folder", "alice=", ""])
def test_malformed_adapter(pair: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        adapter_folders([pair])
    assert caught.value.found == repr(pair)
    assert "NAME=DIR" in caught.value.expected


def test_base_is_no_adapters_name() -> None:
    with pytest.raises(ArgumentError, match="without an adapter"):
        adapter_folders(["base=folder"])


def test_adapter_named_twice() -> None:
    with pytest.raises(AdapterExistsError, match="x twice, as a and b"):
        adapter_folders(["x=a", "x=b"])


def test_rows_keep_order_and_text() -> None:
    rows = prompt_rows(["bob=1 + 1 = 2", "base= hello", "bob="], ["alice", "bob"])
    assert rows == [("bob", "1 + 1 = 2"), (None, " hello"), ("bob", "")]


def test_dash_reads_standard_input_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("alice=two\n\n  \nbase=three\n"))
    rows = prompt_rows(["base=one", "-", "alice=four"], ["alice"])
    assert rows == [(None, "one"), ("alice", "two"), (None, "three"), ("alice", "four")]


@pytest.mark.parametrize("pair", ["hello", "=hello", ""])
def test_malformed_prompt(pair: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        prompt_rows([pair], ["alice"])
    assert caught.value.expected == "NAME=TEXT"
    assert "base" in caught.value.next_step


def test_unknown_adapter_names_the_known_ones() -> None:
    with pytest.raises(UnknownAdapterError) as caught:
        prompt_rows(["carol=hi"], ["alice", "bob"])
    assert caught.value.expected == "one of base, alice, bob"
    assert "--adapter carol=DIR" in caught.value.next_step
