"""Formulas of named sizes."""

from __future__ import annotations

import random

import pytest

from fanfold.errors import ArgumentError
from fanfold.export.formulas import evaluate, in_c, names
from fanfold.routing.sizes import power_of_two


def test_formulas_are_evaluated_as_python_would() -> None:
    chance = random.Random(1)
    formulas = {
        "a * (b + 3) // 4 - b % 5": lambda a, b: a * (b + 3) // 4 - b % 5,
        "ceil_div(a, b + 1)": lambda a, b: -(-a // (b + 1)),
        "max(1, min(a, b)) * power_of_two(a)": lambda a, b: max(1, min(a, b)) * power_of_two(a),
        "16 if a <= b else 32 if a == b + 1 else -1": lambda a, b: 16 if a <= b else 32 if a == b + 1 else -1,
        "(a > b) + (a >= b) + (a < b)": lambda a, b: (a > b) + (a >= b) + (a < b),
    }  # fmt: skip
    for _ in range(200):
        a, b = chance.randrange(1000), chance.randrange(1000)
        for formula, wanted in formulas.items():
            assert evaluate(formula, {"a": a, "b": b}) == wanted(a, b), (formula, a, b)


def test_names_are_those_of_sizes_in_order() -> None:
    formula = "ceil_div(rows, tile) * min(experts, rows) if slots == 2 else 1"
    assert names(formula) == ["rows", "tile", "experts", "slots"]


def test_formulas_in_c() -> None:
    sizes = {"rows": "arguments->rows", "tile": "16"}
    assert in_c("rows // tile + 1", sizes) == "fanfold_add(fanfold_div(arguments->rows, 16), 1)"
    assert in_c("1 if rows == 0 else -1", sizes) == "((arguments->rows == 0) ? 1 : -1)"
    assert in_c("power_of_two(rows)", sizes) == "fanfold_power_of_two(arguments->rows)"


@pytest.mark.parametrize(
    ("formula", "found"),
    [
        ("rows +", "no expression"),
        ("rows ** 2", r"rows \*\* 2"),
        ("rows / 2", "rows / 2"),
        ("1.5 * rows", "1.5"),
        ("True", "True"),
        ("__import__('os')", "__import__"),
        ("rows.real", "rows.real"),
        ("min(rows, default=3)", "min"),
        ("0 < rows < 5", "0 < rows < 5"),
        ("tokens", "no size tokens"),
    ],
)
def test_what_is_no_formula(formula: str, found: str) -> None:
    with pytest.raises(ArgumentError, match=f"found {found}"):
        evaluate(formula, {"rows": 4})
