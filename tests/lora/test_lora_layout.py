"""Stacked factors of fused experts, taken apart: packing, orientation, halves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_files import EXPERTS, FakeExperts, delta
from torch import Tensor

from fanfold.errors import AdapterMismatchError
from fanfold.lora.adapter import Adapter, FusedTarget, Projection
from fanfold.lora.config import AdapterConfig
from fanfold.lora.layout import orientation_of, take_apart
from fanfold.spec import ExpertShape

E, H, I, R = 3, 6, 4, 2  # noqa: E741


def pack(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A [E, r, in] and B [E, out, r] as PEFT stacks them, element by element."""
    experts, rank, _ = a.shape
    stacked_a = torch.empty(experts * rank, a.shape[2])
    stacked_b = torch.empty(b.shape[1], rank * experts)
    for e in range(experts):
        for k in range(rank):
            stacked_a[e * rank + k] = a[e, k]
            stacked_b[:, k * experts + e] = b[e, :, k]
    return stacked_a, stacked_b


def experts(shape: ExpertShape | None = None, *, interleaved: bool = False, transposed: bool = False) -> FakeExperts:
    return FakeExperts(EXPERTS, shape=shape or ExpertShape(E, H, I), interleaved=interleaved, transposed=transposed)


def target(half: str, a: Tensor, b: Tensor, rank: int = R, scale: float = 0.5) -> FusedTarget:
    name = "down" if half == "down" else "gate_up"
    return FusedTarget(f"{EXPERTS}.{half}", EXPERTS, a, b, rank, scale, name)


