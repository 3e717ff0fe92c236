"""CUDA graphs in tests: a replay gives the bits of an eager call."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Call = Callable[..., Sequence[Tensor]]


def check_replays(call: Call, batches: Sequence[Sequence[Tensor]]) -> None:
    """Captures `call` on the first batch and replays it on each.

    Args:
        call: takes tensors on the GPU and returns those it made.
        batches: its arguments, the same shapes and dtypes each time.
    """
    static = [tensor.clone() for tensor in batches[0]]
    call(*static)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(*static)
    for batch in batches:
        for tensor, value in zip(static, batch, strict=True):
            tensor.copy_(value)
        for output in outputs:
            poison(output)
        graph.replay()
        torch.cuda.synchronize()
        for output, eager in zip(outputs, call(*batch), strict=True):
            assert same_bits(output, eager)


def poison(tensor: Tensor) -> None:
    """Fills with what no kernel may leave there: NaN, or a large negative number; bytes with 0xFF, E4M3's NaN."""
    if tensor.dtype == torch.uint8:
        tensor.fill_(0xFF)
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**30))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def dirty_memory(device: str) -> None:
    """Leaves NaN in the memory that the next torch.empty calls get."""
    if device == "cuda":
        for size in (2**12, 2**20, 2**24):
            torch.full((size,), torch.nan, device=device)
