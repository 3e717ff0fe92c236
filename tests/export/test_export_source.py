"""What a launch would compile: parameters by name, and a kernel that launches as before."""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime import driver

from fanfold.export.plan import plan
from fanfold.export.source import Parameter, compiling_for, source_of


def test_parameters_have_the_names_of_members_and_what_they_are_multiples_of() -> None:
    (kernel,) = [
        k for k in plan([90], ["lora_shrink"]) if k.id == "lora_shrink-bf16-down-source2-tile16-block_r32-sm_90"
    ]
    found = source_of(kernel.kernel, kernel.example, "sm_90")
    assert found.parameters[:3] == (
        Parameter("x_ptr", "*bf16", 16),
        Parameter("xa_ptr", "*bf16", 16),
        Parameter("table.a", "*i64", 16),
    )
    by_name = {parameter.name: parameter for parameter in found.parameters}
    assert by_name["K"] == Parameter("K", "i32", 16)
    assert by_name["top_k"] == Parameter("top_k", "i32", 1)
    assert "unknown_ptr" not in by_name  # None: compiled in
    assert found.constants["BLOCK_R"] == 32
    assert "FIND" not in found.constants  # a device function
    assert found.options["num_warps"] == 4


def test_a_kernel_launches_as_before(monkeypatch: Any) -> None:
    """On a machine with a GPU the kernel's own compiler and the driver are back."""
    from fanfold.kernels.combine.combine import combine_kernel

    active = driver._active
    given: list[Any] = []
    with compiling_for(combine_kernel, "sm_90", lambda *source: given.append(source)):
        assert combine_kernel.compile is not triton.compile
    assert "compile" not in vars(combine_kernel)
    own = object()
    monkeypatch.setattr(combine_kernel, "compile", own, raising=False)
    with compiling_for(combine_kernel, "sm_90", lambda *source: given.append(source)):
        assert combine_kernel.compile is not own
    assert combine_kernel.compile is own
    assert driver._active is active
    assert combine_kernel.device_caches[90][0] == {}  # what was compiled
    assert given == []
