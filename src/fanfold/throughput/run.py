"""throughput: prefill and decode of a whole model, with fanfold's experts and with transformers' own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from fanfold.bench.machine import device_named
from fanfold.errors import ArgumentError, DeviceMemoryError
from fanfold.integrations.transformers.forward import ModelForward
from fanfold.integrations.transformers.synthetic import synthetic
from fanfold.integrations.transformers.synthetic_adapters import write_adapters
from fanfold.spec.weight_format import WeightFormat
from fanfold.throughput.models import Adapters, CheckpointModels, Loaded, Models, RandomModels
from fanfold.throughput.pace import EXPERTS, Experts, Pace
from fanfold.throughput.steps import SAME, apart, decode, graphed_decode, prefill

Progress = Callable[[int, int, str], None]
DIFFERENCE = 0.1
"""Most relative difference of logits from those of fanfold, the median over tokens; unlike weights give 1 and more."""
COMPARED = 16
"""Tokens at the end of each row's prompt that are compared: logits of all of a long one need more room than a model."""
REPEATS = 3
"""Prefills that are timed; the fastest counts, as the machine's other work only adds."""


def throughput(
    model: str | Path,
    *,
    batches: Sequence[tuple[int, int]] = ((1, 64), (4, 64)),
    new: int = 16,
    experts: Sequence[Experts] = EXPERTS,
    adapters: Mapping[str, str | Path] | None = None,
    formats: Sequence[str] = ("gptq4-g128",),
    layers: int | None = None,
    random_adapters: int = 0,
    rank: int = 16,
    device: Literal["cuda", "cpu"] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> Iterator[dict[str, Any]]:
    """Times a model on random prompts, first with fanfold.

    Every model is loaded on its own and freed before the next. Logits of the prompt's end are compared with fanfold's
    before anything is timed. On a GPU decode steps are timed twice: eager, and as replays of a CUDA graph where the
    step can be captured.

    Args:
        model: the checkpoint directory; transformers' own experts run it where its weights are plain. Or the name of a
            model of random weights (`synthetic.MODELS`): these run the same weights dequantised.
        batches: rows of a batch and tokens of a row.
        new: decode steps to time.
        experts: what runs them.
        adapters: name -> PEFT directory; the rows of a batch have them in turn, the base first. Beside transformers'
            own experts they are PEFT's, a forward for each adapter's rows.
        formats: of a model of random weights.
        layers: of a model of random weights; None: all that the real one has.
        random_adapters: of a model of random weights, on all its experts, beside `adapters`.
        rank: of these.
        device: where; None: a GPU where there is one.
        dtype: of activations and unquantised weights.
        progress: called with (done, total, what).

    Yields:
        Rows as `Pace.row` has them.

    Raises:
        ArgumentError: a size below 1, no such model, or layers of a checkpoint.
        FanfoldError: what load_model and AdapterPool.load raise.
    """
    if min(new, 1 if layers is None else layers, *(size for batch in batches for size in batch)) < 1:
        words = ", ".join(f"{rows}x{prompt}" for rows, prompt in batches)
        raise ArgumentError(
            "sizes of a batch",
            found=f"batches of {words} tokens, {new} new tokens" + ("" if layers is None else f", {layers} layers"),
            expected="numbers from 1 on",
            next_step="Pass at least one row, one token and one step.",
        )
    where = device_named(device)
    sources = _models(model, formats, layers, random_adapters, where, dtype)
    with TemporaryDirectory() as folder:
        given = dict(adapters or {})
        if random_adapters and isinstance(sources[0], RandomModels):
            given |= write_adapters(Path(folder), sources[0].model, sources[0].layers, random_adapters, rank)
        yield from _paces(sources, batches, new, experts, given, where, dtype, progress)


def _paces(
    sources: Sequence[Models],
    batches: Sequence[tuple[int, int]],
    new: int,
    experts: Sequence[Experts],
    given: Adapters,
    where: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Iterator[dict[str, Any]]:
    """Every model with all experts, fanfold's first."""
    order = sorted(experts, key=lambda name: name != "fanfold")
    total, done = len(batches) * len(order) * len(sources), 0
    for source in sources:
        wanted: dict[tuple[int, int], Tensor] = {}
        for name in order:
            empty = [Pace(source.name, source.layers, "", name, *batch, new, len(given)) for batch in batches]
            reason = source.refusal(name)
            loaded = None if reason is not None else source.load(name, given)
            for pace in empty:
                if progress is not None:
                    progress(done, total, f"{name}, {pace.batch} rows of {pace.prompt} tokens")
                done += 1
                if loaded is None:
                    yield replace(pace, refused=reason).row(where, dtype)
                else:
                    yield _figures(replace(pace, weights=loaded.weights), loaded, given, wanted).row(where, dtype)
            del loaded
            gc.collect()
            if where.type == "cuda":
                torch.cuda.empty_cache()


def _models(
    model: str | Path,
    formats: Sequence[str],
    layers: int | None,
    random_adapters: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Models]:
    """The checkpoint, or a model of random weights in every format."""
    if Path(model).exists() or len(Path(model).parts) != 1:
        if layers is not None or random_adapters:
            words = [f"{random_adapters} random adapters"] if random_adapters else []
            raise ArgumentError(
                str(model),
                found=" and ".join([f"{layers} layers"] * (layers is not None) + words),
                expected="a checkpoint as it is, with adapters of its own",
                next_step="Pass --adapter NAME=DIR, or name a model of random weights.",
            )
        return [CheckpointModels(model, device, dtype)]
    found = synthetic(str(model))
    count = found.layers if layers is None else layers
    kinds = [WeightFormat.parse(name) for name in formats]
    return [RandomModels(str(model), found, count, fmt, device, dtype) for fmt in kinds]


def _figures(pace: Pace, loaded: Loaded, adapters: Adapters, wanted: dict[tuple[int, int], Tensor]) -> Pace:
    """One batch, or that the device has no room for it: batched_mm copies an expert's weights for every row."""
    try:
        return _timed(pace, loaded, adapters, wanted)
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        torch.cuda.empty_cache()
        return replace(pace, refused=f"no room: {str(error).partition('. ')[0]}")


@torch.inference_mode()
def _timed(pace: Pace, loaded: Loaded, adapters: Adapters, wanted: dict[tuple[int, int], Tensor]) -> Pace:
    """One batch: compared, then timed."""
    device, forward = loaded.device, loaded.forward
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, loaded.vocabulary, (pace.batch, pace.prompt), generator=generator).to(device)
    names = [None, *adapters]
    with loaded.using([names[row % len(names)] for row in range(pace.batch)]):
        logits = forward.prompt(ids, min(COMPARED, pace.prompt))[0].cpu()  # compiles and warms up
        expected = wanted.setdefault((pace.batch, pace.prompt), logits)
        difference = float(apart(logits, expected).median())
        if not difference < DIFFERENCE:
            return replace(pace, difference=difference, refused="other logits than fanfold's")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prefills = [prefill(forward, ids) for _ in range(REPEATS)]
        decode(forward, prefills[0][1], prefills[0][2], pace.new)  # cuDNN plans attention anew for every new length
        steps = decode(forward, prefills[-1][1], prefills[-1][2], pace.new)
        found = replace(
            pace,
            prefill_ms=1e3 * min(seconds for seconds, _, _ in prefills),
            decode_ms=1e3 * median(steps),
            tokens_per_second=pace.batch / median(steps),
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            difference=difference,
        )
        del prefills
        return _graphed(found, forward, ids) if device.type == "cuda" else found


def _graphed(pace: Pace, forward: Any, ids: Tensor) -> Pace:
    """The row with the times of replays, or why there are none."""
    if pace.experts == "eager":
        return replace(pace, graph_refused="waits for the device to say which experts have rows")
    if not isinstance(forward, ModelForward):
        return replace(pace, graph_refused="a forward for each adapter")
    try:
        found = graphed_decode(forward, ids, pace.new)
    except RuntimeError as error:
        return replace(pace, graph_refused=f"not captured: {str(error).partition(chr(10))[0]}")
    if not found.difference < SAME:
        words = f"replays differ from eager steps by {found.difference:.1e}"
        return replace(pace, graph_difference=found.difference, graph_refused=words)
    seconds = median(found.seconds)
    return replace(
        pace,
        graph_ms=1e3 * seconds,
        graph_tokens_per_second=pace.batch / seconds,
        graph_difference=found.difference,
    )
