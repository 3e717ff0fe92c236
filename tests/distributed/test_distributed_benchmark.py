"""benchmarks/expert_parallel.py runs between CPU processes, and its rows say what its page says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from distributed_jobs import benchmark
from ranks import Ranks

from samples import ROOT


@pytest.mark.parametrize(("exchange", "bound"), [("all_reduce", None), ("all_to_all", None), ("all_to_all", 10)])
@pytest.mark.parametrize("exact", [True, False])
def test_a_small_run(exchange: str, bound: int | None, exact: bool, ranks_of: Callable[[int], Ranks]) -> None:
    options = {"exchange": exchange, "exact": exact, "bound": bound}
    rows = ranks_of(2).run(benchmark, ROOT / "benchmarks" / "expert_parallel.py", options)
    assert [row["rank"] for row in rows] == [0, 1]
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for row in rows:
        assert {**row, **options} == row
        assert (row["error"] == 0) == exact
        assert row["overlap_us"] == row["exchange_us"] + row["experts_us"] - row["both_us"]
        assert min(row["exchange_us"], row["experts_us"]) > 0
        assert row["graph"] is False
        assert all(f"`{name}`" in page for name in row)
