"""Quantiles, calls in turn, replays of graphs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from fanfold.bench import timing
from fanfold.bench.timing import Replays, Times, call_times, rotated


def test_quantiles() -> None:
    found = Times.of([float(us) for us in range(11, 0, -1)])
    assert (found.median_us, found.p20_us, found.p80_us, found.replays) == (6, 3, 9, 11)


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPLAYS", 7)
    called: list[int] = []

    def call(number: int) -> Tensor:
        called.append(number)
        return torch.zeros(())

    (found,) = call_times([[lambda: call(0), lambda: call(1), lambda: call(2)]])
    assert called == [0, 0, 1, 2, 0, 1, 2, 0]  # the first one warms up
    assert found.replays == 7
    assert 0 < found.p20_us <= found.median_us <= found.p80_us


def test_rivals_are_interleaved_and_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPLAYS", 5)
    called: list[str] = []

    def calls(name: str, count: int) -> list[Callable[[], Tensor]]:
        def call(number: int) -> Tensor:
            called.append(f"{name}{number}")
            return torch.zeros(())

        return [partial(call, number) for number in range(count)]

    found = call_times([calls("a", 3), calls("b", 3), calls("c", 1)])
    rounds = ("a0", "b0", "c0"), ("b1", "c0", "a1"), ("c0", "a2", "b2"), ("a0", "b0", "c0"), ("b1", "c0", "a1")
    assert called == ["a0", "b0", "c0", *(call for one in rounds for call in one)]
    assert [times.replays for times in found] == [5, 5, 5]


def test_slow_calls_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUDGET_S", 0.0)
    assert call_times([[lambda: torch.zeros(())]])[0].replays == timing.FEWEST


@pytest.mark.gpu
def test_replays_time_each_call() -> None:
    """Two products of 8192^3 at bf16 take 1.1e12 operations each: between 1 and 5 ms on a GPU of this size."""
    x, w = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    replays = Replays([lambda: x @ w, lambda: w @ x])
    assert replays.wrong == 0
    found = replays.times()
    assert 1e3 < found.median_us < 5e3
    assert found.p80_us < 1.5 * found.p20_us
    assert found.replays == timing.REPLAYS


@pytest.mark.gpu
def test_rivals_on_a_gpu_have_their_own_times() -> None:
    small, large = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for size in (2048, 8192))
    rivals = [Replays([lambda: small @ small] * 2), Replays([lambda: large @ large] * 2)]
    fast, slow = rotated([rival.replay for rival in rivals], 2)
    assert 10 * fast.median_us < slow.median_us
    assert fast.replays == slow.replays


@pytest.mark.gpu
def test_a_replay_that_differs_is_found() -> None:
    state = torch.zeros(4, device="cuda")

    def counting() -> Tensor:
        return state.add_(1).clone()

    def steady() -> Tensor:
        return state * 0

    assert Replays([steady, counting, steady]).wrong == 1
