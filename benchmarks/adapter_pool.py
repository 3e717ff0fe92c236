"""Memory of an AdapterPool, and how fast adapters are loaded into it: see README.md beside this file."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from fanfold.bench.adapters import pair_bytes, random_pairs
from fanfold.bench.jobs import LAYERS, LayerShape
from fanfold.bench.machine import device_named, machine
from fanfold.bench.weights import random_experts
from fanfold.cli.output import out, print_json, progress_bar
from fanfold.layers.experts import Experts
from fanfold.lora import AdapterPool, Rows
from fanfold.lora.files import FILE_NAME
from fanfold.spec import ExpertShape, WeightFormat

DTYPE = torch.bfloat16
PART = 64 * 2**20
"""Bytes of a read or a copy that is timed, about what a layer of the adapter takes."""
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Layers(nn.Module):
    """Expert layers and nothing else: what a pool needs of a model."""

    def __init__(self, shape: LayerShape, layers: int, device: torch.device) -> None:
        super().__init__()
        weights = random_experts(shape, WeightFormat.parse("gptq4-g128"), device, seed=0)
        self.layers = nn.ModuleList(
            Experts(weights, shape.activation, dtype=DTYPE, path=f"model.layers.{number}.mlp.experts")
            for number in range(layers)
        )
        self.adapter_rows = Rows(device)

    @property
    def adapter_sites(self) -> dict[str, Experts]:
        """The layers by path."""
        return {layer.path: layer for layer in cast("list[Experts]", list(self.layers))}


def write_adapter(folder: Path, shape: LayerShape, layers: int, rank: int, device: torch.device) -> None:
    """An adapter of all experts and projections, with the names that PEFT gives the modules of qwen3_moe."""
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        for (projection, expert), pair in random_pairs(shape, rank, DTYPE, device, seed=layer).items():
            module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{NAMES[projection]}"
            for side, factor in (("A", pair.a), ("B", pair.b)):
                tensors[f"{module}.lora_{side}.weight"] = factor.cpu().clone(memory_format=torch.contiguous_format)
    save_file(tensors, folder / FILE_NAME)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(NAMES.values())}
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"peft_version": "0.21.2"}))


def check_values(model: Layers, slot: int, shape: LayerShape, rank: int, device: torch.device) -> None:
    """Whether a slot of the last layer holds what was written."""
    layer = cast("Experts", model.layers[-1])
    for (projection, expert), pair in random_pairs(shape, rank, DTYPE, device, seed=len(model.layers) - 1).items():
        held = layer.pairs[projection][slot, expert]
        if not (torch.equal(held.a, pair.a) and torch.equal(held.b, pair.b)):
            raise SystemExit(f"{projection} of expert {expert} is not what the file holds: no figures")


def seconds(call: Callable[[], object]) -> float:
    """What a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_rate(file: Path, pinned: bool) -> float:
    """GB/s of reading the file in parts into one buffer, the fastest of three times."""
    buffer = torch.empty(min(PART, file.stat().st_size), dtype=torch.uint8, pin_memory=pinned)

    def read() -> None:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer.numpy().data):
                pass

    return file.stat().st_size / min(seconds(read) for _ in range(3)) / 1e9


def copy_rate(device: torch.device) -> float | None:
    """GB/s of copies from pinned memory to a GPU, the fastest of three times 16."""
    if device.type != "cuda":
        return None
    host = torch.empty(PART, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty_like(host, device=device)

    def copy() -> None:
        for _ in range(16):
            memory.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)

    return 16 * PART / min(seconds(copy) for _ in range(3)) / 1e9


def launches(device: torch.device, running: Callable[[], bool]) -> dict[str, float]:
    """Microseconds from the launch of a small kernel on the main stream to its end, over and over."""
    x = torch.zeros(1024, device=device)
    taken: list[float] = []

    def launch() -> None:
        x.add_(1)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    launch()
    while running() or len(taken) < 100:
        taken.append(1e6 * seconds(launch))
    return {"p50": statistics.median(taken), "p99": statistics.quantiles(taken, n=100)[-1]}


