"""What a Router refuses, by name."""

import pytest

from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.spec.router import Router


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"top_k": 0}, "Router.top_k"),
        ({"top_k": 2, "n_group": 4, "topk_group": 5}, "Router.topk_group"),
        ({"top_k": 2, "topk_group": 0}, "Router.topk_group"),
    ],
)
def test_impossible_choices(fields: dict[str, int], name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Router(**fields)
    assert caught.value.what == name


@pytest.mark.parametrize("field", ["scoring", "group_score"])
def test_unknown_formulas(field: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Router.{field}: found 'relu'"):
        Router(2, **{field: "relu"})


@pytest.mark.parametrize(
    ("router", "experts", "name", "expected"),
    [
        (Router(9), 8, "Router.top_k", "at most 8"),
        (Router(2), 0, "number of experts", "a positive multiple"),
        (Router(2, n_group=3, topk_group=1), 8, "number of experts", "multiple of n_group = 3"),
        (Router(5, n_group=4, topk_group=2), 8, "Router.top_k", "at most 4"),
        (Router(2, "sigmoid", n_group=4, topk_group=2, group_score="top2_sum"), 4, "experts of a group", "at least 2"),
    ],
)
def test_layers_that_do_not_fit(router: Router, experts: int, name: str, expected: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        router.check(experts)
    assert caught.value.what == name
    assert expected in caught.value.expected


def test_layers_that_just_fit() -> None:
    Router(8).check(8)
    Router(4, n_group=4, topk_group=2).check(8)
