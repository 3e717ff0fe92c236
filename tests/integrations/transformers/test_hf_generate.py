"""generate with adapters: padding, beams, samples, embeddings; each row as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import fanfold
from samples import sample

PROMPTS = ["The king went to", "a small animal", "def read(self, path):", "And"]
NAMES = ["scripture", None, "python", "shout"]
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    """fp32, where sums in other orders do not change greedy text."""
    made = fanfold.load_model(sample("gptq-int4"), dtype=torch.float32)
    for name in ("scripture", "shout", "python"):
        made.adapters.load(name, sample(f"adapter-{name}"))
    return made


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(sample("gptq-int4"))
    return [tokenizer("<|endoftext|>" + prompt)["input_ids"] for prompt in PROMPTS]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    assert ids.shape[1] > min(map(len, rows))  # some row is padded
    return ids, mask


def new_tokens(model: Any, names: list[str | None], ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    with model.adapters.using(names):
        return model.generate(input_ids=ids, attention_mask=mask, **OPTIONS, **options)[:, ids.shape[1] :]


def alone(model: Any, row: list[int], name: str | None, **options: Any) -> list[int]:
    ids = torch.tensor([row])
    return new_tokens(model, [name], ids, torch.ones_like(ids), **options)[0].tolist()


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 12}, {"max_new_tokens": 8, "num_beams": 3}], ids=["greedy", "beams"]
)
def test_each_row_of_a_left_padded_batch_is_as_alone(
    model: Any, rows: list[list[int]], options: dict[str, Any]
) -> None:
    found = new_tokens(model, NAMES, *padded(rows), **options).tolist()
    for row, name, tokens in zip(rows, NAMES, found, strict=True):
        expected = alone(model, row, name, **options)
        assert tokens[: len(expected)] == expected
        assert set(tokens[len(expected) :]) <= {0}
    assert found != new_tokens(model, [None] * 4, *padded(rows), **options).tolist()


def test_adapters_show_in_the_text(model: Any) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(sample("gptq-int4"))
    ids = torch.tensor([tokenizer("<|endoftext|>The king went to")["input_ids"]] * 4)
    found = new_tokens(model, NAMES, ids, torch.ones_like(ids), max_new_tokens=12)
    scripture, _, python, shout = tokenizer.batch_decode(found)
    assert shout == shout.upper()
    assert shout.isascii()
    assert "the" in scripture.lower()
    assert '"""' in python


def test_another_order_of_rows(model: Any, rows: list[list[int]]) -> None:
    ids, mask = padded(rows)
    order = [2, 0, 3, 1]
    first = new_tokens(model, NAMES, ids, mask, max_new_tokens=6)
    other = new_tokens(model, [NAMES[i] for i in order], ids[order], mask[order], max_new_tokens=6)
    assert torch.equal(other, first[order])


def test_no_using_is_the_base(model: Any, rows: list[list[int]]) -> None:
    ids, mask = padded(rows)
    without = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, **OPTIONS)[:, ids.shape[1] :]
    assert torch.equal(without, new_tokens(model, [None] * 4, ids, mask, max_new_tokens=6))


def test_several_samples_of_a_row_have_its_adapter(model: Any, rows: list[list[int]]) -> None:
    ids, mask = padded(rows)
    with torch.random.fork_rng(devices=[]), model.adapters.using(NAMES):
        torch.manual_seed(0)
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=True, num_return_sequences=2, pad_token_id=0
        )
    assert found.shape == (8, ids.shape[1] + 6)
    with torch.random.fork_rng(devices=[]), model.adapters.using([name for name in NAMES for _ in range(2)]):
        torch.manual_seed(0)
        twice = model.generate(
            ids.repeat_interleave(2, 0),
            attention_mask=mask.repeat_interleave(2, 0),
            max_new_tokens=6,
            do_sample=True,
            pad_token_id=0,
        )
    assert torch.equal(found, twice)


def test_beams_with_several_return_sequences(model: Any, rows: list[list[int]]) -> None:
    ids, mask = padded(rows)
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2}
    found = new_tokens(model, NAMES, ids, mask, **options)
    assert len(found) == 8
    for row, name in enumerate(NAMES):
        one = torch.tensor([rows[row]])
        expected = new_tokens(model, [name], one, torch.ones_like(one), **options)
        assert torch.equal(found[2 * row : 2 * row + 2, : expected.shape[1]], expected)


def test_embeddings_instead_of_ids(model: Any, rows: list[list[int]]) -> None:
    ids, mask = padded(rows)
    embeddings = model.get_input_embeddings()(ids)
    expected = new_tokens(model, NAMES, ids, mask, max_new_tokens=6)
    with model.adapters.using(NAMES):
        found = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=6, **OPTIONS)
    assert torch.equal(found, expected)


def test_without_a_cache(model: Any, rows: list[list[int]]) -> None:
    ids, mask = padded(rows)
    expected = new_tokens(model, NAMES, ids, mask, max_new_tokens=4)
    assert torch.equal(new_tokens(model, NAMES, ids, mask, max_new_tokens=4, use_cache=False), expected)


def test_an_adapter_in_use_is_busy_and_others_come_and_go_between_steps(model: Any, rows: list[list[int]]) -> None:
    """Loading and dropping other adapters while a batch is being generated leaves its tokens as they are."""
    ids, mask = padded(rows)
    expected = new_tokens(model, NAMES, ids, mask, max_new_tokens=5)
    seen: list[str] = []

    def between(_: Tensor, scores: Tensor) -> Tensor:
        if "late" in model.adapters.names():
            model.adapters.unload("late")
        else:
            model.adapters.load("late", sample("adapter-shout"))
        seen.append("step")
        return scores

    found = new_tokens(model, NAMES, ids, mask, max_new_tokens=5, logits_processor=[between])
    assert torch.equal(found, expected)
    assert len(seen) == 5
    if "late" in model.adapters.names():
        model.adapters.unload("late")
