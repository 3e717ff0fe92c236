from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of, random_weight

from fanfold.errors import UnsupportedError
from fanfold.formats import codec, dense


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_dense_weights_are_rounded_once_and_read_exactly(name: str, dtype: torch.dtype):
    weight = random_weight(5, 7)
    tensors = codec.quantize(fmt_of(name), weight)
    assert tensors["weight"].dtype == dtype
    found = codec.dequantize(fmt_of(name), tensors, 5, 7)
    assert found.dtype == torch.float32
    assert torch.equal(found, weight.to(dtype).float())


def test_empty_matrices_are_refused():
    with pytest.raises(UnsupportedError, match="N = 0; expected N a positive multiple of 1"):
        dense.shapes(fmt_of("bf16"), 0, 8)
