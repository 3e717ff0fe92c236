"""Packing of pairs into tables, and entries rewritten in place."""

from __future__ import annotations

import pytest
import torch

from fanfold.errors import ArgumentError
from fanfold.kernels.lora.table import Entry, PackedEntries, new_table, pack_entries, pack_pairs, pad_pair, write_slot
from fanfold.spec import AdapterTable, LoraPair


def table(max_rank: int = 16) -> AdapterTable:
    return new_table(2, 3, 5, k=8, n=4, max_rank=max_rank, dtype=torch.float16, device="cpu")


def test_packing_fills_gaps_and_lets_the_last_of_two_win() -> None:
    packed = pack_entries([Entry(3, 10, 11, 0.5, 4), Entry(0, 20, 21, 2.0, 8), Entry(3, 30, 31, 1.5, 2)])
    assert packed is not None
    assert packed.a == [20, 0, 0, 30]
    assert packed.b == [21, 0, 0, 31]
    assert packed.scale == [2.0, 0.0, 0.0, 1.5]
    assert packed.rank == [8, 0, 0, 2]


def test_an_adapter_without_expert_pairs_gets_no_table() -> None:
    assert pack_entries([]) is None
    assert pack_pairs({}) is None


def test_pairs_are_packed_by_their_addresses() -> None:
    a, b = torch.zeros(8, 6), torch.zeros(5, 8)
    pairs = {2: LoraPair(a[:3], b[:, :3], 0.5), 0: LoraPair(a, b, 2.0)}
    entries = [Entry(e, a.data_ptr(), b.data_ptr(), pair.scale, pair.rank) for e, pair in pairs.items()]
    assert pack_pairs(pairs) == pack_entries(entries)
    addresses = [a.data_ptr(), 0, a.data_ptr()], [b.data_ptr(), 0, b.data_ptr()]
    assert pack_pairs(pairs) == PackedEntries(*addresses, [2.0, 0.0, 0.5], [8, 0, 3])
    with pytest.raises(ArgumentError, match="found expert -1, rank 8"):
        pack_pairs({-1: pairs[0]})


@pytest.mark.parametrize("entry", [Entry(-1, 1, 1, 1.0, 4), Entry(0, 1, 1, 1.0, 0), Entry(0, 1, 1, 1.0, 513)])
def test_entries_that_are_no_pair_of_an_expert(entry: Entry) -> None:
    with pytest.raises(ArgumentError, match=rf"pack_entries: found expert {entry.expert}, rank {entry.rank}"):
        pack_entries([entry])


def test_entries_change_in_place_and_leave_the_others() -> None:
    made = table()
    addresses = [getattr(made, name).data_ptr() for name in ("a", "b", "scale", "rank")]
    write_slot(made, 1, 2, pack_entries([Entry(1, 2**40, 2**41, 0.25, 16)]))
    write_slot(made, 0, 0, pack_entries([Entry(0, 5, 6, 1.0, 1)]))
    assert made.a[1, 2].tolist() == [0, 2**40, 0, 0, 0]
    assert made.scale[1, 2, 1].item() == 0.25
    write_slot(made, 1, 2, None)
    assert made.rank[1, 2].tolist() == [0] * 5
    assert made.b[0, 0].tolist() == [6, 0, 0, 0, 0]
    assert [getattr(made, name).data_ptr() for name in ("a", "b", "scale", "rank")] == addresses


@pytest.mark.parametrize(
    ("projection", "slot", "entry", "text"),
    [
        (2, 0, Entry(0, 1, 1, 1.0, 1), "found projection 2, slot 0; expected projections below 2 and slots below 3"),
        (0, 3, Entry(0, 1, 1, 1.0, 1), "found projection 0, slot 3"),
        (0, 0, Entry(5, 1, 1, 1.0, 1), "found 6 experts; expected at most 5"),
        (0, 0, Entry(0, 1, 1, 1.0, 17), "found rank 17; expected at most 16"),
    ],
)
def test_a20_entries_that_do_not_fit(projection: int, slot: int, entry: Entry, text: str) -> None:
    made = table()
    with pytest.raises(ArgumentError, match=text):
        write_slot(made, projection, slot, pack_entries([entry]))
    assert not made.a.any()


def test_a_rank_above_the_largest() -> None:
    with pytest.raises(ArgumentError, match="new_table: max_rank: found 513; expected at most 512"):
        table(513)


def test_stored_pairs_are_padded_with_zeros() -> None:
    pair = LoraPair(torch.ones(3, 6), torch.ones(5, 3), 1.0)
    a, b = pad_pair(pair, torch.float16, "cpu")
    assert a.shape == (8, 6)
    assert b.shape == (5, 8)
    assert (a.sum().item(), b.sum().item()) == (18.0, 15.0)
    assert not a[3:].any()
    assert not b[:, 3:].any()
