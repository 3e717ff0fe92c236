"""Formulas of named sizes: written once, read by Python, by the manifest's readers and by a C compiler.

Whole numbers, `+ - * // %`, comparisons, `a if condition else b`, and the functions of `FUNCTIONS`. Sizes are at least
0, and `//` rounds down.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from fanfold.errors import ArgumentError
from fanfold.routing.sizes import power_of_two


def ceil_div(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "ceil_div": ceil_div,
    "min": min,
    "max": max,
    "power_of_two": power_of_two,
}
"""power_of_two is the smallest that is at least its argument, and at least 1."""
_OPERATORS: Mapping[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("fanfold_add", operator.add),
    ast.Sub: ("fanfold_sub", operator.sub),
    ast.Mult: ("fanfold_mul", operator.mul),
    ast.FloorDiv: ("fanfold_div", cast(Any, operator.floordiv)),
    ast.Mod: ("fanfold_mod", cast(Any, operator.mod)),
}
_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.LtE: ("<=", operator.le),
    ast.Lt: ("<", operator.lt),
    ast.Eq: ("==", operator.eq),
    ast.GtE: (">=", operator.ge),
    ast.Gt: (">", operator.gt),
}


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """The number that a formula gives.

    Raises:
        ArgumentError: it is no such formula, or names a size that is not there.
    """
    tree = _tree(formula)
    missing = [name for name in names(formula) if name not in sizes]
    if missing:
        raise _wrong(formula, f"no size {missing[0]}", f"one of {', '.join(sorted(sizes))}")
    return _number(tree, sizes)


def names(formula: str) -> list[str]:
    """The sizes that a formula names, each once, in order."""
    functions = {id(node.func) for node in ast.walk(_tree(formula)) if isinstance(node, ast.Call)}
    found = [node for node in ast.walk(_tree(formula)) if isinstance(node, ast.Name) and id(node) not in functions]
    return list(dict.fromkeys(node.id for node in sorted(found, key=lambda node: node.col_offset)))


def _number(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_number(node.operand, sizes)
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)][1](_number(node.left, sizes), _number(node.right, sizes))
    if isinstance(node, ast.Compare):
        return _COMPARISONS[type(node.ops[0])][1](_number(node.left, sizes), _number(node.comparators[0], sizes))
    if isinstance(node, ast.IfExp):
        return _number(node.body if _number(node.test, sizes) else node.orelse, sizes)
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return int(FUNCTIONS[node.func.id](*(_number(argument, sizes) for argument in node.args)))


def in_c(formula: str, sizes: Mapping[str, str]) -> str:
    """The formula as a C expression of int64_t; `sizes` says what a name is called there."""
    return _c(_tree(formula), sizes)


def _c(node: ast.expr, sizes: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp):
        return f"-{_c(node.operand, sizes)}"
    if isinstance(node, ast.BinOp):
        left, right = _c(node.left, sizes), _c(node.right, sizes)
        return f"{_OPERATORS[type(node.op)][0]}({left}, {right})"
    if isinstance(node, ast.Compare):
        return f"({_c(node.left, sizes)} {_COMPARISONS[type(node.ops[0])][0]} {_c(node.comparators[0], sizes)})"
    if isinstance(node, ast.IfExp):
        return f"({_c(node.test, sizes)} ? {_c(node.body, sizes)} : {_c(node.orelse, sizes)})"
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return f"fanfold_{node.func.id}({', '.join(_c(argument, sizes) for argument in node.args)})"


@cache
def _tree(formula: str) -> ast.expr:
    """The formula's tree, checked node by node: a manifest may come from anywhere."""
    try:
        tree = ast.parse(formula, mode="eval").body
    except SyntaxError:
        raise _wrong(formula, "no expression", "whole numbers, sizes and + - * // %") from None
    _check(formula, tree)
    return tree


def _check(formula: str, node: ast.expr) -> None:
    inner: list[ast.expr] = []
    good = False
    if isinstance(node, ast.Constant):
        good = type(node.value) is int
    elif isinstance(node, ast.Name):
        good = True
    elif isinstance(node, ast.UnaryOp):
        good, inner = isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant), [node.operand]
    elif isinstance(node, ast.BinOp):
        good, inner = type(node.op) in _OPERATORS, [node.left, node.right]
    elif isinstance(node, ast.Compare):
        good, inner = len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS, [node.left, *node.comparators]
    elif isinstance(node, ast.IfExp):
        good, inner = True, [node.test, node.body, node.orelse]
    elif isinstance(node, ast.Call):
        good = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        inner = node.args
    if not good:
        raise _wrong(formula, ast.unparse(node), f"whole numbers, sizes, + - * // % and {', '.join(FUNCTIONS)}")
    for child in inner:
        _check(formula, child)


def _wrong(formula: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"formula {formula!r}",
        found=found,
        expected=expected,
        next_step="Write it of the sizes that the function names.",
    )
