from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """The ranks of a group of that size, made when first asked for."""
    made: dict[int, Ranks] = {}
    yield lambda size: made.setdefault(size, Ranks(size)) if size not in made else made[size]
    for ranks in made.values():
        ranks.close()


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int], Ranks]) -> Ranks:
    """2 ranks, and 4."""
    return ranks_of(request.param)
