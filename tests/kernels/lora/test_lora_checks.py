"""Wrong arguments of the fold are named before anything is launched, also where no kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.kernels.lora.reference import order_rows as reference_order
from fanfold.kernels.lora.table import new_table
from fanfold.routing.reference import plan_sort
from fanfold.spec import Activation, AdapterRows, AdapterTable, AdapterWork, Route

T, TOP_K, E, SLOTS, K, N = 4, 2, 3, 2, 16, 24
R = T * TOP_K


def table(projections: int = 2) -> AdapterTable:
    return new_table(projections, SLOTS, E, k=K, n=N, max_rank=12, dtype=torch.float16, device="cpu")


def route() -> Route:
    return plan_sort(torch.arange(R).view(T, TOP_K) % E, E)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def work() -> AdapterWork:
    return reference_order(route(), int32(0, 1, -1, 0), SLOTS, 8)


def rows() -> AdapterRows:
    return AdapterRows(torch.zeros(R, dtype=torch.int32), int32(0, 1, -1, 0), TOP_K)


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def gate_up(**changes: Any) -> None:
    from fanfold.kernels.lora.launch import fold_gate_up

    arguments: dict[str, Any] = {"y1": half(R, 2 * N), "x": half(T, K), "table": table(), "source": work()}
    fold_gate_up(**(arguments | changes))


def shrink(**changes: Any) -> None:
    from fanfold.kernels.lora import launch

    arguments: dict[str, Any] = {"x": half(T, K), "table": table(), "source": work(), "xa": half(2, R, 16)}
    launch.shrink("lora_shrink_grouped", **(arguments | {"gather_x": True} | changes))


def expand(**changes: Any) -> None:
    from fanfold.kernels.lora import launch

    arguments: dict[str, Any] = {"y": half(R, 2 * N), "table": table(), "source": rows(), "xa": half(2, R, 16)}
    launch.expand("lora_expand_gather", **(arguments | changes))


def order(**changes: Any) -> None:
    from fanfold.kernels.lora.plan import order_rows

    arguments: dict[str, Any] = {"route": route(), "adapter_ids": int32(0, 1, -1, 0), "slots": SLOTS, "tile": 8}
    order_rows(**(arguments | changes))


WRONG: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (gate_up, {"x": half(T, K + 1)}, r"fold_gate_up: x: found float16 \[4, 17\]; expected float16 \[4, 16\]"),
    (gate_up, {"x": half(T + 1, K)}, r"x: found float16 \[5, 16\]"),
    (gate_up, {"x": torch.zeros(T, K)}, r"x: found float32 \[4, 16\]"),
    (gate_up, {"x": half(K, T).T}, r"x: found strides \(1, 4\)"),
    (gate_up, {"y1": half(R, N)}, r"y: found float16 \[8, 24\]; expected float16 \[8, 48\]"),
    (gate_up, {"y1": half(R - 1, 2 * N)}, r"y: found float16 \[7, 48\]"),
    (gate_up, {"activation": Activation("relu2")}, "activation: found relu2 behind 2 projections"),
    (gate_up, {"activation": Activation("silu")}, "h: found silu without h; expected both or neither"),
    (gate_up, {"h": half(R, N)}, "h: found h without an activation; expected both or neither"),
    (gate_up, {"activation": Activation("silu"), "h": half(R, 2 * N)}, r"h: found float16 \[8, 48\]; expected float16"),
    (gate_up, {"y1": torch.zeros(2, R, 2 * N)}, r"y: found float32 \[2, 8, 48\]; expected float16 \[8, 48\]"),
    (gate_up, {"table": replace(table(), dtype=torch.int8)}, "table: found pairs in int8"),
    (gate_up, {"unknown": torch.zeros(1)}, r"unknown: found float32 \[1\]; expected contiguous int32 \[1\]"),
    (gate_up, {"source": replace(work(), slots=3)}, "work: found rows ordered by 3 slots; expected 2"),
    (gate_up, {"source": replace(work(), tile=12)}, "work.tile: found 12; expected one of 8, 16"),
    (gate_up, {"source": replace(work(), positions=int32(0))}, r"work.positions: found int32 \[1\]"),
    (gate_up, {"source": replace(work(), items=torch.zeros(99, 4, dtype=torch.int32))}, "99 items; expected at most 9"),
    (gate_up, {"source": replace(work(), top_k=3)}, "rows: found 8 rows with top_k 3"),
    (gate_up, {"source": replace(rows(), expert_ids=torch.zeros(R))}, r"expert_ids: found float32 \[8\]"),
    (gate_up, {"source": replace(rows(), adapter_ids=int32(0))}, r"adapter_ids: found int32 \[1\]; expected .* \[4\]"),
    (gate_up, {"source": replace(rows(), adapter_ids=None, one_slot=2)}, "one_slot: found 2; expected below 2"),
    (gate_up, {"source": replace(rows(), one_slot=1)}, "one_slot: found 1 beside adapter_ids"),
    (gate_up, {"source": replace(rows(), sorted_rows=int32(0))}, r"sorted_rows: found int32 \[1\]"),
    (gate_up, {"source": replace(rows(), expert_ids=torch.zeros(R - 1, dtype=torch.int32))}, "7 rows with top_k 2"),
    (shrink, {"xa": half(2, R, 15)}, r"lora_shrink_grouped: xa: found float16 \[2, 8, 15\]; expected .* at least 16\]"),
    (shrink, {"xa": half(1, R, 16)}, r"xa: found float16 \[1, 8, 16\]"),
    (shrink, {"xa": torch.zeros(2, R, 16)}, "xa: found float32"),
    (shrink, {"xa": half(2, R, 32)[..., :16]}, r"xa: .* with strides \(256, 32, 1\)"),
    (shrink, {"xa": half(2, R - 1, 16)}, "window: found 8 rows; expected at most 7, the rows of xa"),
    (shrink, {"row_offset": -1, "row_end": 3}, r"window: found \[-1, 3\); expected a part of \[0, 8\)"),
    (shrink, {"row_offset": 2, "row_end": 9}, r"window: found \[2, 9\)"),
    (shrink, {"gather_x": False}, r"lora_shrink_grouped: h: found float16 \[4, 16\]; expected float16 \[8, 16\]"),
    (
        expand,
        {"activation": Activation("silu"), "h": half(R, 2 * N)},
        r"lora_expand_gather: h: found float16 \[8, 48\]; expected float16 \[8, 24\]",
    ),
    (expand, {"y": half(R, N)}, r"lora_expand_gather: y: found float16 \[8, 24\]"),
    (order, {"tile": 12}, "order_rows: tile: found 12; expected one of 8, 16"),
    (order, {"slots": 0}, "slots: found 0; expected at least 1"),
    (order, {"adapter_ids": torch.zeros(T)}, r"adapter_ids: found float32 \[4\]"),
    (order, {"adapter_ids": None, "one_slot": 2}, "one_slot: found 2"),
    (order, {"unknown": int32(0, 0)}, r"unknown: found int32 \[2\]"),
    (order, {"route": replace(route(), top_k=3)}, "route: found 8 rows with top_k 3"),
    (order, {"route": replace(route(), sorted_rows=torch.arange(R))}, r"route.sorted_rows: found int64 \[8\]"),
]


@pytest.mark.parametrize("case", range(len(WRONG)), ids=lambda case: WRONG[case][2][:40])
def test_arguments_that_do_not_go_together(case: int) -> None:
    call, changes, text = WRONG[case]
    with pytest.raises(ArgumentError, match=text):
        call(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize("call", [gate_up, shrink, expand, order])
def test_right_arguments_where_no_kernel_runs(call: Callable[..., None]) -> None:
    with pytest.raises(UnavailableError, match="found tensors on cpu; expected an NVIDIA GPU"):
        call()
