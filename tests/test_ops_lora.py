"""torch.ops.fanfold.lora_*: contracts, and together the fold of the reference, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold import ops
from fanfold.errors import InferenceOnlyError
from fanfold.kernels.lora.reference import lora_fold
from fanfold.kernels.lora.sizes import padded_rank, windows
from fanfold.kernels.lora.table import Entry, new_table, pack_entries, pad_pair, write_slot
from fanfold.ops.lora import table_arguments
from fanfold.spec import LoraPair
from fanfold.spec.adapters import AdapterTable
from graphs import same_bits
from samples import numbers, random_routing

PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
T, TOP_K, E, SLOTS, K, N, RANK = 11, 2, 5, 3, 48, 40, 16
TILE = 16
NAMES = ["lora_plan", "lora_shrink_grouped", "lora_expand_grouped", "lora_shrink_gather", "lora_expand_gather"]


@dataclass
class Case:
    """One projection pair (gate and up) of a layer, and a batch."""

    pairs: list[dict[tuple[int, int], LoraPair]]
    table: AdapterTable
    kept: list[Any]
    x: Tensor
    y: Tensor
    ids: Tensor
    adapter_ids: Tensor


def case(place: str, dtype: torch.dtype = torch.float16) -> Case:
    table = new_table(2, SLOTS, E, k=K, n=N, max_rank=RANK, dtype=dtype, device=place)
    pairs: list[dict[tuple[int, int], LoraPair]] = [{}, {}]
    kept: list[Any] = []
    for p in range(2):
        for slot in range(SLOTS):
            entries: list[Entry] = []
            for e in range(E):
                at = 100 * p + 10 * slot + e
                if at % 4 == 3:  # no such pair
                    continue
                rank = (1, 5, 8, 16)[at % 4 + (at % 7 == 0)]
                a, b = numbers(rank, K, seed=at) / K**0.5, numbers(N, rank, seed=at + 1)
                pair = LoraPair(a.to(dtype).to(place), b.to(dtype).to(place), 0.3 + at % 3)
                pairs[p][slot, e] = pair
                kept.append(pad_pair(pair, dtype, place))
                entries.append(Entry(e, kept[-1][0].data_ptr(), kept[-1][1].data_ptr(), pair.scale, rank))
            write_slot(table, p, slot, pack_entries(entries))
    ids, _ = random_routing(T, TOP_K, E)
    ids[0, 1], ids[4, 0] = -1, E
    slots = torch.arange(T).int() % (SLOTS + 1) - 1
    slots[5] = SLOTS + 2  # no slot's
    x, y = numbers(T, K, dtype=dtype), numbers(T * TOP_K, 2 * N, seed=3, dtype=dtype)
    return Case(pairs, table, kept, *(part.to(place) for part in (x, y, ids, slots)))


def folded(given: Case) -> Tensor:
    """y by row, as the reference folds it."""
    y = given.y.cpu().clone()
    rows = torch.arange(T * TOP_K)
    slots, experts = given.adapter_ids.cpu()[rows // TOP_K], given.ids.cpu().flatten()
    for p in range(2):
        pairs = {place: LoraPair(pair.a.cpu(), pair.b.cpu(), pair.scale) for place, pair in given.pairs[p].items()}
        lora_fold(y[:, p * N : (p + 1) * N], given.x.cpu(), pairs, slots, experts, x_rows=rows // TOP_K)
    return y


def planned(given: Case, unknown: Tensor | None = None) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of a work, and the sorted rows."""
    offsets, sorted_rows, _, _ = torch.ops.fanfold.plan_sort(given.ids, E, 16)
    work = torch.ops.fanfold.lora_plan(offsets, sorted_rows, given.adapter_ids, TOP_K, SLOTS, TILE, -1, unknown)
    return (*work, TOP_K, SLOTS, TILE), sorted_rows


def scratch(given: Case, cap: int) -> Tensor:
    return given.x.new_full((2, cap, padded_rank(RANK)), torch.nan)


