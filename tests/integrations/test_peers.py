"""Peers by name; transformers' own experts, and the layout that DeepGEMM asks for."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold.bench.batches import Batch, random_batch
from fanfold.bench.checking import Expected
from fanfold.bench.jobs import layer_shape, weight_formats
from fanfold.bench.peers import DenseExperts, Peer, dense_experts
from fanfold.bench.weights import random_experts
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.integrations import engines
from fanfold.integrations.engines import padded_rows
from fanfold.integrations.peers import peers_named

SHAPE = layer_shape("8,2,64,32")
CPU = torch.device("cpu")


def right(peer: Peer) -> bool:
    (fmt,) = weight_formats("gptq4-g32")
    weights = random_experts(SHAPE, fmt, CPU, 3)
    batch = random_batch(SHAPE, 20, "power", torch.bfloat16, CPU, 1)
    dense = dense_experts(SHAPE, weights, torch.bfloat16)
    return Expected(weights, batch, SHAPE.activation).check(peer.prepare(dense, batch)()).wrong is None


def test_transformers_experts() -> None:
    peers = peers_named("transformers")
    assert [peer.name for peer in peers] == [f"transformers {name}" for name in ("eager", "grouped_mm", "batched_mm")]
    assert [peer.captured for peer in peers] == [False, True, True]
    assert all(right(peer) for peer in peers)


def test_names() -> None:
    assert [peer.name for peer in peers_named("torch, torch")] == ["torch"]
    for text in ("torch,cutlass", ""):
        with pytest.raises(ArgumentError, match="some of torch, transformers, vllm, deepgemm"):
            peers_named(text)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm", "deep_gemm"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("vllm", "deepgemm"):
        with pytest.raises(UnavailableError, match=rf"--peers {name}: found .*(vllm|deep_gemm).* --peers torch\."):
            peers_named(f"torch,{name}")


@pytest.mark.parametrize("rows", [4, 128])
def test_rows_are_padded_for_each_expert(rows: int) -> None:
    ids = torch.tensor([[5, 0], [0, 5], [5, 7], [2, 5]], dtype=torch.int32)
    source, place, expert_of = padded_rows(ids, 8, rows)
    assert expert_of.tolist() == [e for e in (0, 2, 5, 7) for _ in range(rows)]
    assert expert_of.dtype == torch.int32
    assert expert_of[place].tolist() == ids.flatten().tolist()
    assert source[place].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(place.tolist())) == 8
    assert source[expert_of == 0].tolist()[:2] == [0, 1]  # an expert's rows keep their order


def test_deepgemm_by_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product, written in torch: d[m] = a[m] @ b[indices[m]].T."""

    def product(a: Tensor, b: Tensor, d: Tensor, indices: Tensor) -> None:
        assert a.shape[0] % engines.ROWS == 0
        assert indices.dtype == torch.int32
        for block in range(0, len(a), engines.ROWS):
            rows = slice(block, block + engines.ROWS)
            assert len(indices[rows].unique()) == 1
            d[rows] = a[rows] @ b[int(indices[block])].T

    module: Any = ModuleType("deep_gemm")
    module.m_grouped_bf16_gemm_nt_contiguous = product
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    (peer,) = peers_named("deepgemm")
    assert right(peer)


def test_vllm_by_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    module: Any = ModuleType(engines.VLLM)
    module.fused_experts = lambda *parts: seen.append(parts) or parts[0]
    parts = engines.VLLM.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, engines.VLLM, module)
    (peer,) = peers_named("vllm")
    x, ids, scores = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    dense = DenseExperts(SHAPE, torch.zeros(8, 64, 64), torch.zeros(8, 64, 32))
    peer.prepare(dense, Batch(x, ids, scores))()
    assert [part is wanted for part, wanted in zip(seen[0], (x, dense.gate_up, dense.down, scores, ids), strict=True)]
