"""Experts: the expert layer as an nn.Module, weights packed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from fanfold.errors import ArgumentError, UnavailableError, UnsupportedError
from fanfold.layers.activation_format import AUTO, resolved
from fanfold.layers.arguments import check_call
from fanfold.layers.implementations import Implementation, implement
from fanfold.layers.moving import move, moved
from fanfold.layers.op import number_of
from fanfold.layers.reference import layer
from fanfold.layers.tables import ExpertTables
from fanfold.lora.convert import convert
from fanfold.lora.rows import Rows
from fanfold.lora.site import ExpertPairs, Site
from fanfold.ops.failures import placing
from fanfold.select import choose, verdicts
from fanfold.spec.activation import Activation
from fanfold.spec.activation_format import PLAIN, ActivationFormat
from fanfold.spec.job import LayerJob
from fanfold.spec.lora import LoraPair
from fanfold.spec.shape import ExpertShape
from fanfold.spec.verdict import Rejected
from fanfold.spec.weights import ExpertWeights

LOG = logging.getLogger("fanfold")


class Experts(nn.Module):
    """The experts of one layer: gate_up, activation, down and the weighted sum, for packed weights.

    Args:
        weights: the packed experts.
        activation: between gate_up and down.
        dtype: of the activations; LoRA pairs are kept in it.
        implementation: "auto", or the name of one: "reference" is the readable torch version, the others are those
            that `fanfold.explain` lists.
        batch_invariant: on a GPU, one config for any number of rows: a row's bits then depend on no other row.
        activation_format: what activations are rounded to before both products: "nvfp4" (W4A4, NVFP4 weights), "fp8"
            (W8A8, FP8 weights: E4M3 with a scale a row or a block), "plain" (nothing: weight only), or "auto": "nvfp4"
            where the checkpoint says so, else "plain".
        path: the module's name in the model, by which adapters find it.
        interleaved: adapters of fused gate_up rows alternate gate and up (gpt-oss).
        transposed: the model's own parameters are (E, inputs, outputs); tells the layout of old adapters.

    Attributes:
        implementation: the name of the one that runs. A log line of `fanfold` says why.
        activation_format: what "auto" came to.
        formats: how gate_up and down are packed.
        biased: whether gate_up and down have biases.

    Raises:
        ArgumentError, UnavailableError: no such implementation, or none for the weights' device.
        UnsupportedError: the implementation asked for does not run these weights, or they are not of activation_format.
        DeviceMemoryError: the device has no room for the weights, also when the layer is moved to it.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        *,
        dtype: torch.dtype,
        implementation: str = "auto",
        batch_invariant: bool = False,
        activation_format: str = AUTO,
        path: str = "experts",
        interleaved: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dtype = dtype
        self.path = path
        self.interleaved = interleaved
        self.transposed = transposed
        self.batch_invariant = batch_invariant
        self.shape: ExpertShape = weights.shape
        self.formats = weights.gate_up.format, weights.down.format
        self.activation_format: ActivationFormat = resolved(activation_format, weights.gate_up, weights.down, path)
        self.biased = weights.gate_up.bias is not None, weights.down.bias is not None
        self.adapter_rows = Rows()
        self.pairs: dict[str, dict[tuple[int, int], LoraPair]] = {"gate": {}, "up": {}, "down": {}}
        self._reserved = 0, 0
        self.tables: ExpertTables | None = None  # on a GPU
        self.requested = implementation
        self.number = number_of(self)
        with placing(f"{path}: weights", weights.nbytes, device_of(weights)):
            self._place(weights)

    @property
    def weights(self) -> ExpertWeights:
        """The packed weights, as they lie on disk.

        Raises:
            UnavailableError: the implementation keeps them in a form of its own.
        """
        if self._packed is None:
            raise UnavailableError(
                f"packed weights of {self.path}",
                found=f"weights repacked for {self.implementation}",
                expected="weights as they lie on disk",
                next_step='Load the checkpoint with implementation="grouped", or on the CPU.',
            )
        return self._packed

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weights."""
        return self.weights.nbytes if self._kernels is None else self._kernels.nbytes

    @property
    def adapter_sites(self) -> Mapping[str, Site]:
        """This layer as the only place of an adapter pool of its own."""
        return {self.path: self}

    @property
    def hidden_order(self) -> Tensor | None:
        """See lora.site.OrderedSite."""
        return None if self._kernels is None else self._kernels.hidden_order

    def reserve(self, slots: int, max_rank: int) -> None:
        """Makes room for a pool of so many slots and ranks; all slots are empty then."""
        self._reserved = slots, max_rank
        for pairs in self.pairs.values():
            pairs.clear()
        self.tables = None
        if self._kernels is not None and slots:
            self.tables = ExpertTables(self.shape, slots, max_rank, self.dtype, self.device)

    def unknown_ids(self) -> int:
        """Tokens seen with an adapter id that is no slot's; counted on a GPU alone."""
        return 0 if self.tables is None else int(self.tables.unknown)

    def put(self, slot: int, pairs: ExpertPairs) -> None:
        """Fills a slot with pairs of `lora.convert`; what was in it is dropped.

        Raises:
            ArgumentError: on a GPU, where no room was made for the slot.
        """
        if self.tables is not None:
            self.tables.write(slot, pairs)
        elif self._kernels is not None:
            raise ArgumentError(
                f"{self.path}: put",
                found="no tables for adapters",
                expected="room made by `reserve`",
                next_step="Make a fanfold.AdapterPool for the layer; it fills the slots.",
            )
        self._forget(slot)
        for (projection, expert), pair in pairs.items():
            self.pairs[projection][slot, expert] = pair

    def drop(self, slot: int) -> None:
        """Empties a slot."""
        if self.tables is not None:
            self.tables.write(slot, {})
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        for pairs in self.pairs.values():
            for expert in range(self.shape.num_experts):
                pairs.pop((slot, expert), None)

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
            DeviceMemoryError: the device has no room for the activations.
            UnavailableError: it does not load or launch a kernel.
            InferenceOnlyError: on backward through the result.
        """
        check_call(hidden, topk_ids, topk_weights, adapter_ids, self.shape.hidden, self.device)
        if adapter_ids is None:
            adapter_ids = self.adapter_rows.ids(hidden.shape[0])
        return torch.ops.fanfold.experts(hidden, topk_ids, topk_weights, adapter_ids, self.number)

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None) -> Tensor:
        """`forward` behind its checks: what torch.ops.fanfold.experts calls."""
        if self._kernels is None:
            own = self.weights, self.activation, self.pairs
            return layer(hidden, topk_ids, topk_weights, *own, adapter_ids, self.activation_format)
        tables = self.tables
        adapters = None if tables is None else tables.adapters(adapter_ids)
        return self._kernels.run(hidden, topk_ids, topk_weights, adapters)

    def extra_repr(self) -> str:
        """Formats and sizes."""
        shape = self.shape
        formats = dict.fromkeys(fmt.name for fmt in self.formats)
        activations = "" if self.activation_format == PLAIN else f"activations={self.activation_format}, "
        return (
            f"{', '.join(formats)}, E={shape.num_experts}, H={shape.hidden}, I={shape.intermediate}, "
            f"{self.activation.kind}, {activations}implementation={self.implementation}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.number = number_of(self)  # a copy is a layer of its own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the packed weights with the module; casts (`.to(dtype)`, `.half()`) leave them as they are.

        Raises:
            ArgumentError: a cast that means packed words too (`.type(dtype)`), or a move of repacked weights.
        """
        super()._apply(fn, recurse)
        device = move(torch.empty(0, dtype=torch.uint8, device=self.device), fn).device
        if self._packed is not None:
            with placing(f"{self.path}: weights", self._packed.nbytes, device):
                self._place(ExpertWeights(moved(self._packed.gate_up, fn), moved(self._packed.down, fn)))
            self._fill_again()
        elif device != self.device:
            raise ArgumentError(
                f"{self.path}: device",
                found=f"a move to {device} of weights repacked for {self.implementation}",
                expected=f"weights that stay on {self.device}",
                next_step=f'Load the checkpoint again with device="{device}".',
            )
        return self

    def _fill_again(self) -> None:
        """Puts the pairs where the weights are now."""
        held: dict[int, dict[tuple[str, int], LoraPair]] = {}
        for projection, pairs in self.pairs.items():
            for (slot, expert), pair in pairs.items():
                held.setdefault(slot, {})[projection, expert] = pair
        self.reserve(*self._reserved)
        for slot, pairs in held.items():
            self.put(slot, cast("ExpertPairs", convert(cast("ExpertPairs", pairs), self)))

    def _place(self, weights: ExpertWeights) -> None:
        """Takes the weights where they are: chooses what runs them there, and prepares that."""
        device = device_of(weights)
        job = LayerJob(self.shape, *self.formats, self.activation.kind, self.dtype, self.activation_format)
        arch = arch_of(device)
        chosen = choose(job, arch, self.requested)
        reasons = {v.kernel: v.reason for v in verdicts(job, arch, self.requested) if isinstance(v, Rejected)}
        kernels: Implementation | None = None
        if chosen != "reference":
            try:
                kernels = implement(chosen, weights, self.activation, self.batch_invariant, self.activation_format)
            except UnsupportedError as error:  # values that no format tells of, such as scales out of its range
                if self.requested != "auto":
                    raise
                reasons[chosen] = f"{error.found}; runs {error.expected}"
                chosen = "grouped"
                kernels = implement(chosen, weights, self.activation, self.batch_invariant, self.activation_format)
        self.device = device
        self.adapter_rows.move(device)
        self.implementation = chosen
        self._kernels = kernels
        self._packed = weights if kernels is None else kernels.packed
        activations = "" if job.activation_format == PLAIN else f" with {job.activation_format} activations"
        _log(f"{chosen} runs {job.gate_up} experts{activations} on {arch}", tuple(reasons.items()))


@cache
def _log(what: str, reasons: tuple[tuple[str, str], ...]) -> None:
    """One line for all layers that are alike."""
    LOG.info("%s%s", what, "".join(f"; not {name}: {reason}" for name, reason in reasons))


def device_of(weights: ExpertWeights) -> torch.device:
    """Where the weights are."""
    return next(iter(weights.down.tensors.values())).device


def arch_of(device: torch.device) -> str:
    """`cpu`, or `sm_NN` of a CUDA device, as `select` has it."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