def beside_launches(device: torch.device, load: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Seconds of a load, and what launches take meanwhile."""
    taken: list[float] = []
    thread = threading.Thread(target=lambda: taken.append(seconds(load)))
    thread.start()
    found = launches(device, thread.is_alive)
    thread.join()
    return taken[0], found


def measure(shape: LayerShape, layers: int, adapters: int, rank: int, device: torch.device) -> dict[str, Any]:
    """The row of results."""
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name, progress_bar() as progress:
        folder, steps = Path(name), adapters + 4
        progress(0, steps, "layers")
        model = Layers(shape, layers, device)
        pool = AdapterPool(model, slots=adapters + 1, max_rank=rank)
        progress(1, steps, "write")
        write_adapter(folder, shape, layers, rank, device)
        progress(2, steps, "load")

        def held() -> int:
            return torch.cuda.memory_allocated(device) if on_gpu else pool.stats()["bytes"]

        pool.load("warm", folder)
        check_values(model, pool.slot("warm"), shape, rank, device)
        memory, taken = [held()], list[float]()
        reserved = torch.cuda.memory_reserved(device) if on_gpu else 0
        for number in range(adapters):
            taken.append(seconds(lambda number=number: pool.load(f"adapter {number}", folder)))
            memory.append(held())
            progress(3 + number, steps, "load")
        if on_gpu:
            reserved = torch.cuda.memory_reserved(device) - reserved
        check_values(model, pool.slot(f"adapter {adapters - 1}"), shape, rank, device)
        progress(adapters + 3, steps, "launches, reads, copies")
        pool.unload("warm")
        quiet = launches(device, lambda: False)
        beside, loading = beside_launches(device, lambda: pool.load("again", folder))
        check_values(model, pool.slot("again"), shape, rank, device)
        file = folder / FILE_NAME
        padded = layers * shape.experts.num_experts * pair_bytes(shape, rank, DTYPE)
        return {
            "padded_bytes": padded,
            "memory_bytes": [after - before for before, after in pairwise(memory)],
            "over_padded": (memory[-1] - memory[0]) / (adapters * padded),
            "reserved_bytes": reserved if on_gpu else None,
            "file_bytes": file.stat().st_size,
            "load_s": taken,
            "load_gigabytes_per_second": file.stat().st_size / statistics.median(taken) / 1e9,
            "read_gigabytes_per_second": read_rate(file, on_gpu),
            "copy_gigabytes_per_second": copy_rate(device),
            "launch_us": quiet,
            "launch_us_beside_load": loading,
            "load_s_beside_launches": beside,
        }


def main(
    layers: Annotated[int, typer.Option(min=1, help="Expert layers.")] = 48,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters to load, behind one that warms up.")] = 16,
    rank: Annotated[int, typer.Option(min=1, max=512)] = 32,
    experts: Annotated[int, typer.Option(min=8, help="Experts a layer; other sizes are those of qwen3-30b.")] = 128,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="a GPU where there is one")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Append the row to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the row.")] = False,
) -> None:
    """Loads one adapter under many names: memory and speed."""
    full = LAYERS["qwen3-30b"]
    shape = LayerShape(full.name, ExpertShape(experts, full.experts.hidden, full.experts.intermediate), full.top_k)
    where = device_named(cast("Literal['cuda', 'cpu'] | None", device))
    asked = {"shape": shape.name, "layers": layers, "experts": experts, "adapters": adapters, "rank": rank}
    row = asked | {"dtype": "bfloat16", "device": where.type}
    row |= measure(shape, layers, adapters, rank, where) | machine(where)
    if out_file is not None:
        with out_file.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
    if as_json:
        print_json(row)
        return
    out.print(f"memory: {row['over_padded']:.4f} x the rank-padded bytes, {row['padded_bytes']:,} an adapter")
    out.print(f"load: {statistics.median(row['load_s']):.3f} s, {row['load_gigabytes_per_second']:.2f} GB/s")
    out.print(f"reading the file, in the page cache: {row['read_gigabytes_per_second']:.2f} GB/s")
    out.print(f"pinned copies to the GPU: {row['copy_gigabytes_per_second'] or 0:.2f} GB/s")
    out.print(f"a launch: {row['launch_us']['p50']:.1f} us, beside a load {row['launch_us_beside_load']['p50']:.1f} us")


if __name__ == "__main__":
    typer.run(main)
