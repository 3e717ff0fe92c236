"""Text in, text out, on the bundled model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fanfold.errors import (
    ArgumentError,
    CorruptFileError,
    MissingFileError,
    UnknownAdapterError,
    UnsupportedError,
)
from fanfold.integrations.transformers.text import (
    Batch,
    Continuation,
    Prompt,
    generate_text,
    left_pad,
    load_for_text,
)
from fanfold.integrations.transformers.tokenizer import load_tokenizer

TINY = Path(__file__).parents[3] / "examples" / "tiny-moe"
TEXT = "The king went to"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    adapters = {name: TINY / f"adapter-{name}" for name in ("scripture", "shout")}
    return load_for_text(TINY / "gptq-int4", adapters)


def test_left_pad() -> None:
    ids, mask = left_pad([[5, 6, 7], [8]], pad=0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_batch_counts_and_rates() -> None:
    rows = (Continuation(Prompt("a", "x"), "b", 6), Continuation(Prompt("c"), "d", 2))
    batch = Batch(rows, seconds=2.0)
    assert batch.tokens_per_second() == 4.0
    assert batch.tokens_per_second(0) == 3.0
    assert batch.as_dict()["rows"][1] == {
        "row": 1,
        "adapter": None,
        "prompt": "c",
        "continuation": "d",
        "tokens": 2,
        "tokens_per_second": 1.0,
    }


def test_each_row_has_its_adapter_and_its_own_text(loaded: tuple[Any, Any]) -> None:
    """Unlike lengths in one batch; every row writes what it writes alone."""
    model, tokenizer = loaded
    prompts = [Prompt(TEXT), Prompt("The sea and the land", "shout"), Prompt(TEXT, "scripture")]
    batch = generate_text(model, tokenizer, prompts, max_new_tokens=6)
    texts = [row.text for row in batch.rows]
    assert texts[0].startswith(" the")
    assert texts[1] == texts[1].upper() != texts[1].lower()
    assert len(set(texts)) == 3
    for prompt, text in zip(prompts, texts, strict=True):
        alone = generate_text(model, tokenizer, [prompt], max_new_tokens=6)
        assert alone.rows[0].text == text
        assert alone.rows[0].tokens == 6


def test_start_token_stands_in_front_once(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    bare, spelled = (
        generate_text(model, tokenizer, [Prompt(start + TEXT)], max_new_tokens=4).rows[0].text
        for start in ("", "<|endoftext|>")
    )
    assert bare == spelled


def test_sampling_repeats_with_a_seed_and_leaves_the_callers_random_state(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    before = torch.get_rng_state()

    def sample(seed: int) -> str:
        options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.5, "seed": seed}
        return generate_text(model, tokenizer, [Prompt(TEXT)], **options).rows[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert torch.equal(before, torch.get_rng_state())


def test_progress_counts_to_the_end(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    calls: list[tuple[int, int, str]] = []
    generate_text(model, tokenizer, [Prompt(TEXT)], max_new_tokens=3, progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == [0, 1, 2, 3, 3]
    assert {total for _, total, _ in calls} == {3}


def test_text_behind_the_end_token_is_cut(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that ends early counts its own tokens, not the padding behind them."""
    model, tokenizer = loaded
    first = tokenizer(" the")["input_ids"][0]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [first])
    batch = generate_text(model, tokenizer, [Prompt(TEXT), Prompt(TEXT, "shout")], max_new_tokens=4)
    assert batch.rows[0].tokens == 1
    assert batch.rows[1].tokens == 4


def test_chat_template(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    with pytest.raises(UnsupportedError, match="no chat template"):
        generate_text(model, tokenizer, [Prompt(TEXT)], chat=True)
    template = "{% for m in messages %}<|endoftext|>{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chatted, plain = (
        generate_text(model, tokenizer, [Prompt(TEXT)], max_new_tokens=4, chat=chat).rows[0].text
        for chat in (True, False)
    )
    assert chatted == plain  # the template does just what happens without it


@pytest.mark.parametrize(
    ("prompts", "options", "what"),
    [
        ([], {}, "prompts"),
        ([Prompt(TEXT)], {"max_new_tokens": 0}, "max_new_tokens"),
        ([Prompt(TEXT)], {"temperature": -1.0}, "temperature"),
        ([Prompt(TEXT)], {"temperature": float("nan")}, "temperature"),
        ([Prompt(TEXT)], {"temperature": float("inf")}, "temperature"),
    ],
)
def test_wrong_arguments(loaded: tuple[Any, Any], prompts: list[Prompt], options: dict[str, Any], what: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        generate_text(*loaded, prompts, **options)
    assert caught.value.what == what


def test_empty_prompt_without_a_start_token(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    monkeypatch.setattr(tokenizer, "_special_tokens_map", {**tokenizer._special_tokens_map, "bos_token": None})
    with pytest.raises(ArgumentError, match="at least one token"):
        generate_text(model, tokenizer, [Prompt("")])


def test_unknown_adapter(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(UnknownAdapterError, match="carol"):
        generate_text(*loaded, [Prompt(TEXT, "carol")])


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(MissingFileError, match="no folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptFileError, match="AutoTokenizer"):
        load_tokenizer(tmp_path)


def test_more_adapters_than_the_pool_has_slots_by_itself() -> None:
    shout = TINY / "adapter-shout"
    model, _ = load_for_text(TINY / "gptq-int4", {f"shout{index}": shout for index in range(9)})
    assert len(model.adapters.names()) == 9
