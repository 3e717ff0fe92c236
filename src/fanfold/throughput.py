"""throughput: prefill and decode of a whole model, with fanfold's experts and with transformers' own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fanfold.bench.machine import device_named, machine
from fanfold.errors import ArgumentError
from fanfold.formats.checkpoint import Checkpoint
from fanfold.integrations.transformers.interface import plain_model
from fanfold.integrations.transformers.model import load_model

Experts = Literal["fanfold", "eager", "grouped_mm", "batched_mm"]
EXPERTS: tuple[Experts, ...] = ("fanfold", "eager", "grouped_mm", "batched_mm")
Progress = Callable[[int, int, str], None]
DIFFERENCE = 0.1
"""Most relative difference of logits from those of fanfold, the median over tokens; unlike weights give 1 and more."""
WARM_UP = 2
"""Decode steps before those that are timed."""
REPEATS = 3
"""Prefills that are timed; the fastest counts, as the machine's other work only adds."""


@dataclass(frozen=True)
class Pace:
    """One model and batch.

    Attributes:
        model: the checkpoint's folder.
        experts: what runs the experts: fanfold, or one of transformers' implementations.
        batch: rows.
        prompt: tokens of a row.
        new: decode steps that were timed.
        adapters: adapters that the rows have in turn, the base among them; 0 = the base alone.
        prefill_ms: the prompt's forward, to the first token.
        decode_ms: a step of the whole batch, eager, the median.
        tokens_per_second: decoded by all rows.
        peak_bytes: most memory that was allocated on the GPU, weights included; None on a CPU.
        difference: of the prompt's logits from fanfold's: relative, the median over tokens.
        refused: why there are no times.
    """

    model: str
    experts: Experts
    batch: int
    prompt: int
    new: int
    adapters: int
    prefill_ms: float | None = None
    decode_ms: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    difference: float | None = None
    refused: str | None = None

    def row(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """All of it by name, with device, dtype and machine."""
        of_device = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
        return {"schema": 1, **asdict(self), **of_device, **machine(device)}


def throughput(
    path: str | Path,
    *,
    batches: Sequence[int] = (1, 4),
    prompt: int = 64,
    new: int = 16,
    experts: Sequence[Experts] = EXPERTS,
    adapters: Mapping[str, str | Path] | None = None,
    device: Literal["cuda", "cpu"] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> Iterator[dict[str, Any]]:
    """Times a checkpoint on random prompts, first with fanfold.

    Every model is loaded on its own and freed before the next. Logits of the prompt are compared with fanfold's before
    anything is timed. transformers' own experts run plain weights alone: it loads most packed experts as random or
    wrong ones, so there is no row for them. Adapters run with fanfold.

    Args:
        path: the checkpoint directory.
        batches: rows of a batch, one row of results for each.
        prompt: tokens of a row.
        new: decode steps to time.
        experts: what runs them.
        adapters: name -> PEFT directory; the rows of a batch have them in turn, the base first.
        device: where; None: a GPU where there is one.
        dtype: of activations and unquantised weights.
        progress: called with (done, total, what).

    Yields:
        Rows as `Pace.row` has them.

    Raises:
        ArgumentError: a size below 1.
        FanfoldError: what load_model and AdapterPool.load raise.
    """
    if min(prompt, new, *batches) < 1:
        raise ArgumentError(
            "sizes of a batch",
            found=f"batches {list(batches)}, a prompt of {prompt}, {new} new tokens",
            expected="numbers from 1 on",
            next_step="Pass at least one row, one token and one step.",
        )
    where = device_named(device)
    packed = Checkpoint(path).quantization.method
    given = dict(adapters or {})
    wanted: dict[int, Tensor] = {}
    total = len(batches) * len(experts)
    for number, name in enumerate(sorted(experts, key=lambda name: name != "fanfold")):
        empty = [Pace(str(path), name, batch, prompt, new, len(given)) for batch in batches]
        reason = _refusal(name, packed, given)
        model = None if reason is not None else _loaded(path, name, given, where, dtype)
        for index, pace in enumerate(empty):
            if progress is not None:
                progress(number * len(batches) + index, total, f"{name}, {pace.batch} rows")
            if model is None:
                yield replace(pace, refused=reason).row(where, dtype)
            else:
                yield _timed(pace, model, given, wanted).row(where, dtype)
        del model
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


def _refusal(name: Experts, packed: str | None, adapters: Mapping[str, Any]) -> str | None:
    if name == "fanfold":
        return None
    if packed is not None:
        return f"transformers has no experts for {packed} weights"
    return "adapters by row are fanfold's" if adapters else None


def _loaded(
    path: str | Path, name: Experts, adapters: Mapping[str, str | Path], device: torch.device, dtype: torch.dtype
) -> Any:
    if name == "fanfold":
        model = load_model(path, device=device.type, dtype=dtype)
        for adapter, folder in adapters.items():
            model.adapters.load(adapter, folder)
        return model
    return plain_model(path, name, dtype).to(device)


@torch.inference_mode()
def _timed(pace: Pace, model: Any, adapters: Mapping[str, Any], wanted: dict[int, Tensor]) -> Pace:
    """One batch: compared, then timed."""
    device = model.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (pace.batch, pace.prompt), generator=generator).to(device)
    names = [None, *adapters]
    rows = [names[row % len(names)] for row in range(pace.batch)]
    with model.adapters.using(rows) if adapters else nullcontext():
        logits = model(input_ids=ids, use_cache=True).logits.float().cpu()  # compiles and warms up
        expected = wanted.setdefault(pace.batch, logits)
        off = cast("Tensor", (logits - expected).norm(dim=-1) / expected.norm(dim=-1))
        difference = float(off.median())
        if not difference < DIFFERENCE:  # NaN too
            return replace(pace, difference=difference, refused="other logits than fanfold's")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prefills = [_prefill(model, ids) for _ in range(REPEATS)]
        steps = _decode(model, prefills[-1][1], prefills[-1][2], pace.new)
    decode = median(steps)
    return replace(
        pace,
        prefill_ms=1e3 * min(seconds for seconds, _, _ in prefills),
        decode_ms=1e3 * decode,
        tokens_per_second=pace.batch / decode,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        difference=difference,
    )


def _prefill(model: Any, ids: Tensor) -> tuple[float, Tensor, Any]:
    """Seconds, the next tokens [B, 1] and the cache."""
    start = _now(ids.device)
    found = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    token = found.logits[:, -1:].argmax(-1)
    return _now(ids.device) - start, token, found["cache" if "cache" in found else "past_key_values"]


def _decode(model: Any, token: Tensor, cache: Any, new: int) -> list[float]:
    """Seconds of each step behind the first ones."""
    seconds: list[float] = []
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before transformers 5.24
    for _ in range(WARM_UP + new):
        start = _now(token.device)
        found = model(input_ids=token, use_cache=True, **{name: cache})
        token = found.logits[:, -1:].argmax(-1)
        seconds.append(_now(token.device) - start)
    return seconds[WARM_UP:]


def _now(device: torch.device) -> float:
    """The host's clock, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
