"""One int4 expert layer on a Hopper GPU: every row of the tuned table is verified, then timed.

A layer is plan, gate_up with SiLU, down, and the weighted sum. Verification: the layer against fp32, at the size that
is timed, nearer than a plain evaluation with weights in bf16. Times: medians of CUDA-graph replays; a graph holds a
call for each of several routings, over several copies of the weights, so that nothing of a call before is in L2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import torch
import triton
from torch import Tensor

from fanfold.kernels.combine.combine import combine
from fanfold.kernels.grouped.sm90.fragments import from_fragments, separate
from fanfold.kernels.grouped.sm90.items import WorkItems, single_items, tiled_items
from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
from fanfold.kernels.grouped.sm90.tuned import TunedLayer, read_table
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.routing.plan import plan_sort
from fanfold.spec import Activation, WeightFormat

SILU = Activation()
FORMAT = WeightFormat.parse("gptq4-g128")
SHAPES = {"qwen3-30b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336), "deepseek-v3/8": (32, 8, 7168, 2048)}
"""E, k, H, I; the last is one of 8 expert-parallel ranks."""
COPIES = 3
ROUTINGS = 6


@dataclass(frozen=True, eq=False)
class Batch:
    """Activations and a uniform random routing."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def random_weights(experts: int, halves: int, n: int, k: int, seed: int) -> FragmentWeights:
    """Random codes and scales of about 1 / sqrt(K)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.empty(experts, n * halves // 64, k // 64, 512, dtype=torch.int32, device="cuda")
    for e in range(experts):  # one at a time: a draw of all of them would need twice the room
        words[e] = torch.randint(-(2**31), 2**31, words[e].shape, generator=generator, dtype=torch.int64, device="cuda")
    shape = (experts, n * halves // 64, k // FORMAT.group_size, 64)
    scales = (torch.rand(shape, generator=generator, device="cuda") + 0.5) * 0.25 * k**-0.5
    return FragmentWeights(FORMAT, n, k, halves, words, scales.half())


def dense(weights: FragmentWeights, expert: int) -> Tensor:
    """fp32 [P, N, K] of one expert."""
    one = slice(expert, expert + 1)
    codes = from_fragments(weights.words[one]).float()
    scales = weights.scales[one].float().transpose(2, 3).flatten(1, 2).repeat_interleave(FORMAT.group_size, 2)
    return separate((codes - 8.0) * scales, weights.halves)[0]


def random_batch(row: TunedLayer, seed: int) -> Batch:
    """Softmax of Gaussian scores, the k largest, renormalised."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.randn(row.tokens, row.experts, generator=generator, device="cuda").softmax(-1)
    weights, ids = scores.topk(row.top_k)
    x = torch.randn(row.tokens, row.hidden, generator=generator, device="cuda").bfloat16()
    return Batch(x, ids.int(), weights / weights.sum(-1, keepdim=True))


def plan(row: TunedLayer, ids: Tensor) -> WorkItems:
    """Work items of a batch; a single token needs no plan."""
    if row.tokens == 1:
        return single_items(ids, row.experts)
    return tiled_items(*plan_sort(ids, row.experts, row.gate_up.block_t))


def layer(row: TunedLayer, gate_up: FragmentWeights, down: FragmentWeights, batch: Batch) -> Tensor:
    """[T, H] -> [T, H]."""
    work = plan(row, batch.ids)
    h = grouped_gate_up(batch.x, gate_up, work, row.top_k, row.gate_up, SILU, row.chained)
    y2 = grouped_down(h, down, work, row.down, row.chained)
    return combine(y2, batch.ids, batch.weights, row.experts, dtype=batch.x.dtype)


