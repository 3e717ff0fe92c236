"""lora_fold: three roundings, row by row, and base rows untouched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.lora.reference import lora_fold
from fanfold.spec import LoraPair

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
R, K, N, SLOTS, EXPERTS = 40, 24, 20, 3, 4


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(rank: int, seed: int, scale: float = 1.7, dtype: torch.dtype = torch.float32) -> LoraPair:
    return LoraPair(numbers(rank, K, seed=seed, dtype=dtype), numbers(N, rank, seed=seed + 1, dtype=dtype), scale)


def bank(dtype: torch.dtype) -> dict[tuple[int, int], LoraPair]:
    """Unlike ranks and scales; expert 3 of slot 1 and all of slot 2 but one expert have no pair."""
    ranks = {(0, 0): 1, (0, 1): 4, (0, 2): 5, (0, 3): 16, (1, 0): 8, (1, 1): 3, (1, 2): 100, (2, 3): 7}
    return {place: pair(rank, 10 * number, 0.3 + number, dtype) for number, (place, rank) in enumerate(ranks.items())}


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    slots = torch.randint(-1, SLOTS, (R,), generator=g).int()
    experts = torch.randint(0, EXPERTS, (R,), generator=g).int()
    return numbers(R, N, seed=1, dtype=dtype), numbers(R, K, seed=2, dtype=dtype), slots, experts


def by_hand(y: Tensor, x: Tensor, pair: LoraPair) -> Tensor:
    """One row: [N] from [N] and [K], with sums in fp64 (so that only the three roundings show)."""
    xa = (pair.a.double() @ x.double()).float().to(y.dtype)
    delta = (pair.b.double() @ xa.double()).float().to(y.dtype)
    return (y.float() + torch.tensor(pair.scale, dtype=torch.float32) * delta.float()).to(y.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_equal_a_fold_of_each_by_hand(dtype: torch.dtype) -> None:
    y, x, slots, experts = batch(dtype)
    pairs, base = bank(dtype), y.clone()
    lora_fold(y, x, pairs, slots, experts)
    touched = 0
    for row in range(R):
        place = int(slots[row]), int(experts[row])
        if place not in pairs:
            assert torch.equal(y[row], base[row])
            continue
        touched += 1
        expected = by_hand(base[row], x[row], pairs[place]).float()
        error = (y[row].float() - expected).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * expected.abs().max()
        assert not torch.equal(y[row], base[row])
    assert 10 < touched < R


# Cases in which leaving out one step gives another number (bf16 keeps 8 bits: 1.004.. rounds to 1 + 2^-7).
SMALL = 2.0**-8 + 2.0**-10
STEPS = {
    # A [r, K], B [1, r], scale, y, expected; x = [1, 1]
    "xa is rounded": ([[1.0, SMALL], [-1.0, 0.0]], [1.0, 1.0], 1.0, 0.0, 2.0**-7),  # else SMALL
    "delta is rounded": ([[1.0, 0.0], [SMALL, 0.0]], [1.0, 1.0], 3.0, 0.0, 3.03125),  # else 3.015625
    "the scale is not rounded": ([[1.0, 0.0]], [1.0], 1 + 2.0**-9, -1.0, 2.0**-9),  # else 0
    "the sum is rounded": ([[1.0, 0.0]], [1.0], 3.0, 256.0, 260.0),  # 259, between 258 and 260
}


@pytest.mark.parametrize("step", STEPS)
def test_each_rounding(step: str) -> None:
    a, b, scale, start, expected = STEPS[step]
    one = LoraPair(torch.tensor(a).bfloat16(), torch.tensor([b]).bfloat16(), scale)
    y, zero = torch.tensor([[start]]).bfloat16(), torch.tensor([0])
    lora_fold(y, torch.ones(1, 2).bfloat16(), {(0, 0): one}, zero, zero)
    assert y.item() == expected


def test_the_multiply_and_the_add_round_separately() -> None:
    one = LoraPair(torch.tensor([[1 + 2.0**-12]]), torch.ones(1, 1), 1 + 2.0**-12)
    y, zero = torch.tensor([[-1 - 2.0**-11]]), torch.tensor([0])
    lora_fold(y, torch.ones(1, 1), {(0, 0): one}, zero, zero)
    assert y.item() == 0.0  # fused: 2^-24


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_neither_on_the_others_nor_on_its_place(dtype: torch.dtype) -> None:
    y, x, slots, experts = batch(dtype)
    pairs, base = bank(dtype), y.clone()
    lora_fold(y, x, pairs, slots, experts)
    order = torch.randperm(R, generator=torch.Generator().manual_seed(7))
    shuffled = base[order].clone()
    lora_fold(shuffled, x[order], pairs, slots[order], experts[order])
    assert torch.equal(shuffled, y[order])
    for row in range(R):
        alone = base[row : row + 1].clone()
        lora_fold(alone, x[row : row + 1], pairs, slots[row : row + 1], experts[row : row + 1])
        assert torch.equal(alone[0], y[row])
        others = slots.clone()
        others[torch.arange(R) != row] = -1
        mixed = base.clone()
        lora_fold(mixed, x, pairs, others, experts)
        assert torch.equal(mixed[row], y[row])


def test_a1_a2_base_rows_keep_their_bits() -> None:
    y, x, slots, experts = batch(torch.bfloat16)
    pairs, base = bank(torch.bfloat16), y.clone()
    lora_fold(y, x, pairs, torch.full_like(slots, -1), experts)
    assert torch.equal(y, base)
    base[0, 0], y = float("nan"), base.clone()
    y[0, 0] = float("nan")
    lora_fold(y, x, {}, slots, experts)
    assert torch.equal(y.view(torch.int16)[0], base.view(torch.int16)[0])


def test_a3_a4_every_slot_and_the_base_in_one_batch() -> None:
    pairs = {(slot, 0): pair(2, slot) for slot in range(4)}
    slots = torch.tensor([3, -1, 0, 2, -1, 1], dtype=torch.int32)
    y, x = torch.zeros(6, N), numbers(6, K)
    lora_fold(y, x, pairs, slots, torch.zeros(6, dtype=torch.int32))
    for row, slot in enumerate(slots.tolist()):
        expected = torch.zeros(N) if slot < 0 else by_hand(torch.zeros(N), x[row], pairs[slot, 0])
        torch.testing.assert_close(y[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slot", [-1, -2, 1, 3, 8, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("expert", [-1, 0, 4, 5, 100])
def test_a18_ids_outside_touch_nothing(slot: int, expert: int) -> None:
    """No id wraps around to another adapter's expert, e.g. -1 + slot * E."""
    pairs = {(0, expert): pair(2, expert) for expert in range(4)} | {(2, e): pair(2, e) for e in range(4)}
    y, x = numbers(2, N), numbers(2, K)
    base = y.clone()
    lora_fold(y, x, pairs, torch.tensor([slot, 0]), torch.tensor([expert, -1]))
    assert torch.equal(y, base)


