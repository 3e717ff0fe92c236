"""Pairs in the dtype of their site."""

from __future__ import annotations

import pytest
import torch
from lora_files import FakeSite

from fanfold.errors import TensorError
from fanfold.lora.adapter import Projection
from fanfold.lora.convert import convert
from fanfold.spec import LoraPair


def pair(value: float = 1.2345678) -> LoraPair:
    return LoraPair(torch.full((2, 5), value), torch.full((2, 3), value).T, 0.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_linear_pair(dtype: torch.dtype) -> None:
    found = convert(pair(), FakeSite("q_proj", dtype))
    assert isinstance(found, LoraPair)
    assert torch.equal(found.a, pair().a.to(dtype))
    assert torch.equal(found.b, pair().b.to(dtype))
    assert (found.a.stride(), found.b.stride()) == ((5, 1), (8, 1))  # B [3, 2] in rows of 8
    memory = torch.as_strided(found.a, (8 * 5 + 3 * 8,), (1,))
    assert memory.count_nonzero() == 2 * 5 + 3 * 2
    assert memory.untyped_storage().nbytes() == memory.nbytes
    assert found.scale == 0.75  # an fp32 factor, whatever the dtype


def test_expert_pairs_go_on_sharing_their_a() -> None:
    a, up = torch.ones(2, 5), torch.ones(3, 2)
    pairs: dict[tuple[Projection, int], LoraPair] = {
        ("gate", 0): LoraPair(a, torch.zeros(3, 2), 1.0),
        ("up", 0): LoraPair(a, up, 2.0),
    }
    found = convert(pairs, FakeSite("experts", torch.bfloat16))
    assert not isinstance(found, LoraPair)
    assert found["gate", 0].a.data_ptr() == found["up", 0].a.data_ptr()
    assert found["gate", 0].a.untyped_storage().nbytes() == 2 * (8 * 5 + 2 * 3 * 8)
    assert found["up", 0].b.dtype == torch.bfloat16
    assert found["up", 0].scale == 2.0


def test_values_too_large_for_the_dtype_are_refused() -> None:
    assert isinstance(convert(pair(70000.0), FakeSite("q_proj", torch.bfloat16)), LoraPair)
    with pytest.raises(TensorError, match=r"values up to 70000; expected values within torch\.float16") as caught:
        convert(pair(70000.0), FakeSite("q_proj", torch.float16))
    assert "q_proj" in caught.value.what


def test_pairs_in_the_order_of_the_experts_hidden_values() -> None:
    """Shared B of gate and up, and a shared A of down, become each expert's own; A of gate and up stays shared."""
    hidden, inner, rank, experts = 6, 5, 3, 3
    order = torch.stack(
        [torch.randperm(inner, generator=torch.Generator().manual_seed(e)) for e in range(experts)]
    ).int()
    numbers = torch.arange(rank * hidden * inner, dtype=torch.float32).view(rank, hidden, inner)
    a, b = numbers[:, :, 0].contiguous(), numbers[:, 0].T.contiguous()
    down_a, down_b = numbers[:, 1].contiguous(), numbers[:, :, 1].T.contiguous()
    pairs: dict[tuple[Projection, int], LoraPair] = {}
    for e in range(experts):
        pairs["gate", e] = pairs["up", e] = LoraPair(a, b, 1.0)
        pairs["down", e] = LoraPair(down_a, down_b + e, 2.0)
    site = FakeSite("experts", torch.float32)
    site.hidden_order = order  # type: ignore[attr-defined]
    found = convert(pairs, site)
    assert not isinstance(found, LoraPair)
    for e in range(experts):
        for projection in ("gate", "up"):
            assert torch.equal(found[projection, e].b, b[order[e].long()])
            assert torch.equal(found[projection, e].a, a)
            assert found[projection, e].a.data_ptr() == found["gate", 0].a.data_ptr()
        assert torch.equal(found["down", e].a, down_a[:, order[e].long()])
        assert torch.equal(found["down", e].b, down_b + e)
    # A; down's A; B of gate and up, and of down
    stored = 8 * hidden + experts * 8 * inner + experts * (inner * 8 + hidden * 8)
    assert found["gate", 0].a.untyped_storage().nbytes() == 4 * stored
