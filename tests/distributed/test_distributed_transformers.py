"""Models that transformers spreads over ranks, with fanfold's experts on each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_jobs import load_with_transformers
from ranks import Ranks
from transformers.distributed.configuration_utils import DistributedConfig

from fanfold.distributed import ExpertPlan
from fanfold.errors import ArgumentError, UnavailableError, UnsupportedError
from fanfold.integrations.transformers.interface import plain_model, register
from fanfold.integrations.transformers.model import load_model
from fanfold.integrations.transformers.parallel import plan_of
from samples import logits, relative_error, sample


@pytest.mark.parametrize("implementation", ["fanfold", "all_reduce"])
def test_a_model_that_transformers_has_spread(implementation: str, ranks: Ranks) -> None:
    register()
    path = sample("base_qwen3moe_tiny_bf16")
    tokens = torch.arange(12).view(2, 6) + 3
    expected = logits(plain_model(path, "fanfold", torch.bfloat16), tokens)
    for found, held in ranks.run(load_with_transformers, path, tokens, implementation):
        assert held == 8 // ranks.size
        assert relative_error(found, expected) < 0.02
        assert torch.equal(found, expected) == (implementation == "fanfold")


def test_a_distributed_config_says_how_load_model_spreads_experts() -> None:
    assert plan_of(DistributedConfig(tp_size=1, tp_plan={}, ep_size=1)) == ExpertPlan()
    summed = DistributedConfig(tp_size=1, tp_plan={}, ep_size=1, ep_implementation="all_reduce")
    assert plan_of(summed) == ExpertPlan(exact=False)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"tp_size": 2, "ep_size": 2, "tp_plan": {}}, "tp_size=2, ep_size=2"),
        ({"tp_size": 1, "ep_size": 1}, "tp_plan=None"),
        ({"tp_size": 1, "tp_plan": {}, "fsdp_size": 2}, "fsdp_size=2"),
        (
            {"tp_size": 1, "tp_plan": {}, "ep_implementation": "deepgemm_megamoe"},
            "ep_implementation='deepgemm_megamoe'",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], found: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load_model(sample("ct_qwen3moe_nvfp4"), parallel=DistributedConfig(**fields))
    assert caught.value.found == found


def test_other_plans_and_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="parallel: found int; expected a fanfold"):
        load_model(sample("ct_qwen3moe_nvfp4"), parallel=2)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("fanfold.integrations.transformers.model.find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match="without expert parallelism"):
        load_model(sample("ct_qwen3moe_nvfp4"), parallel=DistributedConfig(tp_size=1, tp_plan={}, ep_size=1))