def test_a15_gate_and_up_halves_of_one_output_take_their_own_pairs() -> None:
    gate, up = pair(3, 1), pair(3, 5)
    both, x = numbers(4, 2 * N), numbers(4, K)
    base = both.clone()
    zeros = torch.zeros(4, dtype=torch.int64)
    lora_fold(both[:, :N], x, {(0, 0): gate}, zeros, zeros)
    lora_fold(both[:, N:], x, {(0, 0): up}, zeros, zeros)
    for row in range(4):
        torch.testing.assert_close(both[row, :N], by_hand(base[row, :N], x[row], gate), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(both[row, N:], by_hand(base[row, N:], x[row], up), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 12, 16, 24, 48, 64, 100, 128, 256, 320, 512])
def test_a10_ranks(rank: int) -> None:
    y, x = torch.zeros(3, N), numbers(3, K)
    one = pair(rank, rank, scale=0.5)
    lora_fold(y, x, {(0, 0): one}, torch.tensor([0, -1, 0]), torch.zeros(3, dtype=torch.int32))
    expected = 0.5 * (x.double() @ one.a.double().T @ one.b.double().T)
    expected[1] = 0
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)


def test_x_rows_gather_the_input() -> None:
    y, x, slots, experts = batch(torch.bfloat16)
    tokens = torch.randint(0, 7, (R,), generator=torch.Generator().manual_seed(3))
    gathered, pairs = y.clone(), bank(torch.bfloat16)
    lora_fold(y, x[:7][tokens], pairs, slots, experts)
    lora_fold(gathered, x[:7], pairs, slots, experts, x_rows=tokens.int())
    assert torch.equal(gathered, y)


def test_pairs_may_be_of_another_dtype() -> None:
    y, x = torch.zeros(1, N, dtype=torch.bfloat16), numbers(1, K, dtype=torch.bfloat16)
    one = pair(2, 1)
    zero = torch.tensor([0])
    lora_fold(y, x, {(0, 0): one}, zero, zero)
    assert torch.equal(y[0], by_hand(torch.zeros(N, dtype=torch.bfloat16), x[0], one))


def test_no_rows() -> None:
    y = torch.zeros(0, N)
    none = torch.zeros(0, dtype=torch.int32)
    lora_fold(y, torch.zeros(0, K), bank(torch.float32), none, none)
    assert y.shape == (0, N)


def wrong() -> dict[str, tuple[dict[str, Tensor], str]]:
    y, x, slots, experts = batch(torch.float32)
    return {
        "x": ({"x": x[:-1]}, rf"lora_fold: x: found torch\.float32 \[{R - 1}, {K}\]"),
        "x-dtype": ({"x": x.half()}, rf"found torch\.float16 \[{R}, {K}\]; expected torch\.float32"),
        "y": ({"y": y[1:]}, "lora_fold: y:"),
        "y-dims": ({"y": y[0]}, "lora_fold: y:"),
        "experts": ({"experts": experts[1:]}, "lora_fold: experts:"),
        "x_rows": ({"x_rows": slots[1:]}, "lora_fold: x_rows:"),
        "inputs": ({"x": x[:, 1:]}, r"lora_fold: A of \(\d, \d\): found torch\.float32 \[\d+, 24\]"),
        "outputs": ({"y": y[:, 1:]}, r"lora_fold: B of \(\d, \d\)"),
    }


@pytest.mark.parametrize("case", wrong())
def test_arguments_that_do_not_go_together(case: str) -> None:
    changed, text = wrong()[case]
    y, x, slots, experts = batch(torch.float32)
    arguments = {"y": y, "x": x, "slots": slots, "experts": experts} | changed
    with pytest.raises(ArgumentError, match=text):
        lora_fold(pairs=bank(torch.float32), **arguments)