def reference(gate_up: FragmentWeights, down: FragmentWeights, batch: Batch, rounded: bool) -> Tensor:
    """The layer in fp32, rounded to bf16 between the steps; rounded: weights too."""

    def act(values: Tensor) -> Tensor:
        return values.bfloat16().float()

    flat, top_k = batch.ids.flatten(), batch.ids.shape[1]
    y2 = torch.zeros(len(flat), down.n, device="cuda")
    for e in range(down.num_experts):
        rows = (flat == e).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        w13, (w2,) = dense(gate_up, e), dense(down, e)
        if rounded:
            w13, w2 = act(w13), act(w2)
        x = batch.x[rows // top_k].float()
        gate, up = act(x @ w13[0].T), act(x @ w13[1].T)
        y2[rows] = act(act(torch.nn.functional.silu(gate) * up) @ w2.T)
    rows_of_tokens = y2.view(len(batch.x), top_k, -1)
    out = torch.zeros(len(batch.x), down.n, device="cuda")
    for slot in range(top_k):
        out += batch.weights[:, slot, None] * rows_of_tokens[:, slot]
    return out


def verify(row: TunedLayer, gate_up: FragmentWeights, down: FragmentWeights, batch: Batch) -> dict[str, float]:
    """Errors against fp32; exits where the layer is not nearer than the plain evaluation."""
    exact, rounded = (reference(gate_up, down, batch, r) for r in (False, True))
    out = layer(row, gate_up, down, batch).float()
    size = exact.norm()
    plain = float((rounded - exact).norm() / size)
    wanted = exact if row.gate_up.scale_on_sum and row.down.scale_on_sum else rounded
    error = float((out - wanted).norm() / size)
    norm = abs(float(out.norm() / size) - 1)
    if not (error < plain and norm < plain):
        sys.exit(f"wrong: error {error:.2e}, norm off by {norm:.2e}, a plain evaluation has {plain:.2e}: {row}")
    return {"error": error, "plain_error": plain, "norm_off": norm}


def replay_times(calls: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """Lower quartile, median and upper quartile of microseconds a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:  # compiles
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    times: list[float] = []
    for number in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:  # the first ones wake the clocks
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return quantiles(times, n=4)


def measure(
    row: TunedLayer, pairs: Sequence[tuple[FragmentWeights, FragmentWeights]], replays: int
) -> dict[str, object]:
    """Times of the layer and its steps; copies of the weights and routings take turns."""
    batches = [random_batch(row, seed) for seed in range(ROUTINGS)]
    checked = verify(row, *pairs[0], batches[0])
    turns = [(*pairs[i % len(pairs)], batches[i]) for i in range(ROUTINGS)]
    works = [plan(row, batch.ids) for batch in batches]
    hidden = [torch.randn(row.tokens * row.top_k, row.intermediate, device="cuda").bfloat16() for _ in batches]
    y2 = grouped_down(hidden[0], pairs[0][1], works[0], row.down)
    steps: dict[str, list[Callable[[], object]]] = {
        "layer": [lambda a=a, b=b, c=c: layer(row, a, b, c) for a, b, c in turns],
        "plan": [lambda c=c: plan(row, c.ids) for _, _, c in turns],
        "gate_up": [
            lambda a=a, c=c, w=w: grouped_gate_up(c.x, a, w, row.top_k, row.gate_up, SILU)
            for (a, _, c), w in zip(turns, works, strict=True)
        ],
        "down": [
            lambda b=b, h=h, w=w: grouped_down(h, b, w, row.down)
            for (_, b, _), h, w in zip(turns, hidden, works, strict=True)
        ],
        "sum": [lambda c=c: combine(y2, c.ids, c.weights, row.experts, dtype=c.x.dtype) for _, _, c in turns],
    }
    us = {name: [round(t, 2) for t in replay_times(calls, replays)] for name, calls in steps.items()}
    return {**checked, "us": us}


def versions() -> dict[str, str]:
    """Machine, commit and versions."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name(),
        "commit": head.stdout.strip() or "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line a row, and appends it to the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, help="numbers of tokens of the table (default: all)")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("int4_layer.jsonl"), help="JSONL file, appended to")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("int4_layer.py needs a Hopper GPU (compute capability 9.0)")
    machine = versions()
    for name in given.shapes:
        experts, top_k, hidden, intermediate = SHAPES[name]
        rows = [
            row
            for row in read_table()
            if row.format == "int4"
            and (row.experts, row.top_k, row.hidden, row.intermediate) == SHAPES[name]
            and (given.tokens is None or row.tokens in given.tokens)
        ]
        pairs = [
            (
                random_weights(experts, 2, intermediate, hidden, seed),
                random_weights(experts, 1, hidden, intermediate, seed),
            )
            for seed in range(COPIES)
        ]
        for row in rows:
            found = {"shape": name, "tokens": row.tokens, "top_k": top_k, "chained": row.chained}
            found |= {
                "gate_up": row.gate_up.name,
                "down": row.down.name,
                **measure(row, pairs, given.replays),
                **machine,
            }
            print(json.dumps(found), flush=True)
            with given.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
