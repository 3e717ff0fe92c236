"""Router: how a layer's logits become experts and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fanfold.errors import ArgumentError, FanfoldError, UnsupportedError

Scoring = Literal["softmax", "sigmoid", "softmax_topk"]
GroupScore = Literal["max", "top2_sum"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "softmax_topk")
GROUP_SCORES: tuple[GroupScore, ...] = ("max", "top2_sum")


@dataclass(frozen=True)
class Router:
    """The choices of a router; the values are those of a model's config.json.

    Attributes:
        top_k: experts a token.
        scoring: what a score is. `softmax`: over all experts (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V2). `sigmoid`:
            of each logit alone (DeepSeek-V3, GLM4-MoE). `softmax_topk`: the logit itself, and the weights are the
            softmax over the chosen ones (gpt-oss).
        renormalize: divide a token's weights by their sum (norm_topk_prob).
        n_group: groups of neighbouring experts that are chosen first; 1 is no grouping.
        topk_group: groups from which a token's experts come.
        group_score: of a group: `max`, its best expert (DeepSeek-V2), or `top2_sum`, the sum of its best two scores,
            bias included (DeepSeek-V3).
        scaling: factor of the weights (routed_scaling_factor), applied here and nowhere else.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "max"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise _unsupported("Router.scoring", self.scoring, SCORINGS)
        if self.group_score not in GROUP_SCORES:
            raise _unsupported("Router.group_score", self.group_score, GROUP_SCORES)
        if self.top_k < 1:
            raise _wrong("Router.top_k", self.top_k, "at least 1")
        if not 1 <= self.topk_group <= self.n_group:
            raise _wrong("Router.topk_group", self.topk_group, f"from 1 to n_group = {self.n_group}")

    def check(self, num_experts: int) -> None:
        """Whether a layer of this many experts can be routed so.

        Args:
            num_experts: E.

        Raises:
            ArgumentError: E does not fall into the groups, or there are fewer experts to choose from than top_k.
        """
        if num_experts < 1 or num_experts % self.n_group:
            raise _wrong("number of experts", num_experts, f"a positive multiple of n_group = {self.n_group}")
        size = num_experts // self.n_group
        if self.n_group > 1 and self.group_score == "top2_sum" and size < 2:
            raise _wrong("experts of a group", size, "at least 2 for the group score top2_sum")
        if self.top_k > self.topk_group * size:
            raise _wrong("Router.top_k", self.top_k, f"at most {self.topk_group * size}, the experts to choose from")


def _wrong(what: str, found: int, expected: str) -> ArgumentError:
    return ArgumentError(
        what, found=str(found), expected=expected, next_step="Take the router's values from the model's config.json."
    )


def _unsupported(what: str, found: str, known: tuple[str, ...]) -> FanfoldError:
    return UnsupportedError(
        what,
        found=repr(found),
        expected=f"one of {', '.join(known)}",
        next_step="Route in the model and pass topk_ids and topk_weights to fanfold.Experts.",
    )