def arguments(name: str, place: str) -> tuple[Any, ...]:
    given, unknown = case(place), torch.zeros(1, dtype=torch.int32, device=place)
    table, cap = table_arguments(given.table), T * TOP_K
    work, sorted_rows = planned(given)
    offsets, *_ = torch.ops.fanfold.plan_sort(given.ids, E, 16)
    rows = given.ids.flatten(), given.adapter_ids, None, TOP_K, -1
    xa = scratch(given, cap).nan_to_num_()
    return {
        "lora_plan": (offsets, sorted_rows, given.adapter_ids, TOP_K, SLOTS, TILE, -1, unknown),
        "lora_shrink_grouped": (given.x, *table, *work, xa, True, 0, cap),
        "lora_expand_grouped": (given.y, *table, *work, xa, 0, cap, True),
        "lora_shrink_gather": (given.x, *table, *rows, xa, True, 0, cap, unknown),
        "lora_expand_gather": (given.y, *table, *rows, xa, 0, cap, False),
    }[name]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
@PLACES
def test_opcheck(place: str, name: str) -> None:
    assert name in ops.OPS
    op = getattr(torch.ops.fanfold, name).default
    torch.library.opcheck(op, arguments(name, place), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("cap", [T * TOP_K, 7])
def test_grouped_windows_are_the_fold_of_the_reference(cap: int) -> None:
    given = case("cpu")
    unknown = torch.zeros(1, dtype=torch.int32)
    work, _ = planned(given, unknown)
    y, table = given.y.clone(), table_arguments(given.table)
    for start, end in windows(T * TOP_K, cap):
        xa = scratch(given, cap)
        torch.ops.fanfold.lora_shrink_grouped(given.x, *table, *work, xa, True, start, end)
        torch.ops.fanfold.lora_expand_grouped(y, *table, *work, xa, start, end, True)
    assert same_bits(y, folded(given))
    assert not torch.equal(y, given.y)
    assert int(unknown) == 1


def test_gathered_is_the_fold_of_the_reference() -> None:
    given = case("cpu")
    unknown = torch.zeros(1, dtype=torch.int32)
    y, table = given.y.clone(), table_arguments(given.table)
    rows = given.ids.flatten(), given.adapter_ids, None, TOP_K, -1
    xa = scratch(given, T * TOP_K)
    torch.ops.fanfold.lora_shrink_gather(given.x, *table, *rows, xa, True, 0, T * TOP_K, unknown)
    torch.ops.fanfold.lora_expand_gather(y, *table, *rows, xa, 0, T * TOP_K, False)
    assert same_bits(y, folded(given))
    assert int(unknown) == 1


@pytest.mark.gpu
def test_on_a_gpu_both_forms_have_the_same_bits_and_base_rows_are_not_touched() -> None:
    given = case("cuda", torch.bfloat16)
    table, whole = table_arguments(given.table), T * TOP_K
    work, _ = planned(given)
    rows = given.ids.flatten(), given.adapter_ids, None, TOP_K, -1
    grouped, gathered, xa = given.y.clone(), given.y.clone(), scratch(given, whole)
    torch.ops.fanfold.lora_shrink_grouped(given.x, *table, *work, xa, True, 0, whole)
    torch.ops.fanfold.lora_expand_grouped(grouped, *table, *work, xa, 0, whole, True)
    xa.fill_(torch.nan)
    torch.ops.fanfold.lora_shrink_gather(given.x, *table, *rows, xa, True, 0, whole, None)
    torch.ops.fanfold.lora_expand_gather(gathered, *table, *rows, xa, 0, whole, False)
    assert same_bits(grouped, gathered)
    expected = folded(given)
    torch.testing.assert_close(grouped.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
    untouched = (expected == given.y.cpu()).all(1)
    assert untouched.any()
    assert torch.equal(grouped.cpu()[untouched], given.y.cpu()[untouched])


@pytest.mark.parametrize("name", NAMES[1:])
def test_gradients_are_refused(name: str) -> None:
    first, *rest = arguments(name, "cpu")
    with pytest.raises(InferenceOnlyError, match="the LoRA fold"):
        getattr(torch.ops.fanfold, name)(first.clone().requires_grad_(), *rest)
