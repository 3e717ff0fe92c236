"""Whole models on a GPU: logits of the CPU, generate, decode steps in CUDA graphs and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_decoding import Decoding, prompts

import fanfold
from fanfold.layers.experts import Experts
from graphs import same_bits
from samples import logits, relative_error, sample, typical_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),  # another name from transformers 5.24 on
]
NAMES = [
    "gptq-int4",
    "gptq-int4-actorder",
    "nvfp4",
    "gptqmodel_qwen3moe_awq_gemm_g32",
    "native_gptoss_mxfp4",
    "base_qwen3moe_tiny_bf16",
    "base_gptoss_tiny_bf16",
]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_cpu(name: str) -> None:
    exact = fanfold.load_model(sample(name), dtype=torch.float32, activation_format="plain")
    ids = prompts(exact)
    expected = logits(exact, ids)
    rounded = fanfold.load_model(sample(name), dtype=torch.bfloat16, activation_format="plain")
    plain = typical_error(logits(rounded, ids).float(), expected)
    for dtype, measure, error in ((torch.float32, relative_error, 1e-4), (torch.bfloat16, typical_error, 2 * plain)):
        model = fanfold.load_model(sample(name), device="cuda", dtype=dtype, activation_format="plain")
        assert next(m.implementation for m in model.modules() if isinstance(m, Experts)) != "reference"
        assert measure(logits(model, ids.cuda()).cpu().float(), expected) < error


def test_logits_with_activations_in_4_bits_are_those_of_the_cpu() -> None:
    """Codes fall otherwise where h differs by its last bit, in fp32 too: so typical errors, as for bf16."""
    exact, rounded = (fanfold.load_model(sample("nvfp4"), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    ids = prompts(exact)
    expected = logits(exact, ids)
    plain = typical_error(logits(rounded, ids).float(), expected)
    for dtype in (torch.float32, torch.bfloat16):
        model = fanfold.load_model(sample("nvfp4"), device="cuda", dtype=dtype)
        assert next(m.activation_format for m in model.modules() if isinstance(m, Experts)) == "nvfp4"
        assert typical_error(logits(model, ids.cuda()).cpu().float(), expected) < 2 * plain


@pytest.mark.parametrize("name", ["gptq-int4", "base_qwen3moe_tiny_bf16"])
def test_generate_gives_the_text_of_the_cpu(name: str) -> None:
    """In fp32, where the likeliest token is the same one."""
    exact = fanfold.load_model(sample(name), dtype=torch.float32)
    model = fanfold.load_model(sample(name), device="cuda", dtype=torch.float32)
    ids = prompts(exact)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1}
    expected = exact.generate(ids, **options)
    for cache in (None, "static"):
        assert torch.equal(model.generate(ids.cuda(), cache_implementation=cache, **options).cpu(), expected), cache


@pytest.mark.parametrize("name", ["gptq-int4", "nvfp4", "base_qwen3moe_tiny_bf16"])
def test_decode_steps_in_a_graph(name: str) -> None:
    """Captured once and replayed for other prompts: every step's logits are those of eager steps, bit for bit."""
    model = fanfold.load_model(sample(name), device="cuda")
    with torch.inference_mode():
        eager, graphed = Decoding(model, 3), Decoding(model, 3)
        graphed.token.copy_(graphed.prefill(prompts(model)))
        graph, found = graphed.captured()
        for seed in range(3):
            ids = prompts(model, seed=seed)
            for decoding in (eager, graphed):
                decoding.token.copy_(decoding.prefill(ids))
            for _ in range(12):
                expected = eager.step()
                graph.replay()
                assert same_bits(found, expected)
                for decoding in (eager, graphed):
                    decoding.token.copy_(expected.argmax(-1))
                    decoding.position.add_(1)


def test_a_compiled_model() -> None:
    model = fanfold.load_model(sample("gptq-int4"), device="cuda")
    ids = prompts(model)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        found = compiled(input_ids=ids, use_cache=False).logits
        assert relative_error(found.float(), model(input_ids=ids, use_cache=False).logits.float()) < 2e-2
