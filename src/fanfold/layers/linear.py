"""LoRA on plain modules: Linears (attention, shared experts, dense MLPs, lm_head) and routers, per row of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fanfold.errors import UnsupportedError
from fanfold.kernels.lora.reference import lora_fold
from fanfold.layers.op import number_of
from fanfold.layers.tables import LinearTable
from fanfold.lora.rows import Rows
from fanfold.spec.lora import LoraPair


class Linear:
    """A plain Linear as a place for adapters. Without one it is not touched; with one its output passes through `fold`.

    Args:
        path: the module's name in the model.
        module: an nn.Linear, or a router with a `weight` [E, H] (see Router).
        rows: which adapter each row uses.
        dtype: of the activations.
    """

    def __init__(self, path: str, module: nn.Module, rows: Rows, dtype: torch.dtype) -> None:
        self.path = path
        self.module = module
        self.rows = rows
        self.dtype = dtype
        self.pairs: dict[tuple[int, int], LoraPair] = {}
        self.table: LinearTable | None = None  # on a GPU
        self.number = number_of(self)
        self._detach: Callable[[], None] | None = None

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]."""
        return cast("Tensor", self.module.weight)

    @property
    def out_features(self) -> int:
        """Outputs."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        return self.weight.device

    def reserve(self, slots: int, max_rank: int) -> None:
        """Makes room for a pool of so many slots and ranks; all slots are empty then, and the module is as it was."""
        self.pairs.clear()
        self._release()
        self.table = None
        if self.device.type == "cuda":
            sizes = self.in_features, self.out_features, slots, max_rank
            self.table = LinearTable(*sizes, self.dtype, self.device)

    def unknown_ids(self) -> int:
        """Counted by the experts of the model alone: a token passes many plain modules."""
        return 0

    def put(self, slot: int, pair: LoraPair) -> None:
        """Fills a slot with a pair of `lora.convert`."""
        if self.table is not None:
            self.table.write(slot, pair)
        self.pairs[slot, 0] = pair
        if self._detach is None:
            self._detach = self.attach()

    def drop(self, slot: int) -> None:
        """Empties a slot; with the last one the module is as it was."""
        if self.table is not None:
            self.table.write(slot, None)
        self.pairs.pop((slot, 0), None)
        if not self.pairs:
            self._release()

    def _release(self) -> None:
        if self._detach is not None:
            self._detach()
            self._detach = None

    def attach(self) -> Callable[[], None]:
        """Makes the module's output pass through `fold`; returns what undoes it."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return self.fold(cast("Tensor", args[0]), cast("Tensor", output))

        return self.module.register_forward_hook(hook).remove

    def fold(self, x: Tensor, y: Tensor) -> Tensor:
        """The output with each row's adapter folded in: x [..., in_features], y [..., out_features].

        Raises:
            InferenceOnlyError: on backward through the result.
        """
        ids = self.rows.ids_for(x.shape)
        if ids is None:
            return y
        rows = y.reshape(-1, self.out_features)
        inputs = x.reshape(-1, self.in_features).to(y.dtype)
        folded = torch.ops.fanfold.fold_linear(inputs, rows, ids.to(y.device), self.number)
        return cast("Tensor", folded).view_as(y)

    def run_fold(self, x: Tensor, y: Tensor, adapter_ids: Tensor) -> Tensor:
        """What torch.ops.fanfold.fold_linear calls: x [R, in_features], y [R, out_features], ids int32 [R]."""
        out = y.clone()
        if self.table is None:
            lora_fold(out, x, self.pairs, adapter_ids, torch.zeros_like(adapter_ids))
            return out
        from fanfold.layers.implementations.folding import fold_rows

        return fold_rows(out, x, self.table.table, adapter_ids)


class Router(Linear):
    """A router that is no Linear but multiplies by its `weight` and then picks experts, all in one forward.

    The delta belongs on the logits, before top-k, which a hook behind the module can't reach: while the module runs,
    its first linear product is watched instead.
    """

    def attach(self) -> Callable[[], None]:
        """Wraps the module's forward; returns what brings the class's own back."""
        forward = self.module.forward
        mode = _FirstLinear(self)

        def watched(*args: Any, **kwargs: Any) -> Any:
            mode.folded.clear()
            with mode:
                result = forward(*args, **kwargs)
            if not mode.folded:
                raise UnsupportedError(
                    f"adapter of the router {self.path}",
                    found=f"a {type(self.module).__name__} that does not multiply by torch.nn.functional.linear",
                    expected="a product whose result the delta can be added to",
                    next_step="Unload the adapter; routers of this family can't be adapted yet.",
                )
            return result

        def detach() -> None:
            del self.module.forward

        self.module.forward = watched
        return detach


class _FirstLinear(TorchFunctionMode):
    """While it is entered, the first linear product has the site's adapters folded in."""

    def __init__(self, site: Router) -> None:
        super().__init__()
        self.site = site
        self.folded: list[bool] = []  # a compiler follows what is in a list

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and not self.folded:
            self.folded.append(True)
            return self.site.fold(args[0], y)
        return y
