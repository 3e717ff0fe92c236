"""Upper bounds of the plan's buffers: held by every split of rows, and reached by one."""

from hypothesis import given
from hypothesis import strategies as st

from fanfold.routing.sizes import block_count, power_of_two, work_slots


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


@given(st.lists(st.integers(0, 70), min_size=1, max_size=12), st.integers(1, 33), st.integers(0, 9))
def test_bounds_hold_for_every_split(counts: list[int], tile: int, skipped: int) -> None:
    rows = sum(counts) + skipped
    tiles = sum(-(-count // tile) for count in counts)
    assert tiles <= block_count(rows, len(counts), tile) <= work_slots(rows, len(counts), tile)


@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 33))
def test_the_bound_of_blocks_is_reached(rows: int, experts: int, block_rows: int) -> None:
    counts = [1] * min(rows, experts)  # one row each, the rest to one expert
    if counts:
        counts[0] += rows - len(counts)
    assert sum(-(-count // block_rows) for count in counts) == block_count(rows, experts, block_rows)


def test_b7_the_buffer_holds_whole_blocks() -> None:
    """17 rows of 8 experts in blocks of 16: at most 8 blocks, so 128 entries, and never a part of a block."""
    assert block_count(17, 8, 16) == 8
    assert block_count(0, 8, 16) == 0
    assert block_count(5, 0, 16) == 0
