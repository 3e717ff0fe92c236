"""The portable layer step by step, adapters between its products: in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fanfold.layers.reference import LayerPairs, layer
from fanfold.lora.convert import convert
from fanfold.lora.site import Site
from fanfold.spec import Activation, ExpertWeights
from graphs import check_replays, dirty_memory, same_bits
from samples import SILU, numbers, on, random_experts, random_pairs, random_routing, relative_error

E, H, INNER, K, SLOTS = 4, 64, 32, 2, 3


@dataclass(frozen=True)
class Place:
    """Where pairs of a test go."""

    path: str
    dtype: torch.dtype
    device: torch.device


def layer_of(name: str, device: str, activation: Activation, **options: Any) -> tuple[Any, ExpertWeights]:
    """The layer, and its weights on the CPU."""
    from fanfold.layers.implementations.grouped import Grouped

    weights = random_experts(name, E, H, INNER, gated=activation.gated)
    return Grouped.prepared(
        on(weights, device), activation, **{"batch_invariant": False, "activation_format": "plain", **options}
    ), weights


def adapters_of(pairs: LayerPairs, device: str, dtype: torch.dtype, gated: bool, max_rank: int = 32) -> Any:
    """Tables that hold the pairs, and what keeps them alive."""
    from fanfold.layers.tables import ExpertTables
    from fanfold.spec import ExpertShape

    tables = ExpertTables(ExpertShape(E, H, INNER, gated), SLOTS, max_rank, dtype, torch.device(device))
    kept: list[Any] = []
    place = cast("Site", Place("experts", dtype, torch.device(device)))
    for slot in range(SLOTS):
        of_slot = {(p, e): pair for p, of in pairs.items() for (s, e), pair in of.items() if s == slot}
        kept.append(convert(cast("Any", of_slot), place))
        tables.write(slot, kept[-1])
    return tables, kept


def batch(tokens: int, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    """x, ids (one of no expert), scores and adapter ids (base, slots, and one that is no slot's)."""
    ids, scores = random_routing(tokens, K, E, seed)
    ids[0, 1] = -1
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, SLOTS, (tokens,), generator=generator).int()
    slots[tokens // 2] = SLOTS + 4
    return [part.to(device) for part in (numbers(tokens, H, seed=seed, dtype=dtype), ids, scores, slots)]


def run(made: Any, tables: Any, given: Sequence[Tensor]) -> Tensor:
    x, ids, scores, slots = given
    return made.run(x, ids, scores, tables.adapters(slots))


@pytest.mark.parametrize(
    ("name", "kind", "tokens", "few_rows"),
    [
        ("fp16", "silu", 1, 128),
        ("mxfp4", "relu2", 3, 128),
        ("gptq4-g32-actorder", "silu", 3, 4),  # with a plan of its own
        pytest.param("fp16", "silu", 80, 128, marks=pytest.mark.gpu),
    ],
)
def test_adapters_are_those_of_the_reference(
    name: str, kind: str, tokens: int, few_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fanfold.layers.implementations.folding.FEW_ROWS", few_rows)
    activation = Activation(cast("Any", kind))
    made, weights = layer_of(name, device, activation)
    pairs = random_pairs(weights, SLOTS, ranks=(1, 4, 12, 16), dtype=torch.float16)
    tables, kept = adapters_of(pairs, device, torch.float16, activation.gated)
    given = batch(tokens, torch.float16, device)
    dirty_memory(device)
    found = run(made, tables, given)
    x, ids, scores, slots = (part.cpu() for part in given)
    exact = layer(x.float(), ids, scores, weights, activation, pairs, slots)
    plain = layer(x, ids, scores, weights, activation, pairs, slots)
    base = layer(x.float(), ids, scores, weights, activation)
    assert relative_error(found.cpu(), exact) < 2 * relative_error(plain, exact)
    changed = (slots >= 0) & (slots < SLOTS)
    if tokens > 1:
        assert relative_error(base[changed], exact[changed]) > 0.05
        without = made.run(*given[:3], None)
        assert same_bits(found[~changed.to(device)], without[~changed.to(device)])
        assert int(tables.unknown) == 1
    assert len(kept) == SLOTS


def test_entries_that_change_are_seen(device: str) -> None:
    made, weights = layer_of("fp16", device, SILU)
    pairs = random_pairs(weights, SLOTS, dtype=torch.float16)
    tables, kept = adapters_of(pairs, device, torch.float16, True)
    given = batch(1, torch.float16, device)
    given[3].fill_(1)
    before = run(made, tables, given)
    tables.write(1, kept[2])
    given[3].fill_(2)
    other = run(made, tables, given)
    given[3].fill_(1)
    assert same_bits(run(made, tables, given), other)
    assert not torch.equal(other, before)
    tables.write(1, {})
    assert same_bits(run(made, tables, given), made.run(*given[:3], None))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_replays_with_other_adapters(tokens: int) -> None:
    made, weights = layer_of("bf16", "cuda", SILU)
    pairs = random_pairs(weights, SLOTS, dtype=torch.bfloat16)
    tables, kept = adapters_of(pairs, "cuda", torch.bfloat16, True)
    batches = [batch(tokens, torch.bfloat16, "cuda", seed) for seed in range(4)]
    check_replays(lambda *given: [run(made, tables, given)], batches)
    assert len(kept) == SLOTS
