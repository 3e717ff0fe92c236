"""WeightFormat: what follows from a format's fields."""

import pytest

from fanfold.spec import WeightFormat


@pytest.mark.parametrize(
    ("name", "k", "run"),
    [
        ("gptq4-g128", 512, 128),
        ("gptq4-g128", 128, 0),  # one group
        ("packed4-g96", 512, 32),  # 96 = 3 * 32: a step of 64 may span two groups
        ("packed8-channel", 512, 0),
        ("gptq4-g128-actorder", 512, 1),
        ("nvfp4", 512, 16),
        ("mxfp4", 512, 32),
        ("fp8-block128x64", 512, 64),
        ("fp8-tensor", 512, 0),
        ("bf16", 512, 0),
    ],
)
def test_run(name: str, k: int, run: int) -> None:
    assert WeightFormat.parse(name).run(k) == run
