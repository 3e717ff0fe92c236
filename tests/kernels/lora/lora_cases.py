"""Random batches of the fold: routing, adapters, tables, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fanfold.kernels.lora import reference
from fanfold.kernels.lora.reference import lora_fold
from fanfold.kernels.lora.table import Entry, new_table, pack_entries, pad_pair, write_slot
from fanfold.routing.reference import plan_sort
from fanfold.spec import LoraPair, Route
from fanfold.spec.adapters import AdapterRows, AdapterTable, AdapterWork

Bank = dict[tuple[int, int], LoraPair]  # (slot, expert) -> pair


@dataclass
class Layer:
    """Banks of one layer and the table that points to them.

    Attributes:
        banks: one a projection.
        table: of all projections.
        kept: the stored pairs, by the addresses that the table holds.
    """

    banks: list[Bank]
    table: AdapterTable
    kept: list[Tensor]


def random_pair(n: int, k: int, rank: int, g: torch.Generator, dtype: torch.dtype) -> LoraPair:
    scale = float(torch.rand((), generator=g) * 2 + 0.3)
    a = torch.randn(rank, k, generator=g) / k**0.5
    b = torch.randn(n, rank, generator=g) / rank**0.5
    return LoraPair(a.to(dtype), b.to(dtype), scale)


def random_bank(
    slots: int, experts: int, n: int, k: int, ranks: Sequence[int], seed: int, dtype: torch.dtype, there: float = 0.8
) -> Bank:
    """Pairs of unlike ranks and scales; some (slot, expert) have none."""
    g = torch.Generator().manual_seed(seed)
    bank: Bank = {}
    for slot in range(slots):
        for expert in range(experts):
            rank = ranks[int(torch.randint(len(ranks), (), generator=g))]
            pair = random_pair(n, k, rank, g, dtype)
            if float(torch.rand((), generator=g)) < there:
                bank[slot, expert] = pair
    return bank


def make_layer(
    banks: list[Bank], slots: int, experts: int, n: int, k: int, max_rank: int, dtype: torch.dtype, device: str
) -> Layer:
    """A table of `experts` entries a slot; pairs of experts beyond it are left out."""
    table = new_table(len(banks), slots, experts, k=k, n=n, max_rank=max_rank, dtype=dtype, device=device)
    layer = Layer(banks, table, [])
    for projection, bank in enumerate(banks):
        for slot in range(slots):
            write(layer, projection, slot, {e: pair for (s, e), pair in bank.items() if s == slot})
    return layer


def write(layer: Layer, projection: int, slot: int, pairs: dict[int, LoraPair]) -> None:
    """Replaces a slot's pairs of one projection, in the bank and in the table."""
    bank, table = layer.banks[projection], layer.table
    for place in [place for place in bank if place[0] == slot]:
        del bank[place]
    entries: list[Entry] = []
    for expert, pair in pairs.items():
        bank[slot, expert] = pair
        a, b = pad_pair(pair, table.dtype, table.a.device)
        layer.kept += [a, b]
        entries.append(Entry(expert, a.data_ptr(), b.data_ptr(), pair.scale, pair.rank))
    write_slot(table, projection, slot, pack_entries(entries))


@dataclass
class Batch:
    """Rows of a batch.

    Attributes:
        ids: int32 [T, k].
        adapters: int32 [T].
        route: the plan.
    """

    ids: Tensor
    adapters: Tensor
    route: Route

    @property
    def rows(self) -> int:
        return self.ids.numel()

    def at_positions(self, of_rows: Tensor) -> Tensor:
        """Values of rows in sorted order."""
        return of_rows[self.route.sorted_rows.long()]


def random_batch(
    tokens: int, top_k: int, experts: int, slots: int, device: str, seed: int = 0, odd_ids: bool = True
) -> Batch:
    """Distinct experts a token; adapter ids from the base to one beyond the slots, both met."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].int()
    adapters = torch.randint(-1, slots + (2 if odd_ids else 0), (tokens,), generator=g).int()
    if odd_ids and tokens > 3:
        ids[1, 0], ids[2, 0] = -1, experts
        adapters[:3] = torch.tensor([-1, slots, 0])
    return Batch(ids.to(device), adapters.to(device), plan_sort(ids.to(device), experts))


def expected(layer: Layer, batch: Batch, y: Tensor, x: Tensor, gather_x: bool, sorted_order: bool) -> Tensor:
    """The reference's fold of y [R, P*N], at rows or (sorted_order) at positions; x likewise unless it is gathered."""
    rows = batch.route.sorted_rows.long() if sorted_order else torch.arange(batch.rows, device=y.device)
    experts = batch.ids.flatten()[rows]
    token = rows // batch.ids.shape[1]
    slots = torch.where(batch.adapters < layer.table.slots, batch.adapters, -1)[token]
    out, n = y.clone(), layer.table.n
    for projection, bank in enumerate(layer.banks):
        known = {place: pair for place, pair in bank.items() if place[1] < layer.table.a.shape[2]}
        on = {place: replace(p, a=p.a.to(y.device), b=p.b.to(y.device)) for place, p in known.items()}
        half = out[:, projection * n : (projection + 1) * n]
        lora_fold(half, x, on, slots, experts, x_rows=token if gather_x else None)
    return out


def plan(batch: Batch, layer: Layer, tile: int = 16) -> AdapterWork:
    """By the kernel on a GPU, else by the reference, which is fast (test_lora_plan.py compares them)."""
    if batch.ids.is_cuda:
        from fanfold.kernels.lora.plan import order_rows

        return order_rows(batch.route, batch.adapters, layer.table.slots, tile)
    return reference.order_rows(batch.route, batch.adapters, layer.table.slots, tile)


def single(batch: Batch, sorted_order: bool) -> AdapterRows:
    rows = batch.route.sorted_rows if sorted_order else None
    return AdapterRows(batch.ids.flatten(), batch.adapters, batch.ids.shape[1], rows)


def errors(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Relative error of norms, and the largest error in units of the dtype's eps at the row's largest value."""
    difference = (found.double() - wanted.double()).abs()
    size = wanted.double().abs().amax(-1, keepdim=True).clamp_min(1e-6)
    relative = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
    return relative, float((difference / size).max()) / torch.finfo(found.dtype).eps


def check_close(found: Tensor, wanted: Tensor) -> None:
    """Sums in another order: xa and delta may round to a neighbour, and y then does too."""
    assert found.dtype == wanted.dtype
    relative, worst = errors(found, wanted)
    assert relative <= 0.5 * torch.finfo(found.dtype).eps, (relative, worst)
    assert worst <= 4, (relative, worst)
