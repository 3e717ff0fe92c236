"""Rows: which adapter each row of the running batch uses."""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fanfold.errors import ArgumentError

CAPACITY = 65536
"""Most entries of a list."""


class Rows:
    """The adapter slot of each row of a batch, and the geometry of the forward that is running.

    A model calls `begin` before each forward; its layers then ask for one id a token. A layer on its own
    never calls it: there a row of the batch is a token.

    A captured CUDA graph reads the ids where they are: they stay at one address, and a replay follows the list of the
    moment. Capture inside a `using` block; outside, a forward asks for no ids at all.

    Args:
        device: where the ids are.

    Attributes:
        holder: the pool whose slots these are.
        entries: int32 [CAPACITY], the slots of the current list, -1 behind its end.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.holder: weakref.ref[object] | None = None  # weak: a copy of a layer leaves its pool behind
        self._slots: list[int] | None = None
        self._count: int | None = None  # entries of the list; what a compiler may look at
        self._expanding = False
        self._forward: tuple[int, int] | None = None  # batch, seq
        with torch.inference_mode(False):  # else it could be changed in that mode alone
            self.entries = torch.full((CAPACITY,), -1, dtype=torch.int32, device=device)

    @property
    def slots(self) -> list[int] | None:
        """The current list: a slot for each row, -1 = base; None = base for all, whatever the batch."""
        return None if self._slots is None else list(self._slots)

    def set(self, slots: Sequence[int] | None) -> None:
        """Makes `slots` the current list.

        Raises:
            ArgumentError: it has more than CAPACITY entries.
        """
        listed = list(slots or ())
        if len(listed) > CAPACITY:
            raise ArgumentError(
                "using list",
                found=f"{len(listed)} names",
                expected=f"at most {CAPACITY}",
                next_step="Run the batch in parts.",
            )
        self._slots = None if slots is None else listed
        self._count = None if slots is None else len(listed)
        self._forward = None
        self.entries.fill_(-1)  # the tail too: a captured graph may have more rows than this list
        self.entries[: len(listed)].copy_(torch.tensor(listed, dtype=torch.int32))

    def move(self, device: torch.device) -> None:
        """Keeps the ids on another device from now on."""
        if device != self.entries.device:
            with torch.inference_mode(False):
                self.entries = self.entries.to(device)

    def begin(self, batch: int, seq: int) -> None:
        """Notes that a forward over `batch` rows of `seq` tokens starts.

        Raises:
            ArgumentError: the current list has another length. Inside `expanding`, whole multiples are rows
                that generate has repeated (beams, return sequences), each next to its copies.
        """
        count = self._count
        if count is not None and count != batch:
            times = batch // count if self._expanding and count else 0
            if times == 0 or times * count != batch:
                raise self._wrong_length(f"a batch of {batch} rows")
        self._forward = batch, seq

    @contextmanager
    def expanding(self, batch: int) -> Generator[None]:
        """Surrounds a call that may repeat rows, such as generate; `batch` is the number of rows given to it.

        Raises:
            ArgumentError: the current list has another length than `batch`.
        """
        if self._count is not None and self._count != batch:
            raise self._wrong_length(f"a batch of {batch} rows")
        before, self._expanding = self._expanding, True
        try:
            yield
        finally:
            self._expanding = before

    def ids(self, tokens: int) -> Tensor | None:
        """The slot of each token of a flattened input [tokens, H].

        Returns:
            int32 [tokens], -1 = base; None without a list: base for all.

        Raises:
            ArgumentError: `tokens` is not batch * seq of the running forward, or, without one, not the length
                of the list.
        """
        if self._count is None:
            return None
        if self._forward is None:
            if tokens != self._count:
                raise self._wrong_length(f"{tokens} tokens")
        else:
            batch, seq = self._forward
            if tokens != batch * seq:
                raise self._unlike_forward(f"{tokens} tokens", f"{batch} * {seq}")
        return self._repeated(tokens)

    def ids_for(self, shape: Sequence[int]) -> Tensor | None:
        """The slot of each position of an input [B, S', H], [B, ..., H] or [T, H], in order, int32.

        S' may be less than the forward's seq (lm_head with logits_to_keep); more dimensions between B and H, such as
        heads, are the row's own.

        Raises:
            ArgumentError: the shape is of another batch, longer than seq, or of one dimension.
        """
        if self._count is None:
            return None
        if len(shape) == 2:
            return self.ids(shape[0])
        batch, seq = self._forward or (self._count, shape[1] if len(shape) == 3 else 0)
        if len(shape) < 3 or shape[0] != batch or (len(shape) == 3 and shape[1] > seq):
            raise self._unlike_forward(f"an input of shape {list(shape)}", f"[{batch}, up to {seq}, H]")
        return self._repeated(math.prod(shape[:-1]))

    def _repeated(self, tokens: int) -> Tensor:
        """One id a token: the tokens of an entry lie next to each other, and so do copies of a row."""
        count = self._count or 1
        return self.entries[: self._count, None].expand(-1, tokens // count).reshape(tokens)

    def _wrong_length(self, found: str) -> ArgumentError:
        return ArgumentError(
            "using list of wrong length",
            found=f"{self._count} names for {found}",
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
