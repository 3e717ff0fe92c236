"""Where kernels run: in Triton's interpreter (a process of its own, see interpreter.py) or on a GPU."""

import os

import pytest
import torch

from interpreter import FILES_WITH_CASES, FILES_WITH_GPU_TESTS, patch_interpreter

os.environ["FANFOLD_TUNED"] = os.devnull  # tables that the user has here would change what tests see
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreter: runs where TRITON_INTERPRET=1, started by test_interpreter.py")
    if INTERPRETED:
        # numpy warns of infinities and NaN that a GPU makes silently.
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
        patch_interpreter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops the tests that can't run in this process."""
    config.stash[FILES_WITH_CASES] = {item.path for item in items if item.get_closest_marker("interpreter")}
    config.stash[FILES_WITH_GPU_TESTS] = {item.path for item in items if item.get_closest_marker("gpu")}
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        here = bool(item.get_closest_marker("interpreter")) is INTERPRETED
        runs = here and (torch.cuda.is_available() or not item.get_closest_marker("gpu"))
        (kept if runs else dropped).append(item)
    kept.sort(key=lambda item: item.path.name != "test_interpreter.py")  # the longest first: workers end together
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    """Device of a kernel's tensors: "cpu" is the interpreter."""
    return request.param
