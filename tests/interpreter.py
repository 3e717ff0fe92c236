"""Runs tests of kernels in Triton's interpreter, on the CPU, in a fresh process.

TRITON_INTERPRET must be set before triton is imported, and would change every other test of the process. So cases take
the fixture `device` (tests/conftest.py), and test_interpreter.py starts those of all files. Those of one file:

    TRITON_INTERPRET=1 python -m pytest FILE

The interpreter is wrong in bf16 and right in fp16 and fp32; it refuses inline assembly.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
# Among those that a run has collected.
FILES_WITH_CASES = pytest.StashKey[set[Path]]()
FILES_WITH_GPU_TESTS = pytest.StashKey[set[Path]]()


def run_in_interpreter(files: Sequence[Path]) -> None:
    """Runs the files' cases of device "cpu"; fails with their output."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def patch_interpreter() -> None:
    """Adapts Triton's interpreter to numpy, and saves it work; once a process, before kernels run."""
    read_loop_bounds()
    patch_the_language_once()
    skip_idle_checks()
    keep_types()
    round_fma_once()
    pass_over_nan()


def patch_the_language_once() -> None:
    """Keeps what the interpreter puts into triton.language for a function: at each call that is half of its time."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_and_keep(function: Callable[..., Any]) -> Any:
        patch(function)
        return interpreter._LangPatchScope()  # that restores nothing

    interpreter._patch_lang = functools.cache(patch_and_keep)


def skip_idle_checks() -> None:
    """Of overflow: the interpreter works them out and, as nothing sets its `debug`, looks at none."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def keep_types() -> None:
    """Makes each type of tensors once, where the interpreter makes several an operation: half of what time is left."""
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor, numpy_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, None, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle)

    def find_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    interpreter._get_np_dtype = find_dtype


def round_fma_once() -> None:
    """Of fp32, as GPUs do: the product is exact in fp64; the sum, where it is not, gets an odd last bit, so that it is
    never halfway between two numbers of fp32."""
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    fma = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return fma(self, x, y, z)
        product, added = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)
        total = np.asarray(product + added)
        part = total - product
        rest = (product - (total - part)) + (added - part)
        even = (rest != 0) & (total.view(np.int64) & 1 == 0)
        total = np.where(even, np.nextafter(total, np.copysign(np.inf, rest)), total)
        return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)

    builder.create_fma = create_fma


def pass_over_nan() -> None:
    """Lets tl.maximum and tl.minimum, unless told otherwise, give the number where one operand is NaN, as GPUs do."""
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def read_loop_bounds() -> None:
    """Lets numpy >= 2.4 take `range(0, R)`: the interpreter holds scalars as arrays of one element."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index_too
