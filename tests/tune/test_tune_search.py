"""The search: found by steps of one field, nothing measured twice, and an end."""

from __future__ import annotations

from collections.abc import Callable

from fanfold.tune.search import GAIN, climb

Point = tuple[int, int]


def beside(point: Point) -> list[Point]:
    x, y = point
    return [(a, b) for a, b in ((x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)) if 0 <= a <= 9 and 0 <= b <= 9]


def bowl(point: Point) -> float:
    return 100.0 + 10 * (point[0] - 7) ** 2 + 10 * (point[1] - 2) ** 2


def watched(time: Callable[[Point], float | None]) -> tuple[Callable[[Point], float | None], list[Point]]:
    seen: list[Point] = []

    def measure(point: Point) -> float | None:
        seen.append(point)
        return time(point)

    return measure, seen


def test_the_fastest_is_found_in_a_few_trials() -> None:
    measure, seen = watched(bowl)
    found = climb((0, 9), beside, measure, 100)
    assert found is not None
    assert (found.best, found.us, found.start_us, found.whole) == ((7, 2), 100, 1080, True)
    assert found.trials == len(seen) == len(set(seen)) < 50


def test_trials_that_run_out() -> None:
    measure, seen = watched(bowl)
    found = climb((0, 9), beside, measure, 5)
    assert found is not None
    assert (found.trials, len(seen), found.whole) == (5, 5, False)
    assert found.us == min(bowl(point) for point in seen)


def test_candidates_that_do_not_run_are_gone_around() -> None:
    wall = {(3, y) for y in range(9)}
    found = climb((0, 9), beside, lambda point: None if point in wall else bowl(point), 100)
    assert found is not None
    assert found.best == (7, 2)


def test_noise_is_no_gain() -> None:
    slightly = 1 - GAIN / 2
    found = climb((5, 5), beside, lambda point: 100.0 if point == (5, 5) else 100 * slightly, 100)
    assert found is not None
    assert (found.best, found.trials, found.whole) == ((5, 5), 5, True)


def test_a_start_that_does_not_run() -> None:
    assert climb((5, 5), beside, lambda point: None, 100) is None
