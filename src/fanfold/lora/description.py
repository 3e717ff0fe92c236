"""What a loaded adapter holds, for people and for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fanfold.lora.site import Pairs
from fanfold.spec import LoraPair


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
    tensors = {id(tensor): tensor for pair in pairs for tensor in (pair.a, pair.b)}  # gate and up share A
    return {
        "ranks": sorted({pair.rank for pair in pairs}),
        "scales": sorted({pair.scale for pair in pairs}),
        "targets": {kind: targets[kind] for kind in ("gate", "up", "down", "linear")},
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
