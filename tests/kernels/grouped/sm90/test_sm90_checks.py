"""Wrong arguments of the Hopper product, each in turn: one error that names it, before "not available here"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sm90_jobs import projection
from torch import Tensor

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
from fanfold.kernels.grouped.sm90.prepare import prepare
from fanfold.spec import Activation
from fanfold.spec.work import WorkItems

CONFIG = Sm90Config(16, 8, 1, 1, 128, 3, 1, True)
SILU = Activation()
Arguments = dict[str, Any]


def items(rows: int, experts: int, tile: int = 16) -> WorkItems:
    slots = rows // tile + experts
    return WorkItems(torch.full((slots,), -1), torch.zeros(slots, tile, dtype=torch.int32), rows, tile, False, experts)


def arguments(name: str = "gptq4-g64-asym-v1", halves: int = 2) -> Arguments:
    weights = prepare(projection(name, 3, halves, 128, 256))
    return dict(
        x=torch.zeros(20, 256).bfloat16(), weights=weights, work=items(40, 3), top_k=2, config=CONFIG, activation=SILU
    )


def wrong_work(**fields: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: {"work": replace(a["work"], **fields)}


WRONG: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "x of another K": (lambda a: {"x": a["x"][:, :64]}, r"x: found bfloat16 \[20, 64\].*\[rows, 256\]"),
    "x fp32": (lambda a: {"x": a["x"].float()}, r"x: found float32"),
    "x of one axis": (lambda a: {"x": a["x"][0]}, r"x: found bfloat16 \[256\]"),
    "x with gaps": (lambda a: {"x": torch.zeros(20, 512).bfloat16()[:, :256]}, r"x: found strides \(512, 1\)"),
    "x off 16 bytes": (lambda a: {"x": torch.zeros(5121).bfloat16()[1:].view(20, 256)}, r"rows on 16 bytes"),
    "x of more tokens": (lambda a: {"x": torch.zeros(21, 256).half()}, r"work: found 40 rows; expected 21 tokens"),
    "top_k 0": (lambda a: {"top_k": 0}, r"tokens of x \* top_k 0"),
    "another tile": (lambda a: {"work": items(40, 3, 8)}, r"work: found tiles of 8 rows; expected 16"),
    "fewer experts": (lambda a: {"work": items(40, 2)}, r"work: found 2 experts; expected 3"),
    "more experts": (lambda a: {"work": items(40, 4)}, r"work: found 4 experts"),
    "items int32": (wrong_work(items=torch.zeros(5).int()), r"work.items: found int32"),
    "items short": (wrong_work(items=torch.zeros(4).long()), r"work.items: found int64 \[4\]; .*\[5\]"),
    "rows short": (wrong_work(rows=torch.zeros(4, 16).int()), r"work.rows: found int32 \[4, 16\]"),
    "items elsewhere": (wrong_work(items=torch.zeros(5).long().to("meta")), r"work.items: found meta; expected cpu"),
    "relu2 with a gate": (lambda a: {"activation": Activation("relu2")}, r"activation: found relu2 with 2 halves"),
    "tiles too large": (lambda a: {"config": replace(CONFIG, warpgroups=4, slabs=2)}, r"multiples of 512"),
    "K too short": (lambda a: {"config": replace(CONFIG, block_k=256)}, r"at least two steps"),
    "K no multiple": (lambda a: {"config": replace(CONFIG, block_k=512)}, r"K in multiples of 512"),
    "gate_up in parts": (lambda a: {"config": replace(CONFIG, block_k=64, parts=2)}, r"one part"),
}


Change = Callable[[Tensor], Tensor | None]
WRONG_WEIGHTS: dict[str, tuple[str, Change, str]] = {
    "words short": ("words", lambda t: t[:, :-1].contiguous(), r"words: found int32 \[3, 3, 4"),
    "words transposed": ("words", lambda t: t.transpose(1, 2), r"words: .*strides"),
    "scales elsewhere": ("scales", lambda t: t.to("meta"), r"scales: found meta"),
    "scales fp32": ("scales", lambda t: t.float(), r"scales: found float32"),
    "scales of other groups": ("scales", lambda t: t[:, :, :2].contiguous(), r"scales: .*2, 64"),
    "scales short by an expert": ("scales", lambda t: t[:-1], r"scales: found float16 \[2"),
    "zeros int32": ("zeros", lambda t: t.int(), r"zeros: found int32"),
    "zeros missing": ("zeros", lambda _: None, r"zeros: found nothing"),
    "a global scale": ("global_scale", lambda _: torch.ones(3, 2), r"global_scale: found a tensor; expected nothing"),
    "bias fp16": ("bias", lambda _: torch.zeros(3, 2, 128).half(), r"bias: found float16"),
    "bias of other outputs": ("bias", lambda _: torch.zeros(3, 2, 64), r"bias: found .*\[3, 2, 64\]"),
    "order int64": ("order", lambda _: torch.zeros(3, 256).long(), r"order: found int64"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights(case: str) -> None:
    """Refused when they are made."""
    name, change, message = WRONG_WEIGHTS[case]
    weights = arguments()["weights"]
    with pytest.raises(ArgumentError, match=rf"FragmentWeights.{message}"):
        replace(weights, **{name: change(getattr(weights, name))})


@pytest.mark.parametrize("case", WRONG)
def test_gate_up(case: str) -> None:
    change, message = WRONG[case]
    given = arguments()
    with pytest.raises(ArgumentError, match=message):
        grouped_gate_up(**{**given, **change(given)})


def test_right_arguments_reach_the_device() -> None:
    with pytest.raises(UnavailableError, match="found tensors on cpu; expected an NVIDIA GPU"):
        grouped_gate_up(**arguments())
    given = arguments(halves=1)
    del given["top_k"], given["activation"]
    given["h"] = torch.zeros(40, 256).half()
    del given["x"]
    with pytest.raises(UnavailableError, match="found tensors on cpu"):
        grouped_down(**given)


def test_halves_and_rows_of_the_projection() -> None:
    with pytest.raises(ArgumentError, match="activation: found silu with 1 halves"):
        grouped_gate_up(**arguments(halves=1))
    with pytest.raises(UnavailableError):
        grouped_gate_up(**{**arguments(halves=1), "activation": Activation("relu2")})
    given = arguments()
    with pytest.raises(ArgumentError, match="weights: found 2 halves, no order"):
        grouped_down(torch.zeros(40, 256).half(), given["weights"], given["work"], CONFIG)
    down = arguments(halves=1)
    with pytest.raises(ArgumentError, match="h: found 20 rows; expected 40"):
        grouped_down(down["x"], down["weights"], down["work"], CONFIG)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_fp4(name: str) -> None:
    given = arguments(name)
    with pytest.raises(ArgumentError, match="whole groups"):
        grouped_gate_up(**given)
    given["config"] = replace(CONFIG, scale_on_sum=False)
    with pytest.raises(UnavailableError):
        grouped_gate_up(**given)
    with pytest.raises(ArgumentError, match=r"x: found float16.*bfloat16"):
        grouped_gate_up(**{**given, "x": given["x"].half()})
    with pytest.raises(ArgumentError, match="global_scale: found nothing"):
        replace(given["weights"], global_scale=None)


def test_scales_of_32_inputs_are_not_applied_to_a_sum() -> None:
    with pytest.raises(ArgumentError, match="whole groups, of 64 or more"):
        grouped_gate_up(**arguments("gptq4-g32"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_t", 24),
        ("smallest_t", 2),
        ("smallest_t", 64),
        ("warpgroups", 3),
        ("slabs", 4),
        ("block_k", 96),
        ("stages", 1),
        ("together", 0),
        ("parts", 0),
    ],
)
def test_config_fields(field: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=rf"Sm90Config.{field}: found {value}"):
        replace(CONFIG, **{field: value})


def test_a_stage_that_is_still_read() -> None:
    """Where weights are scaled, two stages would leave none to fill."""
    with pytest.raises(ArgumentError, match=r"stages: found 2; expected one of \(3,"):
        replace(CONFIG, scale_on_sum=False, stages=2)


def test_an_odd_number_of_tiles() -> None:
    """One fragment a turn, carried to the next turn, is overwritten while it is read."""
    weights = prepare(projection("gptq4-g64", 3, 1, 128, 384))
    h = torch.zeros(40, 384).bfloat16()
    with pytest.raises(ArgumentError, match="an even number of tiles"):
        grouped_down(h, weights, items(40, 3), Sm90Config(16, 8, 1, 1, 64, 3, 1, False, 2))


def test_a_single_turn_of_two_tiles() -> None:
    """The compiler stops in an assertion of its own there."""
    weights = prepare(projection("gptq4-g64", 3, 1, 128, 128))
    h = torch.zeros(40, 128).bfloat16()
    with pytest.raises(ArgumentError, match=r"found t8-w1x1-k64-s3 .* number of tiles, four or more"):
        grouped_down(h, weights, items(40, 3), Sm90Config(8, 8, 1, 1, 64, 3, 1, False))


def test_no_rows_and_no_experts_still_need_the_device() -> None:
    given = arguments()
    with pytest.raises(UnavailableError):
        grouped_gate_up(**{**given, "x": given["x"][:0], "work": items(0, 3)})
