"""What a loaded adapter holds, for people and for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fanfold.lora.site import Pairs
from fanfold.spec import LoraPair


def pairs_of(pairs: Pairs) -> list[LoraPair]:
    """The pairs of one site."""
    return [pairs] if isinstance(pairs, LoraPair) else list(pairs.values())


def described(pairs_of_sites: Mapping[str, Pairs]) -> dict[str, object]:
    """Ranks and scales (ascending), targets (how many pairs of each kind) and resident bytes of all pairs."""
    targets: Counter[str] = Counter()
    pairs: list[LoraPair] = []
    for bound in pairs_of_sites.values():
        if isinstance(bound, LoraPair):
            targets["linear"] += 1
            pairs.append(bound)
        else:
            targets.update(projection for projection, _ in bound)
            pairs += bound.values()
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for pair in pairs for t in (pair.a, pair.b)}
    return {
        "ranks": sorted({pair.rank for pair in pairs}),
        "scales": sorted({pair.scale for pair in pairs}),
        "targets": {kind: targets[kind] for kind in ("gate", "up", "down", "linear")},
        "bytes": sum(memory.values()),
    }


@dataclass(frozen=True, eq=False)
class Loaded:
    """An adapter in a slot.

    Attributes:
        slot: its number.
        path: the directory.
        pairs: by site.
    """

    slot: int
    path: Path
    pairs: Mapping[str, Pairs]

    @cached_property
    def facts(self) -> dict[str, object]:
        """What `described` says of the pairs; thousands have to be looked at for it."""
        return described(self.pairs)
