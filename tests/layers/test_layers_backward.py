from __future__ import annotations

import pytest
import torch

from fanfold.errors import InferenceOnlyError
from fanfold.layers.backward import without_backward
from samples import numbers


def test_results_pass_through_where_no_gradient_is_asked_for() -> None:
    out, x = numbers(2, 3), numbers(2, 3)
    assert without_backward(out, x) is out
    with torch.no_grad():
        assert without_backward(out, x.clone().requires_grad_()) is out


@pytest.mark.parametrize("which", [0, 1])
def test_any_input_that_needs_a_gradient_makes_backward_raise(which: int) -> None:
    inputs = [numbers(2, 3), numbers(4)]
    inputs[which].requires_grad_()
    out = numbers(2, 3, seed=5)
    found = without_backward(out, *inputs)
    assert torch.equal(found, out)
    with pytest.raises(InferenceOnlyError, match="inference only"):
        found.sum().backward()
