"""Rows: which adapter each row of the running batch uses."""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fanfold.errors import ArgumentError


class Rows:
    """The adapter slot of each row of a batch, and the geometry of the forward that is running.

    A model calls `begin` before each forward; its layers then ask for one id a token. A layer on its own
    never calls it: there a row of the batch is a token.

    Args:
        device: where the ids are made.

    Attributes:
        holder: the pool whose slots these are.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.holder: weakref.ref[object] | None = None  # weak: a copy of a layer leaves its pool behind
        self._device = torch.device(device)
        self._slots: list[int] | None = None
        self._expanding = False
        self._forward: tuple[int, int] | None = None  # batch, seq
        self._ids: Tensor | None = None  # int32 [batch], the slot of each row; None = base for all

    @property
    def slots(self) -> list[int] | None:
        """The current list: a slot for each row, -1 = base; None = base for all, whatever the batch."""
        return None if self._slots is None else list(self._slots)

    def set(self, slots: Sequence[int] | None) -> None:
        """Makes `slots` the current list."""
        self._slots = None if slots is None else list(slots)
        self._forward = None
        self._ids = self._row_ids(1)

    def begin(self, batch: int, seq: int) -> None:
        """Notes that a forward over `batch` rows of `seq` tokens starts.

        Raises:
            ArgumentError: the current list has another length. Inside `expanding`, whole multiples are rows
                that generate has repeated (beams, return sequences), each next to its copies.
        """
        times = 1
        if self._slots is not None and len(self._slots) != batch:
            times = batch // len(self._slots) if self._expanding and self._slots else 0
            if times == 0 or times * len(self._slots) != batch:
                raise self._wrong_length(f"a batch of {batch} rows")
        self._forward = batch, seq
        self._ids = self._row_ids(times)

    @contextmanager
    def expanding(self, batch: int) -> Generator[None]:
        """Surrounds a call that may repeat rows, such as generate; `batch` is the number of rows given to it.

        Raises:
            ArgumentError: the current list has another length than `batch`.
        """
        if self._slots is not None and len(self._slots) != batch:
            raise self._wrong_length(f"a batch of {batch} rows")
        before, self._expanding = self._expanding, True
        try:
            yield
        finally:
            self._expanding = before

    def ids(self, tokens: int) -> Tensor | None:
        """The slot of each token of a flattened input [tokens, H].

        Returns:
            int32 [tokens], -1 = base; None = base for all.

        Raises:
            ArgumentError: `tokens` is not batch * seq of the running forward, or, without one, not the length
                of the list.
        """
        if self._slots is None:
            return None
        if self._forward is None:
            if tokens != len(self._slots):
                raise self._wrong_length(f"{tokens} tokens")
            return self._ids
        batch, seq = self._forward
        if tokens != batch * seq:
            raise self._unlike_forward(f"{tokens} tokens", f"{batch} * {seq}")
        return None if self._ids is None else self._ids.repeat_interleave(seq)

    def ids_for(self, shape: Sequence[int]) -> Tensor | None:
        """The slot of each position of an input [B, S', H], [B, ..., H] or [T, H], in order, int32.

        S' may be less than the forward's seq (lm_head with logits_to_keep); more dimensions between B and H, such as
        heads, are the row's own.

        Raises:
            ArgumentError: the shape is of another batch, longer than seq, or of one dimension.
        """
        if self._slots is None:
            return None
        if len(shape) == 2:
            return self.ids(shape[0])
        batch, seq = self._forward or (len(self._slots), shape[1] if len(shape) == 3 else 0)
        if len(shape) < 3 or shape[0] != batch or (len(shape) == 3 and shape[1] > seq):
            raise self._unlike_forward(f"an input of shape {list(shape)}", f"[{batch}, up to {seq}, H]")
        return None if self._ids is None else self._ids.repeat_interleave(math.prod(shape[1:-1]))

    def _row_ids(self, times: int) -> Tensor | None:
        if self._slots is None or all(slot < 0 for slot in self._slots):
            return None
        ids = torch.tensor(self._slots, dtype=torch.int32, device=self._device)
        return ids.repeat_interleave(times)

    def _wrong_length(self, found: str) -> ArgumentError:
        names = 0 if self._slots is None else len(self._slots)
        return ArgumentError(
            "using list of wrong length",
            found=f"{names} names for {found}",
            expected="one name (or None) for each row",
            next_step="Pass using() as many entries as the batch has rows.",
        )

    def _unlike_forward(self, found: str, expected: str) -> ArgumentError:
        return ArgumentError(
            "rows of the running forward",
            found=found,
            expected=expected,
            next_step="Inside using(), call the model itself and not a part of it.",
        )
