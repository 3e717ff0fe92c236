from __future__ import annotations

from typing import Any

import pytest
from small_checkpoints import parts

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.formats.config_fields import Fields


def fields(**values: Any) -> Fields:
    return Fields("config.json: quantization_config", values)


def refusal(call: Any, kind: type[ConfigError | UnsupportedError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return parts(caught.value)


@pytest.mark.parametrize("value", [None, "4", 4.0, True, [4], 10**30])
def test_bits_are_whole_numbers(value: Any):
    kind = UnsupportedError if value == 10**30 else ConfigError
    text = refusal(lambda: fields(bits=value).bits("bits", "gptq"), kind)
    assert text.startswith(f"config.json: quantization_config.bits: found {value!r}; expected ")


def test_bits_that_a_format_does_not_have():
    text = refusal(lambda: fields(bits=5).bits("bits", "gptq"), UnsupportedError)
    assert "found 5; expected 2 or 3 or 4 or 8" in text
    assert "expected 4. Requantise" in refusal(lambda: fields(bits=8).bits("bits", "awq"), UnsupportedError)
    assert fields(bits=3).bits("bits", "packed") == 3


@pytest.mark.parametrize("value", [0, -2, 2**31, 10**30, None, "128", 128.0, True])
def test_group_sizes_that_are_none(value: Any):
    text = refusal(fields(group_size=value).group_size)
    assert f"quantization_config.group_size: found {value!r}; expected " in text


@pytest.mark.parametrize("value", [-1, 1, 32, 128, 2**31 - 1])
def test_group_sizes(value: int):
    assert fields(group_size=value).group_size() == value


def test_null_counts_as_absent():
    assert fields(sym=None).flag("sym", True) is True
    assert fields(format=None).text("format", "gptq") == "gptq"
    assert fields(ignore=None).names("exclude_modules", "ignore") == []
    assert not fields(a=None).has("a")
    assert fields(a=False).has("a")


@pytest.mark.parametrize("value", [0, 1, "true", [], {}])
def test_flags(value: Any):
    assert f"found {value!r}; expected true or false" in refusal(lambda: fields(sym=value).flag("sym", True))


@pytest.mark.parametrize("value", [0, True, ["gptq"]])
def test_texts(value: Any):
    assert f"found {value!r}; expected a string" in refusal(lambda: fields(format=value).text("format"))
    assert "found None; expected a string" in refusal(lambda: fields().text("format"))


def test_names():
    assert fields(ignore=["a"], exclude_modules=["b"]).names("exclude_modules", "ignore") == ["b"]
    assert fields(ignore=["a"]).names("exclude_modules", "ignore") == ["a"]
    for value in ("a", [1], [["a"]], {"a": 1}):
        assert "expected a list of module names" in refusal(lambda value=value: fields(ignore=value).names("ignore"))


@pytest.mark.parametrize(("value", "block"), [([128, 64], (128, 64)), ("128x64", (128, 64)), ([1, 1], (1, 1))])
def test_blocks(value: Any, block: tuple[int, int]):
    assert fields(b=value).block("b") == block


@pytest.mark.parametrize(
    "value",
    [
        None,
        128,
        [],
        [128],
        [128, 0],
        [128, -1],
        [128, 1.0],
        [True, 128],
        [1, 2, 3],
        "128",
        "128x",
        "x",
        "ax1",
        [2**31, 1],
        "9" * 5000 + "x1",
    ],
)
def test_blocks_that_are_none(value: Any):
    assert "expected two positive numbers, rows and columns" in refusal(lambda: fields(b=value).block("b"))


def test_objects_inside_are_named_by_their_path():
    inner = fields(weights={"num_bits": "4"}).object("weights")
    assert "quantization_config.weights.num_bits: found '4'" in refusal(lambda: inner.integer("num_bits"))
    for value in (None, [], "x"):
        assert "expected an object" in refusal(lambda value=value: fields(weights=value).object("weights"))


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "(?L)a", "a{99999999999}", "(?P<1>a)", "*", "(" * 5000])
def test_patterns_that_are_none(pattern: str):
    text = refusal(lambda: fields().pattern("ignore", pattern))
    assert text.startswith("config.json: quantization_config.ignore: found ")
    assert "expected a regular expression" in text
    assert len(text) < 500


def test_patterns_that_later_pythons_may_read_otherwise_do_not_warn():
    assert fields().pattern("ignore", "[[a]").match("[")


@pytest.mark.parametrize("key", ["\ud800", "\x1b[2J", "x" * 3000])
def test_keys_that_can_not_be_printed_are_shown_escaped(key: str):
    text = refusal(lambda: fields(**{key: {"a": 1}}).object(key).object("a"))
    assert text.isprintable()
    assert len(text) < 500
    assert refusal(lambda: fields().pattern(key, f"(?<{key}")).isprintable()
