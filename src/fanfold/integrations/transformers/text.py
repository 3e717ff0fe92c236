"""Text in, text out: several prompts with their adapters as one left-padded batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from fanfold.errors import ArgumentError
from fanfold.integrations.transformers.model import load_model
from fanfold.integrations.transformers.tokenizer import load_tokenizer, token_ids
from fanfold.lora.pool import AdapterPool

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Prompt:
    """One row of a batch: the text, and the adapter to run it with (None: the base)."""

    text: str
    adapter: str | None = None


@dataclass(frozen=True)
class Continuation:
    """What the model wrote behind one prompt.

    Attributes:
        prompt: the row's prompt.
        text: the new text, special tokens left out.
        tokens: new tokens of the row, its end token included.
    """

    prompt: Prompt
    text: str
    tokens: int


@dataclass(frozen=True)
class Batch:
    """One generated batch.

    Attributes:
        rows: in the order of the prompts.
        seconds: wall time of `generate`, the prompts' own pass included.
    """

    rows: tuple[Continuation, ...]
    seconds: float

    def tokens_per_second(self, row: int | None = None) -> float:
        """New tokens a second: of one row, or of the whole batch."""
        rows = self.rows if row is None else self.rows[row : row + 1]
        return sum(row.tokens for row in rows) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `adapter` is None where the base wrote the row."""
        rows = [
            {
                "row": index,
                "adapter": row.prompt.adapter,
                "prompt": row.prompt.text,
                "continuation": row.text,
                "tokens": row.tokens,
                "tokens_per_second": round(self.tokens_per_second(index), 2),
            }
            for index, row in enumerate(self.rows)
        ]
        return {
            "rows": rows,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens_per_second(), 2),
        }


def load_for_text(
    checkpoint: str | Path, adapters: Mapping[str, str | Path], *, progress: Progress | None = None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model with its adapters loaded, and its tokenizer.

    Args:
        checkpoint: the model's folder, with a tokenizer.
        adapters: PEFT folder of each adapter by name.
        progress: called with (done, total, what) while the model is read.

    Raises:
        FanfoldError: what `load_model` and `AdapterPool.load` raise.
        MissingFileError: the folder has no tokenizer.
        CorruptFileError: transformers can't read the tokenizer.
    """
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, progress=progress)
    if adapters:
        model.adapters = AdapterPool(model, slots=len(adapters))
    for name, folder in adapters.items():
        model.adapters.load(name, folder)
    return model, tokenizer


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int | None = None,
    chat: bool = False,
    progress: Progress | None = None,
) -> Batch:
    """Continues several prompts in one batch, each row with its own adapter.

    Args:
        model: what `fanfold.load_model` returned.
        tokenizer: the model's tokenizer. A start token that it has but doesn't add by itself is put in front.
        prompts: at least one.
        max_new_tokens: upper bound of new tokens a row.
        temperature: 0 takes the likeliest token each time; above 0 samples.
        seed: makes sampling repeatable; the caller's random state is left as it was.
        chat: wrap every prompt as a user's message in the tokenizer's chat template.
        progress: called with (tokens done, `max_new_tokens`, what).

    Raises:
        ArgumentError: no prompts, a prompt without tokens, or a number out of range.
        UnknownAdapterError: a prompt names an adapter that isn't loaded.
        UnsupportedError: `chat` with a tokenizer that has no chat template.
    """
    _check(prompts, max_new_tokens, temperature)
    rows = [token_ids(tokenizer, prompt.text, chat) for prompt in prompts]
    generation = model.generation_config
    assert generation is not None
    pad = _first_id(tokenizer.pad_token_id, generation.pad_token_id, tokenizer.eos_token_id, 0)
    input_ids, attention_mask = left_pad(rows, pad)

    options: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    if temperature == 0:
        options = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    pool = cast(Any, model).adapters
    device = model.device
    with pool.using([prompt.adapter for prompt in prompts]), _seeded(seed, device):
        start = time.perf_counter()
        output = cast(Any, model).generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            streamer=_Counter(progress, max_new_tokens) if progress else None,
            **options,
        )
        new_ids = cast(list[list[int]], output[:, input_ids.shape[1] :].tolist())
        seconds = time.perf_counter() - start
    ends = _ids(generation.eos_token_id)
    finished = [_until_end(ids, ends) for ids in new_ids]
    texts = [cast(str, tokenizer.decode(ids, skip_special_tokens=True)) for ids in finished]
    return Batch(
        tuple(Continuation(prompt, text, len(ids)) for prompt, text, ids in zip(prompts, texts, finished, strict=True)),
        seconds,
    )


def left_pad(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [rows, longest row]; all rows end together."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _check(prompts: Sequence[Prompt], max_new_tokens: int, temperature: float) -> None:
    if not prompts:
        raise ArgumentError(
            "prompts",
            found="none",
            expected="at least one prompt",
            next_step="Name one, e.g. --prompt 'base=The king went to'.",
        )
    if max_new_tokens < 1:
        raise ArgumentError(
            "max_new_tokens",
            found=str(max_new_tokens),
            expected="1 or more",
            next_step="Ask for at least one new token.",
        )
    if not 0 <= temperature < float("inf"):
        raise ArgumentError(
            "temperature",
            found=str(temperature),
            expected="0 (the likeliest token) or a positive number",
            next_step="Pass 0 for greedy text, about 0.7 to sample.",
        )


def _first_id(*candidates: Any) -> int:
    """The first candidate that is a token id."""
    return next(ids[0] for ids in map(_ids, candidates) if ids)


def _ids(value: Any) -> list[int]:
    """Token ids of a field that holds None, one or several."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _until_end(ids: list[int], ends: list[int]) -> list[int]:
    """The ids up to and with the first end token; what follows is padding."""
    stops = [position for position, token in enumerate(ids) if token in ends]
    return ids[: stops[0] + 1] if stops else ids


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Generator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _Counter(BaseStreamer):
    """Counts the steps of `generate`; the first call carries the prompts."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._calls = 0

    def put(self, value: Tensor) -> None:
        """One step is done."""
        self._progress(self._calls, self._total, "generating")
        self._calls += 1

    def end(self) -> None:
        """All rows have ended, perhaps early."""
        self._progress(self._total, self._total, "generating")
