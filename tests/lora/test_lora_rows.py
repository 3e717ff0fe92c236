"""Rows: the adapter of each row, in forward and inside generate."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fanfold.errors import ArgumentError
from fanfold.lora import Rows


def rows(slots: list[int] | None) -> Rows:
    made = Rows()
    made.set(slots)
    return made


def as_list(ids: torch.Tensor | None) -> list[int]:
    assert ids is not None
    assert ids.dtype == torch.int32
    return [int(value) for value in ids]


def test_without_a_list_all_is_base() -> None:
    for made in (Rows(), rows(None)):
        assert made.slots is None
        made.begin(5, 3)
        assert made.ids(15) is None
        assert made.ids(4) is None
        assert made.ids_for([5, 1, 8]) is None
        with made.expanding(2):
            made.begin(7, 1)


def test_one_id_a_token() -> None:
    made = rows([2, -1, 0])
    made.begin(3, 2)
    assert as_list(made.ids(6)) == [2, 2, -1, -1, 0, 0]
    assert as_list(made.ids_for([3, 2, 64])) == [2, 2, -1, -1, 0, 0]
    assert as_list(made.ids_for([6, 64])) == [2, 2, -1, -1, 0, 0]
    assert as_list(made.ids_for([3, 1, 64])) == [2, -1, 0]  # logits_to_keep
    assert as_list(made.ids_for([3, 1, 2, 64])) == [2, 2, -1, -1, 0, 0]  # heads between batch and sequence


def test_a_list_of_base_rows_has_a_length() -> None:
    made = rows([-1, -1])
    made.begin(2, 4)
    assert as_list(made.ids(8)) == [-1] * 8
    assert as_list(made.ids_for([2, 4, 8])) == [-1] * 8
    with pytest.raises(ArgumentError):
        made.begin(3, 4)


@pytest.mark.parametrize("batch", [1, 2, 4, 6, 0])
def test_a_list_of_wrong_length(batch: int) -> None:
    made = rows([0, 1, -1])
    with pytest.raises(ArgumentError) as caught:
        made.begin(batch, 5)
    assert caught.value.what == "using list of wrong length"
    assert caught.value.found == f"3 names for a batch of {batch} rows"


def test_an_empty_list() -> None:
    made = rows([])
    made.begin(0, 5)
    assert as_list(made.ids(0)) == []
    with pytest.raises(ArgumentError, match="0 names for a batch of 2 rows"):
        made.begin(2, 5)
    with made.expanding(0), pytest.raises(ArgumentError, match="0 names for a batch of 2 rows"):
        made.begin(2, 5)


def test_generate_repeats_rows_next_to_their_copies() -> None:
    made = rows([1, -1])
    with made.expanding(2):
        made.begin(2, 1)
        assert as_list(made.ids(2)) == [1, -1]
        made.begin(6, 2)
        assert as_list(made.ids(12)) == [1] * 6 + [-1] * 6
        with pytest.raises(ArgumentError, match="2 names for a batch of 5 rows"):
            made.begin(5, 1)
        with pytest.raises(ArgumentError, match="2 names for a batch of 1 rows"):
            made.begin(1, 1)
    with pytest.raises(ArgumentError):
        made.begin(6, 1)


def test_generate_checks_the_batch_it_is_given() -> None:
    made = rows([1, -1])
    with pytest.raises(ArgumentError, match="2 names for a batch of 4 rows"), made.expanding(4):
        pytest.fail("not reached")


def test_expanding_ends_with_its_block_also_on_errors() -> None:
    made = rows([1, -1])
    with contextlib.suppress(KeyError), made.expanding(2):
        with made.expanding(2):
            pass
        made.begin(4, 1)  # the inner block does not end the outer one
        raise KeyError
    with pytest.raises(ArgumentError):
        made.begin(4, 1)


def test_inputs_of_another_forward_are_refused() -> None:
    made = rows([1, -1])
    made.begin(2, 3)
    with pytest.raises(ArgumentError, match=r"found 5 tokens; expected 2 \* 3"):
        made.ids(5)
    for shape in ([3, 3, 8], [2, 4, 8], [3, 2, 3, 8], [6]):
        with pytest.raises(ArgumentError, match="rows of the running forward"):
            made.ids_for(shape)


def test_a_layer_on_its_own_takes_rows_as_tokens() -> None:
    made = rows([1, -1, 0])
    assert as_list(made.ids(3)) == [1, -1, 0]
    assert as_list(made.ids_for([3, 8])) == [1, -1, 0]
    assert as_list(made.ids_for([3, 2, 8])) == [1, 1, -1, -1, 0, 0]
    with pytest.raises(ArgumentError, match="3 names for 4 tokens"):
        made.ids(4)


def test_a_new_list_forgets_the_forward() -> None:
    made = rows([1, -1])
    made.begin(2, 3)
    made.set([0, 0, 0, 2, 2, 2])
    assert as_list(made.ids(6)) == [0, 0, 0, 2, 2, 2]


def test_the_list_is_copied() -> None:
    given = [1, 2]
    made = rows(given)
    given[0] = 7
    assert made.slots == [1, 2]


def test_ids_stay_at_one_address_and_their_tail_is_refilled() -> None:
    """A captured graph of more rows reads the base behind a shorter list, not what a longer one has left there."""
    made = rows([1, 2, 3, 4])
    where = made.entries.data_ptr()
    made.set([7])
    assert made.entries.data_ptr() == where
    assert made.entries[:5].tolist() == [7, -1, -1, -1, -1]
    made.set(None)
    assert bool((made.entries == -1).all())


def test_one_token_a_row_copies_nothing() -> None:
    made = rows([2, -1, 0])
    made.begin(3, 1)
    ids = made.ids(3)
    assert ids is not None
    assert ids.data_ptr() == made.entries.data_ptr()


def test_a_list_that_does_not_fit() -> None:
    made = rows([1])
    with pytest.raises(ArgumentError, match="65537 names; expected at most 65536"):
        made.set([0] * 65537)
    assert made.slots == [1]


def test_made_in_inference_mode() -> None:
    with torch.inference_mode():
        made = Rows()
    made.set([3])
    assert as_list(made.ids(1)) == [3]


def test_moved() -> None:
    made = rows([3])
    made.move(torch.device("meta"))
    assert made.entries.device.type == "meta"
