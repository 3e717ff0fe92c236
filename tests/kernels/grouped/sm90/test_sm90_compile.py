"""Kernels for Hopper fit and leave operands in flight alone, without a GPU.

All that layers of many sizes get were compiled and checked by `sm90_resources.py`, which wrote sm90_resources.json; a
test holds that this is of today's source. Some are compiled here.
"""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from sm90_compiling import MANY, empty_weights, other_kernels, tuned_kernels
from sm90_resources import MANIFEST, check, kernels, source

from fanfold.kernels.grouped.sm90.launch import VALUES, _constants
from fanfold.kernels.grouped.sm90.product import grouped_int4_sm90

KERNELS = {kernel.name: kernel for kernel in [*tuned_kernels()[::6], *other_kernels()]}


@pytest.mark.parametrize("name", KERNELS)
def test_fits_and_leaves_operands_in_flight_alone(name: str) -> None:
    """One test a kernel, so that workers share them."""
    found = check(KERNELS[name])
    manifest = json.loads(MANIFEST.read_text())
    if manifest["triton"] == version("triton"):
        assert found == manifest["registers, shared bytes, spilled bytes"][name]


def test_all_kernels_of_this_source_were_checked() -> None:
    manifest = json.loads(MANIFEST.read_text())
    assert manifest["source"] == source(), "python tests/kernels/grouped/sm90/sm90_resources.py"
    found = manifest["registers, shared bytes, spilled bytes"]
    assert list(found) == list(kernels())
    assert len(found) > 200
    spilled = {name: stack for name, (_, _, stack) in found.items() if stack}
    assert len(spilled) < 0.2 * len(found)
    assert max(spilled.values()) <= 240


def test_a_kept_kernel_gets_its_arguments_in_order() -> None:
    """Later launches pass values and constants by position."""
    weights = empty_weights("gptq4-g128", 2, 64, 512)
    constants = _constants(weights, MANY, False, False, True, "silu")
    assert [*VALUES, *constants] == grouped_int4_sm90.arg_names
