"""Adapters of a whole model on a GPU: rows of the CPU, captured decode steps with ids and adapters that change."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hf_decoding import Decoding, prompts

import fanfold
from graphs import same_bits
from samples import logits, relative_error, sample, typical_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),  # another name from transformers 5.24 on
]
ADAPTERS = {name: f"adapter-{name}" for name in ("scripture", "shout", "python")}
# Experts of both layouts, router, attention and lm_head.
EVERYWHERE = {"all": "peft_qwen3moe_all_linear", "parameters": "peft_qwen3moe_target_parameters"}


def model_with_adapters(name: str = "gptq-int4", adapters: Mapping[str, str] = ADAPTERS, **options: Any) -> Any:
    options.setdefault("activation_format", "plain")  # one code of 4 bits that falls otherwise is more than 1e-4
    model = fanfold.load_model(sample(name), **options)
    for adapter, folder in adapters.items():
        model.adapters.load(adapter, sample(folder))
    return model


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("gptq-int4", ADAPTERS),
        ("gptq-int4-actorder", ADAPTERS),
        ("nvfp4", ADAPTERS),
        ("base_qwen3moe_tiny_bf16", EVERYWHERE),
    ],
)
def test_rows_are_those_of_the_cpu(name: str, adapters: Mapping[str, str]) -> None:
    """Base rows are bit-equal to a run without a list."""
    exact = model_with_adapters(name, adapters, dtype=torch.float32)
    names = [None, *adapters, None]
    ids = prompts(exact, rows=len(names))
    plain = model_with_adapters(name, adapters, dtype=torch.bfloat16)
    on_gpu, in_fp32 = (
        model_with_adapters(name, adapters, dtype=dtype, device="cuda", batch_invariant=True)
        for dtype in (torch.bfloat16, torch.float32)
    )
    models = exact, plain, on_gpu, in_fp32
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.adapters.using(names))
        expected, rounded, found, same = (logits(m, ids.to(m.device)).cpu().float() for m in models)
    without = logits(on_gpu, ids.cuda()).cpu().float()
    base = logits(exact, ids)
    for row, adapter in enumerate(names):
        assert relative_error(same[row], expected[row]) < 1e-4, row
        assert typical_error(found[row], expected[row]) < 2 * typical_error(rounded[row], expected[row]), row
        if adapter is None:
            assert torch.equal(found[row], without[row])
        else:
            assert relative_error(base[row], expected[row]) > 1e-2


def test_a28_captured_steps_follow_lists_and_adapters() -> None:
    """500 replays of one graph; lists change every step, adapters are replaced and unloaded in between."""
    model = model_with_adapters(device="cuda")
    choices = (*ADAPTERS, None)
    rng = random.Random(0)
    rows = 3
    with torch.inference_mode():
        base, eager, graphed = (Decoding(model, rows) for _ in range(3))  # a step moves a cache on
        with model.adapters.using([None] * rows):
            graphed.token.copy_(graphed.prefill(prompts(model, rows)))
            graph, found = graphed.captured()
        changed = 0
        for replay in range(500):
            if replay % 40 == 0:
                for decoding in (base, eager, graphed):
                    decoding.token.copy_(decoding.prefill(prompts(model, rows, seed=replay)))
            if replay % 25 == 24:
                model.adapters.replace("python", sample(rng.choice(list(ADAPTERS.values()))))
            if replay % 50 == 49:
                model.adapters.unload("shout")
                model.adapters.load("shout", sample("adapter-shout"))
            with model.adapters.using([None] * rows):
                without = base.step()
            with model.adapters.using([rng.choice(choices) for _ in range(rows)]):
                expected = eager.step()
                graph.replay()
                torch.cuda.synchronize()
            assert same_bits(found, expected), replay
            changed += int(not torch.equal(without, expected))
            for decoding in (base, eager, graphed):
                decoding.token.copy_(expected.argmax(-1))
                decoding.position.add_(1)
        assert changed > 300


def test_memory_of_the_pool_is_that_of_its_pairs() -> None:
    """Resident bytes grow by the padded pairs and little more, and shrink again when an adapter goes."""

    def asked_for() -> int:  # what is allocated depends on free blocks that others left: they are not always split
        gc.collect()  # models of other tests
        torch.cuda.empty_cache()  # takes back what another stream may still have read
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    model = fanfold.load_model(sample("gptq-int4"), device="cuda")
    before = asked_for()
    for adapter, folder in ADAPTERS.items():
        model.adapters.load(adapter, sample(folder))
    pairs = model.adapters.stats()["bytes"]
    assert pairs <= asked_for() - before <= 1.06 * pairs
    for adapter in ADAPTERS:
        model.adapters.unload(adapter)
    assert asked_for() == before


def test_ids_that_are_no_slots_are_counted() -> None:
    experts = fanfold.load_experts(sample("gptq-int4"), device="cuda")
    pool = fanfold.AdapterPool(experts, slots=2)
    pool.load("a", sample("adapter-scripture"))
    for tokens in (1, 70):
        x = torch.randn(tokens, experts.shape.hidden, dtype=torch.bfloat16, device="cuda")
        ids = torch.arange(tokens * 4, device="cuda").view(tokens, 4) % experts.shape.num_experts
        weights = torch.full((tokens, 4), 0.25, device="cuda")
        given = x, ids, weights
        base = experts(*given, adapter_ids=torch.full((tokens,), -1, device="cuda"))
        seen = pool.stats()["unknown_ids"]
        assert torch.equal(experts(*given, adapter_ids=torch.full((tokens,), 2, device="cuda")), base)
        assert pool.stats()["unknown_ids"] == seen + tokens
