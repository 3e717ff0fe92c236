"""Which kernels are exported: every op with the configs that the library itself selects, by arch and dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from math import inf, log2

from fanfold.errors import ArgumentError
from fanfold.export.description import DTYPES, Kernel
from fanfold.export.functions import elementwise, grouped, lora_kernels, routing, weights
from fanfold.spec.arch import SHARED_BYTES

_BY_ARCH: Mapping[str, Callable[[str], Iterator[Kernel]]] = {
    "plan_sort": routing.kernels,
    "plan_sort_many": routing.kernels_of_many,
    "lora_order": lora_kernels.order_kernels,
}
"""Those that know no activations."""
_BY_DTYPE: Mapping[str, Callable[[str, str], Iterator[Kernel]]] = {
    "lora_fold": lora_kernels.fold_kernels,
    "lora_shrink": lora_kernels.shrink_kernels,
    "lora_expand": lora_kernels.expand_kernels,
    "activate": elementwise.activate_kernels,
    "combine": elementwise.combine_kernels,
}
OPS = ("plan_sort", "plan_sort_many", *weights.FORMATS, "lora_order", *_BY_DTYPE)
ARCHS = tuple(SHARED_BYTES)


def plan(
    archs: Sequence[int | str],
    ops: Sequence[str],
    dtypes: Sequence[str] = ("bf16",),
    formats: Sequence[str] = (),
    configs: Sequence[str] = (),
) -> list[Kernel]:
    """Every kernel of an export.

    Args:
        archs: compute capabilities, e.g. 90 or "sm_90".
        ops: of OPS.
        dtypes: of activations: bf16, fp16, fp32.
        formats: of weights; none: all that an op is exported for.
        configs: names; none: all that the library selects.

    Returns:
        Each kernel once, by arch, op, dtype, format and config.

    Raises:
        ArgumentError: an arch, op, dtype, format or config is not among those; names the nearest that is.
    """
    chosen = list(dict.fromkeys(_arch(arch) for arch in archs))
    for op in ops:
        _known("op", op, OPS)
    for dtype in dtypes:
        _known("dtype", dtype, DTYPES)
    offered = [name for op in ops for name in weights.FORMATS.get(op, ())]
    for name in formats:
        _known("format", name, offered)
    found: list[Kernel] = []
    for arch in chosen:
        for op in dict.fromkeys(ops):
            found += _of_op(op, arch, dtypes, formats)
    names = list(dict.fromkeys(kernel.config for kernel in found))
    for config in configs:
        _known("config", config, names)
    return [kernel for kernel in found if not configs or kernel.config in configs]


def _of_op(op: str, arch: str, dtypes: Sequence[str], formats: Sequence[str]) -> Iterator[Kernel]:
    if op in _BY_ARCH:
        yield from _BY_ARCH[op](arch)
        return
    for dtype in dict.fromkeys(dtypes):
        if op in _BY_DTYPE:
            yield from _BY_DTYPE[op](arch, dtype)
        else:
            wanted = tuple(name for name in weights.FORMATS[op] if not formats or name in formats)
            yield from grouped.kernels(op, arch, dtype, wanted)


def _arch(arch: int | str) -> str:
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})", str(arch).lower())
    if match and f"sm_{match[1]}" in ARCHS:
        return f"sm_{match[1]}"
    numbers = [int(name.removeprefix("sm_")) for name in ARCHS]
    nearest = "" if match is None else f"; nearest: {min(numbers, key=lambda number: abs(number - int(match[1])))}"
    raise ArgumentError(
        "arch",
        found=str(arch),
        expected=f"one of {', '.join(map(str, numbers))}{nearest}",
        next_step="Pass the compute capability of the GPU that is to run the kernels, e.g. 90 for an H200.",
    )


def _known(what: str, found: str, offered: Sequence[str]) -> None:
    """Refuses a name that is not offered, with the offered one that is most like it."""
    if found in offered:
        return
    ranked = sorted(dict.fromkeys(offered), key=lambda name: _distance(found, name))
    nearest = f"; nearest: {ranked[0]}" if ranked else ""
    raise ArgumentError(
        what,
        found=found,
        expected=f"one of {', '.join(sorted(ranked))}{nearest}" if ranked else f"no {what}: these ops have none",
        next_step="docs/commands/export.md lists ops, formats and configs.",
    )


def _distance(found: str, offered: str) -> tuple[float, float]:
    """How unlike two names are: by their numbers where those alone differ (as in configs), else by their letters."""
    apart = inf
    if re.sub(r"\d+", "#", found) == re.sub(r"\d+", "#", offered):
        pairs = zip(re.findall(r"\d+", found), re.findall(r"\d+", offered), strict=True)
        apart = sum(abs(log2((1 + int(a)) / (1 + int(b)))) for a, b in pairs)
    return apart, -SequenceMatcher(None, found, offered).ratio()
