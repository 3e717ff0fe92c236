"""experts_implementation="fanfold": transformers' own models, eager against fanfold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fanfold.errors import UnsupportedError
from fanfold.integrations.transformers import register
from samples import relative_error, sample

PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# SiLU; and clamped SwiGLU with biases and interleaved, transposed rows
MODELS = ["base_qwen3moe_tiny_bf16", "base_gptoss_tiny_bf16"]


def model_of(name: str, dtype: torch.dtype, place: str) -> Any:
    register()
    model = AutoModelForCausalLM.from_pretrained(str(sample(name)), experts_implementation="eager", dtype=dtype)
    return model.to(place).eval()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", MODELS)
@PLACES
def test_logits_are_those_of_eager(place: str, name: str, dtype: torch.dtype, error: float) -> None:
    model = model_of(name, dtype, place)
    ids = (torch.arange(24, device=place) * 7 % model.config.vocab_size).view(2, 12)
    with torch.inference_mode():
        eager = model(input_ids=ids).logits
        model.set_experts_implementation("fanfold")
        found = model(input_ids=ids).logits
    assert not torch.equal(found, torch.zeros_like(found))
    assert relative_error(found.float(), eager.float()) < error


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@PLACES
def test_compiled_in_one_graph(place: str) -> None:
    model = model_of("base_qwen3moe_tiny_bf16", torch.float32, place)
    model.set_experts_implementation("fanfold")
    ids = torch.arange(10, device=place)[None]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(input_ids=ids, use_cache=False).logits
        assert relative_error(found, model(input_ids=ids, use_cache=False).logits) < 1e-6


def test_weights_of_another_dtype_are_refused() -> None:
    model = model_of("base_qwen3moe_tiny_bf16", torch.float64, "cpu")
    model.set_experts_implementation("fanfold")
    with pytest.raises(UnsupportedError, match="float64 weights; expected bfloat16, float16 or float32"):
        model(input_ids=torch.arange(4)[None])
