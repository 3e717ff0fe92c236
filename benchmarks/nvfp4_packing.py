"""Speed of NVFP4 packing and of the swizzle of its scales, beside a copy of as many bytes: see README.md beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer
from torch import Tensor

from fanfold import reference
from fanfold.bench.machine import device_named, machine
from fanfold.bench.timing import Replays, Times, call_times
from fanfold.cli.output import out, progress_bar
from fanfold.formats import nvfp4
from fanfold.kernels.nvfp4 import reference as rules
from fanfold.ops.nvfp4_packing import nvfp4_pack_rows, nvfp4_pack_weights, nvfp4_swizzle, nvfp4_unswizzle
from fanfold.spec import WeightFormat

DTYPE = torch.bfloat16
BEYOND_L2 = 300 * 2**20
"""Bytes that the calls of a graph move between two visits of the same buffer, several times an L2 cache."""
MOST_COPIES = 64
AT_ONCE = 2**26
"""Values that the reference takes at once, in fp32 and on the device."""

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
    """What is timed.

    Attributes:
        name: the kind of work.
        sizes: of the row of results.
        make: inputs, from a seed.
        call: the operation.
        wanted: what it must give, bit for bit.
        reads: how often it reads its inputs.
    """

    name: str
    sizes: dict[str, Any]
    make: Callable[[int], Tensors]
    call: Callable[..., Tensors]
    wanted: Callable[..., Tensors]
    reads: int = field(default=1)


def random(shape: Sequence[int], seed: int, device: torch.device, dtype: torch.dtype = DTYPE) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def random_scales(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Bytes of E4M3 numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    scales = torch.randint(0, 127, tuple(shape), generator=generator, device=device, dtype=torch.uint8)
    return scales.view(torch.float8_e4m3fn)


def activation_jobs(tokens: Sequence[int], inputs: Sequence[int], device: torch.device) -> Iterator[Job]:
    """Rows, by both rules of rounding, with one and two levels of scales, as they lie and gathered by token."""
    for rows, k, levels, ties, gathered in product(tokens, inputs, (1, 2), ("even", "zero"), (False, True)):

        def make(seed: int, rows: int = rows, k: int = k, levels: int = levels, gathered: bool = gathered) -> Tensors:
            x = random((rows, k), seed, device)
            gs = [random((rows,), seed, device, torch.float32).abs() / 500 + 1e-4] if levels == 2 else []
            ids = [torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).int().to(device)]
            return (x, *gs, *(ids if gathered else []))

        def split(levels: int, gathered: bool, rest: Tensors) -> tuple[Tensor | None, Tensor | None]:
            return rest[0] if levels == 2 else None, rest[-1] if gathered else None

        def call(
            x: Tensor, *rest: Tensor, levels: int = levels, gathered: bool = gathered, ties: str = ties
        ) -> Tensors:
            return nvfp4_pack_rows(x, *split(levels, gathered, rest), ties)

        def wanted(
            x: Tensor, *rest: Tensor, levels: int = levels, gathered: bool = gathered, ties: str = ties
        ) -> Tensors:
            gs, ids = split(levels, gathered, rest)
            x = x if ids is None else x[ids.long()]
            count = max(1, AT_ONCE // x.shape[1])
            parts = [
                rules.pack_rows(
                    x[at : at + count],
                    None if gs is None else gs[at : at + count],
                    ties=cast("Literal['even', 'zero']", ties),
                )
                for at in range(0, len(x), count)
            ]
            return joined(parts)

        sizes = {"rows": rows, "k": k, "levels": levels, "ties": ties, "gathered": gathered}
        yield Job("activations", sizes, make, call, wanted)


def weight_jobs(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> Iterator[Job]:
    """Whole stacks: a first pass for the largest size of each matrix, a second one that packs."""
    for (experts, n, k), divisor, transposed in product(shapes, (False, True), (False, True)):

        def make(seed: int, shape: tuple[int, int, int] = (experts, n, k)) -> Tensors:
            return (torch.stack([random(shape[1:], seed * shape[0] + e, device) for e in range(shape[0])]),)

        def call(w: Tensor, divisor: bool = divisor, transposed: bool = transposed) -> Tensors:
            return nvfp4_pack_weights(w, divisor, transposed)

        def wanted(w: Tensor, divisor: bool = divisor, transposed: bool = transposed) -> Tensors:
            fmt = WeightFormat("nvfp4", 4, group_size=nvfp4.GROUP, divisor=divisor)
            parts: list[Tensors] = []
            for weight in w:
                made = nvfp4.quantize(fmt, weight.float())
                scale = made["scale"].T.contiguous() if transposed else made["scale"]
                parts.append((made["packed"][None], scale[None], made["global_scale"][None]))
            return joined(parts)

        sizes = {"experts": experts, "n": n, "k": k, "divisor": divisor, "transposed": transposed}
        yield Job("weights", sizes, make, call, wanted, reads=2)


def swizzle_jobs(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> Iterator[Job]:
    """Scales of all experts in one launch, from both layouts, and back."""
    for (experts, n, k), transposed in product(shapes, (False, True)):
        groups = k // rules.GROUP

        def make(seed: int, shape: tuple[int, ...] = (experts, n, groups), transposed: bool = transposed) -> Tensors:
            scales = random_scales(shape, seed, device)
            return (scales.mT.contiguous().mT if transposed else scales,)

        def call(scales: Tensor) -> Tensors:
            return (nvfp4_swizzle(scales),)

        def wanted(scales: Tensor) -> Tensors:
            return (reference.nvfp4_swizzle(scales.contiguous()),)

        sizes = {"experts": experts, "n": n, "k": k, "transposed": transposed}
        yield Job("swizzle", sizes, make, call, wanted)
        if not transposed:

            def swizzled(seed: int, shape: tuple[int, ...] = (experts, n, groups)) -> Tensors:
                return (reference.nvfp4_swizzle(random_scales(shape, seed, device)),)

            def back(scales: Tensor, n: int = n, k: int = k) -> Tensors:
                return (nvfp4_unswizzle(scales, n, k),)

            def wanted_back(scales: Tensor, n: int = n, k: int = k) -> Tensors:
                return (reference.nvfp4_unswizzle(scales, n, k),)

            yield Job("unswizzle", sizes, swizzled, back, wanted_back)


def joined(parts: Sequence[Tensors]) -> Tensors:
    """Parts of several tensors, each one behind the other; bytes of 8-bit floats, which torch can't join."""
    return tuple(
        torch.cat([as_bytes(t) if t.element_size() == 1 else t for t in each]) for each in zip(*parts, strict=True)
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory."""
    return tensor.contiguous().view(torch.uint8)


def wrong(job: Job, inputs: Tensors) -> str | None:
    """What the operation gives that it should not."""
    found, wanted = job.call(*inputs), job.wanted(*inputs)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.shape != other.shape:
            return f"output {number} has the shape {list(one.shape)}, not {list(other.shape)}"
        unlike = int((as_bytes(one) != as_bytes(other)).sum())
        if unlike:
            return f"{unlike} bytes of output {number} are not the reference's"
    return None


def timed(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> Times:
    """Replays of a graph of the calls; on a CPU the calls.

    Raises:
        SystemExit: a replay gives other bits than the eager calls.
    """
    if device.type == "cpu":
        return call_times([calls])[0]
    replays = Replays(calls)
    if replays.wrong:
        raise SystemExit(f"{replays.wrong} of {len(calls)} calls give other bits in a replay: no figures")
    return replays.times()


def copy_times(moved: int, copies: int, device: torch.device) -> Times:
    """A copy that reads and writes as many bytes in all."""
    pairs = [
        (torch.zeros(moved // 4, dtype=DTYPE, device=device), torch.empty(moved // 4, dtype=DTYPE, device=device))
        for _ in range(copies)
    ]
    return timed([lambda one=one, other=other: other.copy_(one) for one, other in pairs], device)


def measure(job: Job, device: torch.device) -> dict[str, Any]:
    """The row of results."""
    inputs = job.make(0)
    outputs = job.call(*inputs)
    read, written = (sum(t.nbytes for t in tensors) for tensors in (inputs, outputs))
    moved = read * job.reads + written
    copies = max(1, min(MOST_COPIES, -(-BEYOND_L2 // (read + written)))) if device.type == "cuda" else 1
    row = {"job": job.name, **job.sizes, "device": device.type, "bytes": moved, "copies": copies}
    row["refused"] = wrong(job, inputs)
    if row["refused"] is None:
        kept = [inputs, *(job.make(seed) for seed in range(1, copies))]
        # The first output, as floats: what a replay did not write would be NaN.
        found = timed([lambda given=given: job.call(*given)[0].view(torch.float32) for given in kept], device)
        del kept
        copy = copy_times(moved, copies, device)
        row |= {"median_us": found.median_us, "p20_us": found.p20_us, "p80_us": found.p80_us}
        row |= {"replays": found.replays, "copy_us": copy.median_us, "of_copy": copy.median_us / found.median_us}
        row["gigabytes_per_second"] = moved / found.median_us / 1e3
    return row | machine(device)


def sizes_of(text: str) -> list[int]:
    """E.g. "16,256"."""
    return [int(size) for size in text.split(",") if size]


def main(
    tokens: Annotated[str, typer.Option(help="Rows of activations.")] = "16,256,4096,16384",
    inputs: Annotated[str, typer.Option(help="Their sizes, K.")] = "2048,7168",
    weights: Annotated[
        str, typer.Option(help="E x N x K of stacks, and of their scales.")
    ] = "128x1536x2048,128x2048x768",
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="a GPU where there is one")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Append the rows to this file.")] = None,
) -> None:
    """Verifies, then times: packing of activations and weights, swizzle of scales."""
    where = device_named(cast("Literal['cuda', 'cpu'] | None", device))
    shapes = [
        cast("tuple[int, int, int]", tuple(int(size) for size in shape.split("x"))) for shape in weights.split(",")
    ]
    jobs = [
        *activation_jobs(sizes_of(tokens), sizes_of(inputs), where),
        *weight_jobs(shapes, where),
        *swizzle_jobs(shapes, where),
    ]
    refused = 0
    with progress_bar() as progress:
        for number, job in enumerate(jobs):
            progress(number, len(jobs), job.name)
            row = measure(job, where)
            refused += row["refused"] is not None
            if out_file is not None:
                with out_file.open("a") as opened:
                    opened.write(json.dumps(row) + "\n")
            words = " ".join(f"{name} {value}" for name, value in job.sizes.items())
            found = (
                row["refused"]
                or f"{row['median_us']:.1f} us, {row['gigabytes_per_second']:.0f} GB/s, {row['of_copy']:.2f} of a copy"
            )
            out.print(f"{job.name} {words}: {found}")
            if where.type == "cuda":
                torch.cuda.empty_cache()
    if refused:
        raise SystemExit(f"{refused} of {len(jobs)} jobs are wrong and have no figures")


if __name__ == "__main__":
    typer.run(main)
