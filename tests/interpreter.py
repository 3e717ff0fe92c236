"""Runs tests of kernels in Triton's interpreter, on the CPU, in a fresh process.

TRITON_INTERPRET must be set before triton is imported, and would change every other test of the process. So a test file
has its cases take the fixture `device` (tests/conftest.py), and one test that starts them:

    def test_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

The interpreter is wrong in bf16 and right in fp16 and fp32; it refuses inline assembly.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_in_interpreter(test_file: str) -> None:
    """Runs the file's cases of device "cpu"; fails with their output."""
    run = subprocess.run(
        # numpy warns of infinities and NaN that a GPU makes silently.
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreter"),
            *("-W", "ignore::RuntimeWarning", test_file),
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def read_loop_bounds() -> None:
    """Lets numpy >= 2.4 take `range(0, R)`: the interpreter holds scalars as arrays of one element."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index_too
