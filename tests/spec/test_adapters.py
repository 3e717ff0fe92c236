"""What an AdapterTable refuses, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fanfold.errors import ArgumentError
from fanfold.kernels.lora.table import new_table


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"b": torch.zeros(2, 3, 4, dtype=torch.int32)}, r"AdapterTable.b: found torch.int32 \[2, 3, 4\]"),
        ({"scale": torch.zeros(2, 3, 5)}, r"AdapterTable.scale: found torch.float32 \[2, 3, 5\]"),
        ({"rank": torch.zeros(3, 2, 4, dtype=torch.int32).transpose(0, 1)}, "AdapterTable.rank"),
        ({"k": 0}, "AdapterTable: found 2 projections, k 0"),
        ({"max_rank": 0}, "max_rank 0"),
    ],
)
def test_tensors_that_do_not_go_together(changes: dict[str, Any], text: str) -> None:
    table = new_table(2, 3, 4, k=8, n=8, max_rank=8, dtype=torch.float16, device="cpu")
    assert (table.projections, table.slots) == (2, 3)
    with pytest.raises(ArgumentError, match=text):
        replace(table, **changes)


def test_three_projections() -> None:
    with pytest.raises(ArgumentError, match="AdapterTable: found 3 projections"):
        new_table(3, 3, 4, k=8, n=8, max_rank=8, dtype=torch.float16, device="cpu")