def adapter(version: str | None = "0.21.2") -> Adapter:
    return Adapter(Path("adapter"), AdapterConfig(R, 1.0, peft_version=version), (), 0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a6_a7_a_is_expert_major_and_b_is_rank_major(rank: int) -> None:
    a, b = numbers(E, rank, I), numbers(E, H, rank, seed=1)
    pairs = take_apart(target("down", *pack(a, b), rank), experts(), "standard")
    assert pairs.keys() == {("down", e) for e in range(E)}
    for e in range(E):
        pair = pairs["down", e]
        assert torch.equal(pair.a, a[e])
        assert torch.equal(pair.b, b[e])
        assert pair.scale == 0.5


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("row", range(2 * I))
def test_a16_one_hot_rows_of_b_land_in_their_half(row: int, interleaved: bool) -> None:
    b = torch.zeros(E, 2 * I, 1)
    b[1, row, 0] = 1.0
    pairs = take_apart(
        target("gate_up", *pack(torch.ones(E, 1, H), b), rank=1), experts(interleaved=interleaved), "standard"
    )
    half: Projection = ("gate", "up")[row % 2 if interleaved else row // I]
    index = row // 2 if interleaved else row % I
    expected = torch.zeros(I, 1)
    expected[index] = 1.0
    for (projection, e), pair in pairs.items():
        assert pair.b.shape == (I, 1)
        assert torch.equal(pair.b, expected if (projection, e) == (half, 1) else torch.zeros(I, 1))


def test_gate_and_up_share_their_a_and_nothing_is_copied() -> None:
    stacked_a, stacked_b = pack(numbers(E, R, H), numbers(E, 2 * I, R))
    pairs = take_apart(target("gate_up", stacked_a, stacked_b), experts(), "standard")
    assert pairs["gate", 2].a is pairs["up", 2].a
    storages = {t.untyped_storage().data_ptr() for pair in pairs.values() for t in (pair.a, pair.b)}
    assert storages == {stacked_a.untyped_storage().data_ptr(), stacked_b.untyped_storage().data_ptr()}


def test_a15_block_diagonal_b_keeps_gate_and_up_apart() -> None:
    """An adapter of separate gate and up factors, as PEFT rewrites it: rank 2r, B block-diagonal."""
    gate_a, up_a = numbers(E, R, H, seed=1), numbers(E, R, H, seed=2)
    gate_b, up_b = numbers(E, I, R, seed=3), numbers(E, I, R, seed=4)
    b = torch.zeros(E, 2 * I, 2 * R)
    b[:, :I, :R], b[:, I:, R:] = gate_b, up_b
    pairs = take_apart(target("gate_up", *pack(torch.cat([gate_a, up_a], 1), b), rank=2 * R), experts(), "standard")
    for e in range(E):
        for projection, a_e, b_e in (("gate", gate_a[e], gate_b[e]), ("up", up_a[e], up_b[e])):
            expected = 0.5 * (b_e.double() @ a_e.double())
            torch.testing.assert_close(delta(pairs[projection, e]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", ["gate_up", "down"])
def test_reversed_files_give_the_same_deltas(half: str, interleaved: bool) -> None:
    """What PEFT 0.18 writes for parameters (E, out, in): A over out, B over in, delta = (B A)^T."""
    inputs, outputs = (H, 2 * I) if half == "gate_up" else (I, H)
    a, b = numbers(E, R, inputs), numbers(E, outputs, R, seed=1)
    modern = target(half, *pack(a, b))
    old = target(half, *pack(b.transpose(1, 2), a.transpose(1, 2)))
    assert (old.a.shape, old.b.shape) == ((R * E, outputs), (inputs, R * E))
    site = experts(interleaved=interleaved)
    from_modern, from_old = take_apart(modern, site, "standard"), take_apart(old, site, "reversed")
    assert from_old.keys() == from_modern.keys()
    for place, pair in from_old.items():
        assert torch.equal(delta(pair), delta(from_modern[place]))
        assert pair.a.shape == (R, inputs)


def test_experts_without_a_gate() -> None:
    a, b = numbers(E, R, H), numbers(E, I, R, seed=1)
    pairs = take_apart(target("up_proj", *pack(a, b)), experts(ExpertShape(E, H, I, gated=False)), "standard")
    assert pairs.keys() == {("up", e) for e in range(E)}
    assert torch.equal(pairs["up", 1].b, b[1])


def stacked(half: str, inputs: int, outputs: int) -> FusedTarget:
    return target(half, torch.zeros(R * E, inputs), torch.zeros(outputs, R * E))


def test_shapes_decide_the_orientation_whatever_the_version() -> None:
    for version in (None, "0.18.1", "0.21.2"):
        for transposed in (False, True):
            site = experts(transposed=transposed)
            both = [stacked("gate_up", H, 2 * I), stacked("down", I, H)]
            other = [stacked("gate_up", 2 * I, H), stacked("down", H, I)]
            assert orientation_of(adapter(version), [(t, site) for t in both]) == "standard"
            assert orientation_of(adapter(version), [(t, site) for t in other]) == "reversed"


@pytest.mark.parametrize(
    ("version", "transposed", "expected"),
    [
        (None, False, "reversed"),
        ("0.17.1", False, "reversed"),
        ("0.18.1", False, "reversed"),
        ("0.19.0", False, "standard"),
        ("0.21.2", False, "standard"),
        (None, True, "standard"),
        ("0.18.1", True, "standard"),
        ("0.21.2", True, "standard"),
    ],
)
def test_square_shapes_leave_it_to_the_version(version: str | None, transposed: bool, expected: str) -> None:
    site = experts(ExpertShape(E, 2 * I, I), transposed=transposed)  # H == 2I
    assert orientation_of(adapter(version), [(stacked("gate_up", 2 * I, 2 * I), site)]) == expected


@pytest.mark.parametrize("version", [None, "0.18.1", "0.21.2"])
def test_a_square_target_follows_the_others(version: str | None) -> None:
    site = experts(ExpertShape(E, 2 * I, I))  # H == 2I: gate_up is square, down is not
    square = stacked("gate_up", 2 * I, 2 * I), site
    assert orientation_of(adapter(version), [square, (stacked("down", I, 2 * I), site)]) == "standard"
    assert orientation_of(adapter(version), [(stacked("down", 2 * I, I), site), square]) == "reversed"


def test_unlike_orientations_are_refused() -> None:
    placed = [(stacked("gate_up", H, 2 * I), experts()), (stacked("down", H, I), experts())]
    with pytest.raises(AdapterMismatchError, match="shapes of the other orientation"):
        orientation_of(adapter(), placed)


def test_sizes_of_another_model() -> None:
    with pytest.raises(AdapterMismatchError, match="sizes of another model") as caught:
        orientation_of(adapter(), [(stacked("gate_up", H, 2 * I + 1), experts())])
    assert "[6, 6] and [8, 6]" in caught.value.expected
    assert "lora_A [6, 6], lora_B [9, 6]" in caught.value.found


@pytest.mark.parametrize("number", [E - 1, E + 1])
def test_a20_stacked_factors_of_another_number_of_experts(number: int) -> None:
    wrong = target("down", torch.zeros(R * number, I), torch.zeros(H, R * number))
    with pytest.raises(AdapterMismatchError, match=f"factors of {number} experts"):
        orientation_of(adapter(), [(wrong, experts())])
