"""Adapters on plain Linears and on routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fanfold.errors import InferenceOnlyError, UnsupportedError
from fanfold.layers.linear import Linear, Router
from fanfold.lora.rows import Rows
from fanfold.spec import LoraPair
from samples import numbers

B, S, IN, OUT, E = 3, 4, 24, 20, 6


def pair(outputs: int = OUT, seed: int = 0, rank: int = 4, scale: float = 1.5) -> LoraPair:
    return LoraPair(numbers(rank, IN, seed=seed) / IN**0.5, numbers(outputs, rank, seed=seed + 1), scale)


def delta(x: Tensor, one: LoraPair) -> Tensor:
    return one.scale * (x @ one.a.T @ one.b.T)


def site(dtype: torch.dtype = torch.float32) -> tuple[Linear, nn.Linear, Rows]:
    rows, module = Rows(), nn.Linear(IN, OUT, dtype=dtype).requires_grad_(False)
    return Linear("attention.q_proj", module, rows, dtype), module, rows


def test_sizes_and_device_are_the_modules() -> None:
    place, module, _ = site()
    assert (place.in_features, place.out_features, place.device) == (IN, OUT, module.weight.device)


@pytest.mark.parametrize("flat", [False, True])
def test_each_row_of_the_batch_has_its_adapter(flat: bool) -> None:
    place, module, rows = site()
    x = numbers(B, S, IN)
    base = module(x)
    pairs = [pair(seed=0), pair(seed=10)]
    for slot, one in enumerate(pairs):
        place.put(slot, one)
    assert torch.equal(module(x), base)  # nothing chosen
    rows.set([1, -1, 0])
    rows.begin(B, S)
    found = module(x.flatten(0, 1)).view(B, S, OUT) if flat else module(x)
    assert torch.equal(found[1], base[1])
    torch.testing.assert_close(found[0], base[0] + delta(x[0], pairs[1]))
    torch.testing.assert_close(found[2], base[2] + delta(x[2], pairs[0]))


def test_fewer_positions_than_the_forward_has() -> None:
    """lm_head with logits_to_keep."""
    place, module, rows = site()
    place.put(0, pair())
    rows.set([0, -1, 0])
    rows.begin(B, S)
    x = numbers(B, S, IN)
    torch.testing.assert_close(module(x[:, -1:]), module(x)[:, -1:])
    rows.set(None)
    assert not torch.isclose(module(x[:, -1:])[0], module(x)[0, -1:] + delta(x[0, -1:], pair())).all()


def test_bf16_with_its_three_roundings() -> None:
    place, module, rows = site(torch.bfloat16)
    x, one = numbers(B, S, IN, dtype=torch.bfloat16), pair()
    place.put(0, LoraPair(one.a.bfloat16(), one.b.bfloat16(), one.scale))
    base = module(x)
    rows.set([0] * B)
    rows.begin(B, S)
    xa = (x.float() @ one.a.bfloat16().float().T).bfloat16()
    change = (xa.float() @ one.b.bfloat16().float().T).bfloat16()
    expected = (base.float() + one.scale * change.float()).bfloat16()
    torch.testing.assert_close(module(x), expected, rtol=2**-7, atol=1e-6)
    assert module(x).dtype == torch.bfloat16


def test_without_an_adapter_the_module_is_untouched() -> None:
    place, module, _ = site()
    assert not module._forward_hooks
    place.put(0, pair())
    place.put(3, pair())
    place.put(3, pair(seed=5))
    assert len(module._forward_hooks) == 1
    place.drop(0)
    assert len(module._forward_hooks) == 1
    place.drop(3)
    place.drop(3)
    assert not module._forward_hooks


def test_backward_raises_instead_of_losing_the_gradient() -> None:
    place, module, rows = site()
    place.put(0, pair())
    rows.set([0] * B)
    rows.begin(B, S)
    x = numbers(B, S, IN).requires_grad_()
    with pytest.raises(InferenceOnlyError):
        module(x).sum().backward()
    module.requires_grad_(True)
    with pytest.raises(InferenceOnlyError):
        module(numbers(B, S, IN)).sum().backward()


class TopK(nn.Module):
    """A router as transformers has them: a weight of its own, its product and top-k in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(E, IN, seed=3), requires_grad=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = linear(hidden.float(), self.weight.float())
        linear(logits, torch.eye(E))  # a later product is not the router's
        return logits.topk(2).indices, logits


class Matmul(TopK):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ self.weight.T
        return logits.topk(2).indices, logits


def test_router_deltas_are_added_before_top_k() -> None:
    rows, module = Rows(), TopK()
    place = Router("mlp.gate", module, rows, torch.float32)
    assert (place.in_features, place.out_features) == (IN, E)
    x, one = numbers(B * S, IN), pair(E, scale=4.0)
    base_ids, base = module(x)
    place.put(0, one)
    assert torch.equal(module(x)[1], base)
    rows.set([-1, 0, -1])
    rows.begin(B, S)
    ids, logits = module(x)
    assert torch.equal(logits[:S], base[:S])
    torch.testing.assert_close(logits[S : 2 * S], base[S : 2 * S] + delta(x[S : 2 * S], one), rtol=1e-5, atol=1e-5)
    assert torch.equal(ids, logits.topk(2).indices)
    assert not torch.equal(ids[S : 2 * S], base_ids[S : 2 * S])
    place.drop(0)
    assert "forward" not in vars(module)
    assert torch.equal(module(x)[1], base)


def test_a_router_without_a_linear_product_is_refused_not_ignored() -> None:
    rows, module = Rows(), Matmul()
    place: Any = Router("mlp.gate", module, rows, torch.float32)
    place.put(0, pair(E))
    with pytest.raises(UnsupportedError, match=r"router mlp\.gate: found a Matmul that does not multiply"):
        module(numbers(B * S, IN))
