"""By adapter: a batch whose rows have unlike adapters, as PEFT runs it on transformers' own experts.

PEFT changes the weights of experts, all rows of a forward alike. So each adapter's rows are a forward of their own,
with a cache of their own.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from fanfold.integrations.transformers.forward import ModelForward


class ByAdapter:
    """A model of transformers with adapters of PEFT.

    Args:
        model: with transformers' own experts.
        adapters: name -> PEFT directory.
    """

    def __init__(self, model: Any, adapters: Mapping[str, str | Path]) -> None:
        self._forward = ModelForward(model)  # PEFT's layers take the places of the model's own
        first, *others = adapters.items()
        self._peft: Any = PeftModel.from_pretrained(model, str(first[1]), adapter_name=first[0])
        for name, folder in others:
            self._peft.load_adapter(str(folder), adapter_name=name)
        self._rows: list[tuple[str | None, Tensor]] = []

    @contextmanager
    def using(self, rows: Sequence[str | None]) -> Generator[None]:
        """Inside, each row of the batch has the adapter of that name; None is the base."""
        device = self._peft.device
        self._rows = [
            (name, torch.tensor([row for row, other in enumerate(rows) if other == name], device=device))
            for name in dict.fromkeys(rows)
        ]
        try:
            yield
        finally:
            self._rows = []

    def prompt(self, ids: Tensor, keep: int) -> tuple[Tensor, Any]:
        """See Forward; a cache an adapter."""
        found: list[Tensor] = []
        caches: list[Any] = []
        for name, rows in self._rows:
            with self._active(name):
                logits, cache = self._forward.prompt(ids[rows], keep)
            found.append(logits)
            caches.append(cache)
        return self._together(found), caches

    def step(self, token: Tensor, cache: Any) -> Tensor:
        """See Forward."""
        found: list[Tensor] = []
        for (name, rows), own in zip(self._rows, cache, strict=True):
            with self._active(name):
                found.append(self._forward.step(token[rows], own))
        return self._together(found)

    def _together(self, found: Sequence[Tensor]) -> Tensor:
        """Logits in the order of the batch."""
        order = torch.cat([rows for _, rows in self._rows])
        return torch.cat(list(found))[order.argsort()]

    def _active(self, name: str | None) -> Any:
        if name is None:
            return self._peft.disable_adapter()
        self._peft.set_adapter(name)
        return nullcontext()
