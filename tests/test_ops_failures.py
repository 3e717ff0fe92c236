"""Failures of a device by name, each with a fake in place of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import fanfold
from fanfold import Experts
from fanfold.errors import ArgumentError, DeviceMemoryError, UnavailableError
from fanfold.ops.failures import named, naming_failures, placing
from samples import SILU, numbers, random_experts, random_routing, sample

FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 5.11 GiB is "
    "free. Including non-PyTorch memory, this process has 134.60 GiB memory in use."
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.5 of 150 GB are free, 2 GB more lie in torch's cache."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5_500_000_000, 150_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100_000_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 98_000_000_000)


def module(**options: Any) -> Experts:
    return Experts(random_experts("gptq4-g32"), SILU, dtype=torch.float32, path="model.layers.3.mlp.experts", **options)


def call(experts: Experts) -> Tensor:
    return experts(numbers(5, 64), *random_routing(5, 2, 6))


def test_no_room_for_a_call() -> None:
    found = named(FULL, "torch.ops.fanfold.combine")
    assert isinstance(found, DeviceMemoryError)
    assert found.what == "torch.ops.fanfold.combine"
    assert found.found.endswith(
        "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 5.11 GiB is free"
    )
    short = named(torch.OutOfMemoryError("out of memory"), "x")
    assert short is not None
    assert short.found == "out of memory"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "device kernel image is invalid"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "C compiler"),
        (
            OutOfResources(262144, 101376, "shared memory"),
            "OutOfResources: out of resource: shared memory, Required: 262144",
        ),
        (PTXASError("Internal Triton PTX codegen error"), "PTXASError: PTXAS error"),
        (CompilationError("x = tl.dot(a, b)", None, "unsupported"), "CompilationError: "),
    ],
)
def test_kernels_that_are_not_loaded(error: Exception, text: str) -> None:
    found = named(error, "torch.ops.fanfold.activation")
    assert isinstance(found, UnavailableError)
    assert text in found.found
    assert "doctor" in found.next_step


def test_long_reports_are_cut() -> None:
    found = named(PTXASError("line\n" * 500), "x")
    assert found is not None
    assert len(found.found) < 350
    assert found.found.endswith(" ...")


def test_other_errors_stay_what_they_are() -> None:
    wrong = ArgumentError("x", found="1", expected="2", next_step="Pass 2.")
    for error in (wrong, RuntimeError("CUDA error: an illegal memory access"), ValueError("Triton")):
        assert named(error, "x") is None

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            naming_failures("x", fail)()
        assert caught.value is error


def test_operations_name_their_failures() -> None:
    def launch(a: int, *, b: int) -> int:
        """Doc."""
        if b == 0:
            raise RuntimeError("Triton Error [CUDA]: no kernel image is available")
        return a + b

    run = naming_failures("torch.ops.fanfold.launch", launch)
    assert (run(1, b=2), run.__doc__) == (3, "Doc.")
    with pytest.raises(
        UnavailableError, match=r"torch\.ops\.fanfold\.launch: found RuntimeError: Triton Error"
    ) as caught:
        run(1, b=0)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_no_room_for_weights_says_what_is_needed_and_what_is_there() -> None:
    with (
        pytest.raises(DeviceMemoryError) as caught,
        placing("experts: weights", 12_340_000_000, torch.device("cuda", 1)),
    ):
        raise FULL
    assert caught.value.what == "experts: weights"
    assert caught.value.found == "5.50 GB of 150.00 GB free on cuda:1, and 2.00 GB in torch's cache"
    assert caught.value.expected.startswith("12.34 GB")
    with pytest.raises(ValueError, match="other"), placing("experts: weights", 1, CPU):
        raise ValueError("other")


def test_a_layer_that_does_not_fit_stays_where_it_is() -> None:
    experts = module()
    expected = call(experts)

    def full(tensor: Tensor) -> Tensor:
        if tensor.numel():
            raise FULL
        return tensor

    with pytest.raises(DeviceMemoryError, match=r"model\.layers\.3\.mlp\.experts: weights: found 5\.50 GB of 150"):
        experts._apply(full)
    assert torch.equal(call(experts), expected)


def test_no_room_to_prepare_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def implement(*arguments: object) -> None:
        raise FULL

    monkeypatch.setattr("fanfold.layers.experts.arch_of", lambda device: "sm_90")
    monkeypatch.setattr("fanfold.layers.experts.implement", implement)
    with pytest.raises(DeviceMemoryError, match=r"model\.layers\.3\.mlp\.experts: weights"):
        module()


class Broken:
    """An implementation whose launches fail."""

    hidden_order = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, *arguments: object) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OutOfResources(262144, 101376, "shared memory"), UnavailableError), (FULL, DeviceMemoryError)],
)
def test_a_call_names_its_layer(error: Exception, kind: type[Exception]) -> None:
    experts = module()
    experts._kernels = Broken(error)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(kind, match=r"model\.layers\.3\.mlp\.experts, reference on cpu: found") as caught:
        call(experts)
    assert caught.value.__cause__ is error


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, *arguments: object) -> None:
        raise FULL

    monkeypatch.setattr(transformers.PreTrainedModel, "to", full)
    with pytest.raises(DeviceMemoryError, match=r"weights outside the experts: found 5\.50 GB") as caught:
        fanfold.load_model(sample("gptqmodel_qwen3moe_w4_g32"))
    assert str(sample("gptqmodel_qwen3moe_w4_g32")) in caught.value.what
