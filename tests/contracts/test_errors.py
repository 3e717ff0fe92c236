"""Errors: every class is used, every use says what to do next, and no other exception is raised."""

import ast
import builtins
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from fanfold import errors

SRC = Path(__file__).parents[2] / "src" / "fanfold"
CLASSES = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.FanfoldError) and cls is not errors.FanfoldError
}
PARTS = {"found", "expected", "next_step"}
# Raised where Python or a framework asks for exactly this class.
PROTOCOL = {"AttributeError", "typer.Exit", "typer.BadParameter"}


def calls() -> Iterator[tuple[Path, ast.Call, str]]:
    """Every call in `src` of a class of fanfold.errors."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in CLASSES:
                    yield path, node, name


def test_every_class_is_used() -> None:
    assert {name for _, _, name in calls()} >= set(CLASSES)


def test_every_use_has_all_parts() -> None:
    seen = 0
    for path, call, name in calls():
        seen += 1
        where = f"{path.relative_to(SRC)}:{call.lineno} {name}"
        assert len(call.args) == 1, f"{where}: one positional argument, what is at fault"
        assert {keyword.arg for keyword in call.keywords} == PARTS, f"{where}: says found, expected, next_step"
        for keyword in call.keywords:
            empty = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            assert not empty, f"{where}: {keyword.arg} is empty"
    assert seen > 20


def test_nothing_else_is_raised() -> None:
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func)
                allowed = name in PROTOCOL or not hasattr(builtins, name)
                assert allowed, f"{path.relative_to(SRC)}:{node.lineno} raises {name}"


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES.keys())
def test_message_fields_and_pickle(cls: type[errors.FanfoldError]) -> None:
    error = cls("w.scale", found="[2]", expected="[3]", next_step="Write it again.")
    assert str(error) == "w.scale: found [2]; expected [3]. Write it again."
    assert error.as_dict() == {
        "error": cls.__name__,
        "what": "w.scale",
        "found": "[2]",
        "expected": "[3]",
        "next_step": "Write it again.",
    }
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again.as_dict() == error.as_dict()


def test_each_class_is_also_the_builtin_a_caller_would_catch() -> None:
    assert issubclass(errors.MissingFileError, FileNotFoundError)
    assert issubclass(errors.UnknownAdapterError, LookupError)
    assert issubclass(errors.ArgumentError, ValueError)
    assert issubclass(errors.UnavailableError, RuntimeError)
    for cls in CLASSES.values():
        assert issubclass(cls, ValueError | LookupError | RuntimeError | OSError | MemoryError)
