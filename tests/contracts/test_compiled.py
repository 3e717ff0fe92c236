"""The record of compiled kernels lists every kernel that is launched, on every arch that it is for."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections import defaultdict
from typing import Any

import fanfold.kernels
import fanfold.routing
from compile_record import RECORD
from compiling import ARCHS

HOPPER = {"grouped_int4_sm90", "reorder_kernel"}
"""Kernels for sm_90 alone: other archs run the portable ones."""


def launched_kernels() -> set[str]:
    """Device functions that no other one calls, and whose first argument is a tensor's address by its name.

    Those that a launch passes as constants begin with "ptr" or with what the kernel has loaded.
    """
    from triton.runtime.jit import JITFunction

    found: set[Any] = set()
    for package in (fanfold.kernels, fanfold.routing):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            values = vars(importlib.import_module(module.name)).values()
            found |= {value for value in values if isinstance(value, JITFunction)}
    called = {name for kernel in found for name in kernel.fn.__code__.co_names}
    names = {kernel.__name__ for kernel in found if kernel.arg_names[0].endswith("_ptr")}
    return names - called


def test_every_kernel_is_in_the_record_on_every_arch() -> None:
    archs: defaultdict[str, set[str]] = defaultdict(set)
    for line in RECORD.read_text().splitlines():
        row = json.loads(line)
        archs[row["kernel"].split(" ")[0]].add(row["arch"])
    wanted = {name: {"sm_90"} if name in HOPPER else set(ARCHS) for name in launched_kernels()}
    assert len(wanted) > 15
    assert dict(archs) == wanted
