"""Work items of single rows: the ids themselves."""

from __future__ import annotations

import pytest
import torch

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped.sm90.items import single_items


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_single_rows_are_the_ids_themselves(dtype: torch.dtype) -> None:
    """No launch and no copy; ids that lie apart are copied."""
    ids = torch.randint(-1, 6, (70, 4), generator=torch.Generator().manual_seed(1)).to(dtype)
    found = single_items(ids, 5)
    assert (found.total, found.tile, found.single, found.num_experts) == (280, 1, True, 5)
    assert found.items.data_ptr() == ids.data_ptr() == found.rows.data_ptr()
    assert torch.equal(single_items(ids.T, 5).items, ids.T.flatten())


def test_d10_nothing_to_do() -> None:
    assert single_items(torch.zeros(0, 2, dtype=torch.int64), 3).items.shape == (0,)


def test_what_are_no_ids() -> None:
    with pytest.raises(ArgumentError, match=r"topk_ids: found float32 \[9, 2\]"):
        single_items(torch.zeros(9, 2), 4)
