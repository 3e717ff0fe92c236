"""The formulas of docs/distributed.md, against what exchanges send."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_jobs import EXPERTS, HIDDEN, TOP_K, bytes_sent
from ranks import Ranks

from exchange_bytes import Sizes, sent

SIZES = Sizes(EXPERTS, TOP_K, HIDDEN)
TOKENS = 600


@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("all_to_all", {}),
        ("all_to_all, sums", {"exact": False}),
        ("all_to_all with a bound, sums", {"exact": False, "bound": TOKENS}),
    ],
)
def test_a_rank_sends_what_the_page_says(exchange: str, options: dict[str, Any], ranks: Ranks) -> None:
    found = ranks.run(bytes_sent, TOKENS, options)
    mean = sum(found) / len(found) / TOKENS
    assert mean == pytest.approx(sent(exchange, SIZES, ranks.size), rel=0.04)
