"""expert_usage: which experts a text uses, layer by layer, and what an adapter changes of that."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fanfold.bench.machine import device_named
from fanfold.bench.recorded import write
from fanfold.errors import ArgumentError, CorruptFileError, MissingFileError
from fanfold.integrations.transformers.model import load_model
from fanfold.integrations.transformers.places import layer_number
from fanfold.integrations.transformers.tokenizer import load_tokenizer, token_ids
from fanfold.layers.experts import Experts
from fanfold.lora.pool import AdapterPool

WINDOW = 512
"""Most tokens that are read at once: what a token's experts depend on."""
Progress = Callable[[int, int, str], None]
Choices = dict[int, Tensor]
"""Layer -> int64 [rows, tokens, k], the experts of every token."""


def expert_usage(
    path: str | Path,
    text: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    record: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Reads a text with a model, and with each adapter, and counts the rows of every expert.

    The text is read in windows of `WINDOW` tokens, each from scratch, on a GPU where there is one. An adapter reads the
    same tokens as the base: nothing is generated.

    Args:
        path: the checkpoint directory, with its tokenizer.
        text: a file in UTF-8.
        adapters: name -> PEFT directory.
        record: where the base's choices go, token by token: what `fanfold bench --routing recorded:FILE` reads.
        progress: called with (done, total, what).

    Returns:
        `path`, `model_type`, `text` (the file), `tokens`, `window` and `runs`: one for the base (`adapter` None), one
        for each adapter. A run has `layers`: `layer`, `top_k`, what `statistics` says of its `counts`, and for an
        adapter `changed`: the share of the base's choices that it does not make, and `moved`: the share of all rows
        that would have to go to another expert to make the base's counts of it; None for the base.

    Raises:
        MissingFileError, CorruptFileError: there is no such text, or it is not UTF-8.
        ArgumentError: a text without a token, or a record that can't be written.
        FanfoldError: what load_model and AdapterPool.load raise.
    """
    words = read_text(Path(text))
    tokenizer = load_tokenizer(path)
    cast("Any", tokenizer).model_max_length = len(words) + 1  # the text is cut into windows; no warning is due
    ids = torch.tensor(token_ids(tokenizer, words))
    model: Any = load_model(path, device=device_named(), progress=progress)
    names: list[str | None] = [None, *(adapters or {})]
    if adapters:
        model.adapters = AdapterPool(model, slots=len(adapters))
        for name, folder in adapters.items():
            model.adapters.load(name, folder)
    counts: dict[int, Tensor] = {}
    kept: dict[int, Tensor] = {}
    chosen_by_base: dict[int, list[Tensor]] = {}
    size = min(WINDOW, context_of(model))
    windows = [ids[start : start + size] for start in range(0, len(ids), size)]
    seen: Choices = {}
    with torch.inference_mode(), model.adapters.using(names), _watching(model, seen, len(names)) as sizes:
        for done, window in enumerate(windows):
            if progress is not None:
                progress(done * size, len(ids), "tokens read")
            model.base_model(input_ids=window.expand(len(names), -1).to(model.device), use_cache=False)
            for layer, chosen in seen.items():
                new = rows_of_experts(chosen, sizes[layer])
                counts[layer] = counts[layer] + new if layer in counts else new
                same = kept_choices(chosen)
                kept[layer] = kept[layer] + same if layer in kept else same
                chosen_by_base.setdefault(layer, []).append(chosen[0].cpu())
            seen.clear()
    if progress is not None:
        progress(len(ids), len(ids), "tokens read")
    if record is not None:
        write(record, {layer: torch.cat(parts) for layer, parts in chosen_by_base.items()})
    runs = [
        {
            "adapter": name,
            "layers": [_layer(layer, counts[layer], kept[layer], run, len(ids)) for layer in sorted(counts)],
        }
        for run, name in enumerate(names)
    ]
    return {
        "path": str(path),
        "model_type": model.config.model_type,
        "text": str(text),
        "tokens": len(ids),
        "window": size,
        "runs": runs,
    }


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        MissingFileError: there is none.
        CorruptFileError: it is not UTF-8.
        ArgumentError: it is empty.
    """
    try:
        words = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFileError(
            str(file), found=f"bytes that are no UTF-8 ({error.reason})", expected="text", next_step="Convert the file."
        ) from error
    except OSError as error:
        raise MissingFileError(
            str(file),
            found=error.strerror or "an error",
            expected="a text file",
            next_step="Name a file with the text to read.",
        ) from error
    if not words.strip():
        raise ArgumentError(
            str(file), found="an empty file", expected="some text", next_step="Name a file with the text to read."
        )
    return words


def context_of(model: Any) -> int:
    """Most tokens that the model reads."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW


@contextmanager
def _watching(model: nn.Module, seen: Choices, rows: int) -> Generator[dict[int, int]]:
    """Inside, every forward leaves the experts of its tokens in `seen`; gives the number of experts by layer."""
    sites = cast("Mapping[str, object]", cast("Any", model).adapter_sites)
    layers = {layer_number(at): site for at, site in sites.items() if isinstance(site, Experts)}

    def note(layer: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        chosen = args[1]
        seen[layer] = chosen.view(rows, -1, chosen.shape[-1]).long()

    hooks = [experts.register_forward_pre_hook(partial(note, layer)) for layer, experts in layers.items()]
    try:
        yield {layer: experts.shape.num_experts for layer, experts in layers.items()}
    finally:
        for hook in hooks:
            hook.remove()


def rows_of_experts(chosen: Tensor, experts: int) -> Tensor:
    """How many (token, slot) rows of each run go to each expert: int64 [runs, tokens, k] -> [runs, E], on the CPU."""
    flat = chosen.flatten(1)
    return torch.zeros(len(flat), experts, dtype=torch.int64, device=flat.device).scatter_add_(
        1, flat, torch.ones_like(flat)
    ).cpu()  # fmt: skip


def kept_choices(chosen: Tensor) -> Tensor:
    """How many choices of the first run each run makes too, in whatever slot: [runs, tokens, k] -> int64 [runs]."""
    same = chosen[:1, :, :, None] == chosen[:, :, None, :]
    return same.any(-1).sum((1, 2)).cpu()


def statistics(counts: Tensor) -> dict[str, Any]:
    """What the rows of a layer's experts say of their balance.

    Args:
        counts: int64 [E].

    Returns:
        `counts`; `max_over_mean`: rows of the fullest expert (`fullest`) over the mean; `entropy`: of the share of
        rows, in bits, at most log2(E); `effective`: 2 ** entropy, as many equally loaded experts have it; `unused`:
        experts without a row.
    """
    share = counts.double() / counts.sum()
    entropy = -(share * share.clamp_min(1e-300).log2()).sum().item()
    return {
        "counts": counts.tolist(),
        "max_over_mean": (share.max() * len(counts)).item(),
        "fullest": int(counts.argmax()),
        "entropy": entropy,
        "effective": 2**entropy,
        "unused": int((counts == 0).sum()),
    }


def _layer(layer: int, counts: Tensor, kept: Tensor, run: int, tokens: int) -> dict[str, Any]:
    """A layer's entry of a run; the first run is the base."""
    rows = int(counts[run].sum())
    moved = (counts[run] - counts[0]).abs().sum().item() / 2
    return {
        "layer": layer,
        "top_k": rows // tokens,
        **statistics(counts[run]),
        "changed": None if run == 0 else 1 - kept[run].item() / rows,
        "moved": None if run == 0 else moved / rows,
    }
