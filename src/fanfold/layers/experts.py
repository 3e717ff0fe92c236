"""Experts: the expert layer as an nn.Module, weights packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fanfold.errors import ArgumentError
from fanfold.layers.backward import without_backward
from fanfold.layers.reference import layer
from fanfold.lora.rows import Rows
from fanfold.lora.site import ExpertPairs, Site
from fanfold.select import choose
from fanfold.spec.activation import Activation
from fanfold.spec.lora import LoraPair
from fanfold.spec.shape import ExpertShape
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Experts(nn.Module):
    """The experts of one layer: gate_up, activation, down and the weighted sum, for packed weights.

    Args:
        weights: the packed experts.
        activation: between gate_up and down.
        dtype: of the activations; LoRA pairs are kept in it.
        implementation: "auto", or "reference" for the readable torch version.
        path: the module's name in the model, by which adapters find it.
        interleaved: adapters of fused gate_up rows alternate gate and up (gpt-oss).
        transposed: the model's own parameters are (E, inputs, outputs); tells the layout of old adapters.

    Raises:
        ArgumentError, UnavailableError: no such implementation, or none for the weights' device.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        *,
        dtype: torch.dtype,
        implementation: str = "auto",
        path: str = "experts",
        interleaved: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.weights = weights
        self.activation = activation
        self.dtype = dtype
        self.path = path
        self.interleaved = interleaved
        self.transposed = transposed
        self.requested = implementation
        self.implementation = choose(arch_of(self.device), implementation)
        self.adapter_rows = Rows()
        self.pairs: dict[str, dict[tuple[int, int], LoraPair]] = {"gate": {}, "up": {}, "down": {}}

    @property
    def shape(self) -> ExpertShape:
        """The layer's sizes."""
        return self.weights.shape

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.weights.down.tensors.values())).device

    @property
    def adapter_sites(self) -> Mapping[str, Site]:
        """This layer as the only place of an adapter pool of its own."""
        return {self.path: self}

    def put(self, slot: int, pairs: ExpertPairs) -> None:
        """Fills a slot; what was in it is dropped."""
        self.drop(slot)
        for (projection, expert), pair in pairs.items():
            self.pairs[projection][slot, expert] = pair

    def drop(self, slot: int) -> None:
        """Empties a slot."""
        for pairs in self.pairs.values():
            for key in [key for key in pairs if key[0] == slot]:
                del pairs[key]

    def forward(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None = None
    ) -> Tensor:
        """The weighted sum over each token's experts.

        Args:
            hidden: [T, H], bf16, fp16 or fp32.
            topk_ids: int32 or int64 [T, k]; an id outside [0, E) is an expert of another rank and adds nothing.
            topk_weights: [T, k], bf16, fp16 or fp32.
            adapter_ids: int32 or int64 [T], adapter slot of each token, < 0 for the base. None: as the pool's `using`
                block says, base without one.

        Returns:
            [T, H] in hidden's dtype.

        Raises:
            ArgumentError: a wrong shape, dtype or device.
            InferenceOnlyError: on backward through the result.
        """
        self._check(hidden, topk_ids, topk_weights, adapter_ids)
        with torch.no_grad():
            out = run_eagerly(self, hidden, topk_ids, topk_weights, adapter_ids)
        return without_backward(out, hidden, topk_weights)

    def extra_repr(self) -> str:
        """Formats and sizes."""
        shape = self.shape
        formats = dict.fromkeys((self.weights.gate_up.format.name, self.weights.down.format.name))
        return (
            f"{', '.join(formats)}, E={shape.num_experts}, H={shape.hidden}, I={shape.intermediate}, "
            f"{self.activation.kind}, implementation={self.implementation}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the packed weights with the module; casts (`.to(dtype)`, `.half()`) leave them as they are.

        Raises:
            ArgumentError: a cast that means packed words too (`.type(dtype)`).
        """
        super()._apply(fn, recurse)
        self.weights = ExpertWeights(_moved(self.weights.gate_up, fn), _moved(self.weights.down, fn))
        self.pairs = {
            name: {key: replace(pair, a=_move(pair.a, fn), b=_move(pair.b, fn)) for key, pair in pairs.items()}
            for name, pairs in self.pairs.items()
        }
        self.implementation = choose(arch_of(self.device), self.requested)
        return self

    def _check(self, hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None) -> None:
        tokens = hidden.shape[0] if hidden.dim() else 0
        top_k = ids.shape[1] if ids.dim() == 2 else 0
        integers = (torch.int32, torch.int64)
        wanted: list[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = [
            ("hidden", hidden, (tokens, self.shape.hidden), FLOATS),
            ("topk_ids", ids, (tokens, top_k), integers),
            ("topk_weights", weights, (tokens, top_k), FLOATS),
        ]
        if adapter_ids is not None:
            wanted.append(("adapter_ids", adapter_ids, (tokens,), integers))
        for name, tensor, shape, dtypes in wanted:
            if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != self.device:
                raise ArgumentError(
                    f"Experts.forward: {name}",
                    found=f"{_short(tensor.dtype)} {list(tensor.shape)} on {tensor.device}",
                    expected=f"{' or '.join(map(_short, dtypes))} {list(shape)} on {self.device}",
                    next_step="Pass hidden [T, H], topk_ids and topk_weights [T, k], adapter_ids [T].",
                )


def _run(
    experts: Experts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None
) -> Tensor:
    if adapter_ids is None:
        rows = experts.adapter_rows.ids(hidden.shape[0])
        adapter_ids = None if rows is None else rows.to(hidden.device)
    return layer(hidden, topk_ids, topk_weights, experts.weights, experts.activation, experts.pairs, adapter_ids)


# The reference reads sizes on the host, step by step, and the rows' adapters change from call to call: torch.compile
# calls both as they are, instead of compiling them anew for every list of adapters.
run_eagerly = cast("Callable[..., Tensor]", torch.compiler.disable(_run))


def arch_of(device: torch.device) -> str:
    """`cpu`, or `sm_NN` of a CUDA device, as `select` has it."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _move(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """`fn` on the bytes of a tensor, so that it can move them but not cast them."""
    plain = tensor if not tensor.is_floating_point() else tensor.contiguous().reshape(-1).view(torch.uint8)
    moved = fn(plain)
    if moved.dtype != plain.dtype:
        raise ArgumentError(
            "packed experts",
            found=f"a cast to {_short(moved.dtype)}",
            expected="weights that stay as the quantiser wrote them",
            next_step="Load the checkpoint with another dtype to change the activations' dtype.",
        )
    return moved.view(tensor.dtype).reshape(tensor.shape)


def _moved(projection: ProjectionWeights, fn: Callable[[Tensor], Tensor]) -> ProjectionWeights:
    tensors = {name: _move(tensor, fn) for name, tensor in projection.tensors.items()}
    return replace(projection, tensors=tensors, bias=None if projection.bias is None else _move(projection.bias, fn))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
