from typing import Any

import pytest

from fanfold.formats.values import DEEPEST, key_shown, shown, sound_name, too_deep


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(("value", "text"), [(4, "4"), ("gptq", "'gptq'"), (None, "None"), ([128, 128], "[128, 128]")])
def test_small_values_are_shown_whole(value: object, text: str):
    assert shown(value) == text


@pytest.mark.parametrize("value", ["x" * 10**6, [1] * 10**6, {str(i): i for i in range(10**5)}, nested(900), 10**4000])
def test_large_values_are_shown_short(value: object):
    assert len(shown(value)) < 500


def test_text_is_shown_escaped():
    assert shown("a\ud800\n") == r"'a\ud800\n'"


def test_depth():
    assert not too_deep(nested(DEEPEST - 1))
    assert too_deep(nested(DEEPEST))
    assert too_deep(nested(100_000))
    assert not too_deep("text")


@pytest.mark.parametrize(("key", "text"), [("config groups", "config groups"), ("a\nb", r"'a\nb'"), ("", "''")])
def test_keys(key: str, text: str):
    assert key_shown(key) == text


@pytest.mark.parametrize(
    ("name", "sound"), [("model.layers.0", True), ("\u0416", True), ("", False), ("\ud800", False), ("x" * 501, False)]
)
def test_names(name: str, sound: bool):
    assert sound_name(name) is sound
