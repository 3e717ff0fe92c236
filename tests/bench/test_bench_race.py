"""Peers beside fanfold's layer: right, wrong and broken ones; compiled calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold.bench import timing
from fanfold.bench.batches import Batch, random_batch
from fanfold.bench.cell import Cell, Settings
from fanfold.bench.checking import Expected
from fanfold.bench.jobs import layer_shape, weight_formats
from fanfold.bench.peers import DenseExperts, Peer, Prepared, TorchGroupedMm, dense_experts, refusal
from fanfold.bench.run import bench
from fanfold.bench.weights import random_experts
from fanfold.spec import Activation

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.compile's own
CPU = torch.device("cpu")
SHAPE = layer_shape("8,2,64,32")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPLAYS", 5)


class Scaled(TorchGroupedMm):
    """Two per cent too large."""

    name = "scaled"

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        call = super().prepare(dense, batch)
        return lambda: call() * 1.02


class Broken(TorchGroupedMm):
    name = "broken"

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        raise AttributeError("no such function\nand more")


def cell_of(*peers: Peer, name: str = "gptq4-g32", shape: str = SHAPE.name, **options: Any) -> Cell:
    (cell,) = bench([layer_shape(shape)], weight_formats(name), [5], Settings(CPU, **options), None, peers)
    return cell


@pytest.mark.parametrize("name", ["gptq4-g32-asym-v1", "nvfp4"])
def test_torch_runs_the_same_weights(name: str) -> None:
    (fmt,) = weight_formats(name)
    weights = random_experts(SHAPE, fmt, CPU, 3)
    batch = random_batch(SHAPE, 20, "power", torch.bfloat16, CPU, 1)
    dense = dense_experts(SHAPE, weights, torch.bfloat16)
    assert (dense.gate_up.shape, dense.down.shape) == ((8, 64, 64), (8, 64, 32))
    found = Expected(weights, batch, SHAPE.activation).check(TorchGroupedMm().prepare(dense, batch)())
    assert found.wrong is None
    assert found.error > 1e-3


def test_a_peer_s_figures_stand_in_the_row() -> None:
    cell = cell_of(TorchGroupedMm(), Scaled(), Broken())
    row = cell.row()
    right, wrong, broken = row["peers"]
    assert right["name"] == "torch"
    assert right["ratio"] == pytest.approx(right["median_us"] / row["median_us"])
    assert right["p20_us"] <= right["median_us"] <= right["p80_us"]
    assert 0 < right["error"] < 2 * row["plain_error"]
    assert wrong["refused"].startswith("wrong: relative error 2.")
    assert "norm off by 2." in wrong["refused"]
    assert (wrong["median_us"], wrong["ratio"]) == (None, None)
    assert wrong["error"] == pytest.approx(0.02, rel=0.2)
    assert broken == dict.fromkeys(broken) | {"name": "broken", "refused": "AttributeError: no such function"}
    assert cell_of().row()["peers"] == []


def test_peers_run_no_adapters() -> None:
    cell = cell_of(TorchGroupedMm(), adapters=1, rank=4)
    assert cell.times is not None
    assert [(peer.refused, peer.times) for peer in cell.peers] == [("peers run no adapters by token", None)]


def test_layers_that_peers_do_not_run() -> None:
    assert refusal(SHAPE, 0) is None
    for other in (replace(SHAPE, bias=True), replace(SHAPE, activation=Activation("gelu_tanh"))):
        assert refusal(other, 0) == "peers run SiLU with a gate, without biases"


def test_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(TorchGroupedMm(), mode="compiled")
    assert cell.row()["timing"] == "compiled calls"
    assert cell.times is not None
    assert [peer.refused for peer in cell.peers] == ["compiled calls are timed of fanfold alone"]
    compile_layer = torch.compile

    def spoilt(layer: Any, **options: Any) -> Any:
        assert options == {"fullgraph": True, "dynamic": False}
        compiled = compile_layer(layer, **options)
        return lambda *parts: compiled(*parts) + 1

    monkeypatch.setattr(torch, "compile", spoilt)
    cell = cell_of(mode="compiled")
    assert (cell.refused, cell.times) == ("wrong: 6 of 6 calls differ when they are compiled", None)


class Atomic(TorchGroupedMm):
    """Other bits at every call, as of sums in any order."""

    name = "atomic"

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        call = super().prepare(dense, batch)
        count = torch.zeros((), dtype=torch.int16, device=batch.hidden.device)

        def changing() -> Tensor:
            return (call().view(torch.int16) ^ (count.add_(1) & 1)).view(batch.hidden.dtype)

        return changing


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "eager", "compiled"])
def test_on_a_gpu(mode: Any) -> None:
    from fanfold.integrations.peers import peers_named

    settings = Settings(torch.device("cuda", 0), mode=mode)
    peers = [*peers_named("torch,transformers"), Atomic()]
    (cell,) = bench([layer_shape("16,2,1024,512")], weight_formats("gptq4-g128"), [16], settings, None, peers)
    assert cell.times is not None
    refused = {peer.name: peer.refused for peer in cell.peers if peer.refused}
    if mode == "graph":
        assert refused == {"transformers eager": "waits for the device: no CUDA graph holds it"}
    else:
        assert len(refused) == (0 if mode == "eager" else 5)
