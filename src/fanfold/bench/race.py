"""Race: fanfold's layer and peers on the same batches, each verified, then timed in rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fanfold.bench.batches import Batch
from fanfold.bench.cell import Settings
from fanfold.bench.checking import Check, Expected, dirty_memory
from fanfold.bench.peers import DenseExperts, Peer, PeerFigure
from fanfold.bench.timing import Call, Replays, Times, all_of, call_times, rotated, same_bits
from fanfold.layers.experts import Experts


@dataclass(frozen=True)
class Runner:
    """Calls that have been verified.

    Attributes:
        calls: one a batch.
        turn: all of them on a GPU; None on a CPU.
        check: of the first.
        wrong: why they may not be timed, or None.
    """

    calls: Sequence[Call]
    check: Check
    turn: Callable[[], None] | None = None
    wrong: str | None = None


def own(layers: Sequence[Experts], batches: Sequence[Batch], expected: Expected, settings: Settings) -> Runner:
    """Fanfold's layers, in turn."""
    calls = [partial(call_of, layers[index % len(layers)], batch) for index, batch in enumerate(batches)]
    dirty_memory(settings.device)
    check = expected.check(calls[0]())
    if check.wrong is not None:
        return Runner(calls, check, wrong=f"wrong: {check.wrong}")
    if settings.mode != "compiled":
        return _ready(calls, check, settings)
    # One a layer and number of tokens; the usual limit is for code that compiles again by mistake.
    torch.compiler.reset()
    with cast("Any", torch)._dynamo.config.patch(recompile_limit=len(layers) + 1):
        compiled = [torch.compile(layer, fullgraph=True, dynamic=False) for layer in layers]
        faster = [partial(call_of, compiled[index % len(layers)], batch) for index, batch in enumerate(batches)]
        unlike = sum(not same_bits(call(), other()) for call, other in zip(faster, calls, strict=True))
    if unlike:
        return Runner(calls, check, wrong=f"wrong: {unlike} of {len(calls)} calls differ when they are compiled")
    return Runner(faster, check, all_of(faster) if settings.device.type == "cuda" else None)


def of_peer(
    peer: Peer, dense: Sequence[DenseExperts], batches: Sequence[Batch], expected: Expected, settings: Settings
) -> Runner | PeerFigure:
    """A peer's calls, or why there is no figure."""
    if settings.mode == "compiled":
        return PeerFigure(peer.name, refused="compiled calls are timed of fanfold alone")
    if settings.mode == "graph" and settings.device.type == "cuda" and not peer.captured:
        return PeerFigure(peer.name, refused="waits for the device: no CUDA graph holds it")
    try:
        calls = [peer.prepare(dense[index % len(dense)], batch) for index, batch in enumerate(batches)]
        dirty_memory(settings.device)
        check = expected.check(calls[0]())
        made = _ready(calls, check, settings, expected) if check.wrong is None else Runner(calls, check)
    except Exception as error:  # another library's, of any class: it has no figure, and the others do
        return PeerFigure(peer.name, refused=f"{type(error).__name__}: {error}".partition("\n")[0])
    wrong = check.wrong or made.wrong
    return made if wrong is None else PeerFigure(peer.name, check, refused=f"wrong: {wrong}")


def _ready(calls: Sequence[Call], check: Check, settings: Settings, expected: Expected | None = None) -> Runner:
    """Right calls, captured where a graph is asked for.

    A replay of fanfold's has to give the same bits; one of a peer, whose sums may come in any order, what is expected.
    """
    if settings.device.type == "cpu":
        return Runner(calls, check)
    if settings.mode == "eager":
        return Runner(calls, check, all_of(calls))
    replays = Replays(calls)
    if expected is not None:
        return Runner(calls, check, replays.replay, expected.check(replays.outputs[0]).wrong)
    words = f"wrong: {replays.wrong} of {len(calls)} calls differ in a replay of their graph"
    return Runner(calls, check, replays.replay, words if replays.wrong else None)


def timed(runners: Sequence[Runner]) -> list[Times]:
    """The times of each, in rotation."""
    turns = [runner.turn for runner in runners if runner.turn is not None]
    if turns:
        return rotated(turns, len(runners[0].calls))
    return call_times([runner.calls for runner in runners])


def race(first: Runner, others: Sequence[tuple[str, Runner | PeerFigure]]) -> tuple[Times, tuple[PeerFigure, ...]]:
    """Fanfold's times, and the peers' figures in the order they were asked for."""
    running = [(name, other) for name, other in others if isinstance(other, Runner)]
    mine, *theirs = timed([first, *(runner for _, runner in running)])
    figures = {
        name: PeerFigure(name, runner.check, times) for (name, runner), times in zip(running, theirs, strict=True)
    }
    return mine, tuple(figures[name] if isinstance(other, Runner) else other for name, other in others)


def call_of(experts: Callable[..., Tensor], batch: Batch) -> Tensor:
    """One call."""
    return experts(batch.hidden, batch.topk_ids, batch.topk_weights, batch.adapter_ids)


def without_times(peers: Sequence[Peer], reason: str) -> tuple[PeerFigure, ...]:
    """Peers that do not run such a layer."""
    return tuple(replace(PeerFigure(peer.name), refused=reason) for peer in peers)
