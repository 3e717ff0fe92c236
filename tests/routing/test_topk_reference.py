"""The reference of top-k: by hand, against transformers' routers, and the faults of others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from fanfold.errors import ArgumentError
from fanfold.routing.reference import route_topk
from fanfold.spec.router import Router

GLM4 = Router(6, "sigmoid", True, scaling=2.5)
DEEPSEEK_V3 = Router(6, "sigmoid", True, n_group=8, topk_group=4, group_score="top2_sum", scaling=2.5)


@pytest.mark.parametrize(
    ("module", "fields", "router"),
    [
        (MixtralTopKRouter, {}, Router(6, renormalize=True)),
        (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, Router(6, renormalize=True)),
        (Qwen3MoeTopKRouter, {"norm_topk_prob": False}, Router(6)),
        (OlmoeTopKRouter, {"norm_topk_prob": False}, Router(6)),
        (GptOssTopKRouter, {}, Router(6, "softmax_topk")),
        (DeepseekV2TopkRouter, {"topk_method": "greedy", "n_group": 1, "topk_group": 1}, Router(6, scaling=2.5)),
        (
            DeepseekV2TopkRouter,
            {"topk_method": "group_limited_greedy"},
            Router(6, n_group=8, topk_group=4, scaling=2.5),
        ),
        (DeepseekV3TopkRouter, {"norm_topk_prob": True}, DEEPSEEK_V3),
        (Glm4MoeTopkRouter, {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}, GLM4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_equals_the_routers_of_transformers(module: Any, fields: dict[str, Any], router: Router) -> None:
    torch.manual_seed(0)
    sizes = {"num_experts_per_tok": 6, "num_experts": 48, "num_local_experts": 48, "hidden_size": 48}
    config = SimpleNamespace(**{**sizes, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, **fields})
    gate = module(config)
    gate.weight.data = torch.eye(48)  # so that logits are the hidden states
    bias = getattr(gate, "e_score_correction_bias", None)
    if bias is not None:
        bias.copy_(torch.randn(48))
    logits = torch.randn(500, 48)
    with torch.no_grad():
        got_logits, weights, ids = gate(logits)
    assert torch.equal(got_logits, logits)
    found_ids, found_weights = route_topk(logits, router, bias)
    assert torch.equal(found_ids.sort(-1).values, ids.sort(-1).values.int())
    dense = torch.zeros(2, 500, 48).scatter_(
        -1, torch.stack([ids, found_ids.long()]), torch.stack([weights, found_weights])
    )
    torch.testing.assert_close(dense[0], dense[1], rtol=1e-6, atol=1e-8)


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).log()  # softmax 0, 2/3, 1/3
    ids, weights = route_topk(logits, Router(2))
    assert ids.tolist() == [[1, 2]]
    assert ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3]]))
    logits = torch.tensor([[0.0, 3.0, 1.0]]).log()
    torch.testing.assert_close(route_topk(logits, Router(1))[1], torch.tensor([[0.75]]))
    torch.testing.assert_close(route_topk(logits, Router(1, renormalize=True))[1], torch.tensor([[1.0]]))
    torch.testing.assert_close(route_topk(logits, Router(2, "softmax_topk"))[1], torch.tensor([[0.75, 0.25]]))
    torch.testing.assert_close(route_topk(logits, Router(2, "sigmoid"))[1], torch.tensor([[0.75, 0.5]]))


def test_groups_by_hand() -> None:
    logits = torch.tensor([[9.0, 0.0, 5.0, 5.0, 8.0, 1.0]])  # best of the groups 9, 5, 8; best two 9, 10, 9
    assert route_topk(logits, Router(2, n_group=3, topk_group=2))[0].tolist() == [[0, 4]]
    assert route_topk(logits, Router(4, n_group=3, topk_group=2))[0].tolist() == [[0, 4, 5, 1]]
    top2 = Router(2, "softmax_topk", n_group=3, topk_group=1, group_score="top2_sum")
    assert route_topk(logits, top2)[0].tolist() == [[2, 3]]


def test_no_expert_outside_the_chosen_groups_even_if_its_own_are_minus_inf() -> None:
    logits = torch.tensor([[1.0, 0.5, 3.0, -torch.inf]])
    ids, _ = route_topk(logits, Router(2, n_group=2, topk_group=1))
    assert ids.tolist() == [[2, 3]]


def test_d12_ties_go_to_the_lowest_id() -> None:
    for router in (Router(3), Router(3, "sigmoid", n_group=4, topk_group=2, group_score="top2_sum")):
        ids, weights = route_topk(torch.zeros(2, 16), router, torch.zeros(16))
        assert ids.tolist() == [[0, 1, 2]] * 2
        assert weights.unique().numel() == 1
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert route_topk(zeros, Router(3))[0].tolist() == [[0, 1, 2]]


def test_scores_that_round_to_one_value_keep_the_order_of_their_logits() -> None:
    logits = torch.tensor([[20.0, 40.0, 30.0]])  # sigmoid is 1 in fp32 for all
    assert route_topk(logits, Router(3, "sigmoid"))[0].tolist() == [[1, 2, 0]]


def test_d13_a_bias_moves_ids_and_never_weights() -> None:
    logits = torch.randn(4, 8)
    bias = torch.zeros(8)
    bias[5] = 100.0
    ids, weights = route_topk(logits, Router(1, "sigmoid"), bias)
    assert ids.flatten().tolist() == [5] * 4
    assert torch.equal(weights[:, 0], logits[:, 5].sigmoid())


def test_c16_the_scaling_is_applied_once() -> None:
    logits = torch.randn(6, 16)
    plain = route_topk(logits, Router(4, "sigmoid", True))[1]
    scaled = route_topk(logits, Router(4, "sigmoid", True, scaling=2.5))[1]
    assert torch.equal(scaled, plain * 2.5)
    torch.testing.assert_close(scaled.sum(-1), torch.full((6,), 2.5))


def odd_logits(tokens: int, experts: int) -> Tensor:
    """Rows of NaN, of both infinities and of mixtures of them."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0])
    logits = values[torch.randint(0, 5, (tokens, experts))]
    for row, value in enumerate(values[:3]):
        logits[row] = value
    return logits


@pytest.mark.parametrize("router", [Router(6), Router(6, "softmax_topk", True), DEEPSEEK_V3])
def test_d8_ids_of_odd_logits_are_in_range_and_unlike(router: Router) -> None:
    torch.manual_seed(0)
    for bias in (None, torch.randn(48), torch.full((48,), torch.nan)):
        ids, _ = route_topk(odd_logits(50, 48), router, bias)
        assert ids.min() >= 0
        assert ids.max() < 48
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all()


def test_a_nan_is_the_last_choice_and_is_not_hidden() -> None:
    ids, weights = route_topk(torch.tensor([[torch.nan, 1.0, 2.0]]), Router(3, "sigmoid"))
    assert ids.tolist() == [[2, 1, 0]]
    assert weights.isnan().tolist() == [[False, False, True]]


def test_d10_no_tokens() -> None:
    ids, weights = route_topk(torch.empty(0, 16), Router(2, n_group=4, topk_group=2))
    assert (ids.shape, ids.dtype) == ((0, 2), torch.int32)
    assert (weights.shape, weights.dtype) == ((0, 2), torch.float32)


def test_refuses_a_layer_that_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"Router\.top_k: found 6"):
        route_topk(torch.zeros(1, 4), Router(6))
