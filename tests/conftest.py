"""Where kernels run: in Triton's interpreter (a process of its own, see interpreter.py) or on a GPU."""

import os

import pytest
import torch

from interpreter import read_loop_bounds


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreter: runs where TRITON_INTERPRET=1, started by run_in_interpreter")
    if os.environ.get("TRITON_INTERPRET") == "1":
        read_loop_bounds()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops the tests that can't run in this process."""
    off = set()
    if os.environ.get("TRITON_INTERPRET") != "1":
        off.add("interpreter")
    if not torch.cuda.is_available():
        off.add("gpu")
    dropped = [item for item in items if any(item.get_closest_marker(name) for name in off)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    """Device of a kernel's tensors: "cpu" is the interpreter."""
    return request.param
