"""Placement: which rank holds which experts of a layer, evenly or by a table of their loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fanfold.errors import ArgumentError


@dataclass(frozen=True)
class Placement:
    """The experts of every rank. An expert on several ranks has its rows dealt out to them, token by token.

    Attributes:
        ranks: for each rank the experts that it holds, in the order of its own stack.

    Raises:
        ArgumentError: an expert on no rank or twice on one, a rank without experts, or a negative number.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = Counter(expert for experts in self.ranks for expert in experts)
        count = max(held, default=-1) + 1
        missing = sorted(set(range(count)) - set(held))
        faults = [f"no rank for experts {', '.join(map(str, missing[:8]))}"] if missing else []
        for rank, experts in enumerate(self.ranks):
            if len(set(experts)) != len(experts) or not experts or min(experts) < 0:
                faults.append(f"rank {rank} with experts {list(experts)[:8]}")
        if faults or not self.ranks:
            raise ArgumentError(
                "Placement",
                found="; ".join(faults) or "no ranks",
                expected="experts 0 to E-1, each on one rank or more, and at least one, each once, on every rank",
                next_step="Make placements with Placement.even or Placement.by_load.",
            )

    @classmethod
    def even(cls, num_experts: int, ranks: int) -> Placement:
        """Consecutive experts, as many on each rank as on any other, or one more on the first ones.

        Raises:
            ArgumentError: fewer experts than ranks.
        """
        if not 0 < ranks <= num_experts:
            raise _too_few(num_experts, ranks)
        each, more = divmod(num_experts, ranks)
        ends = [each * rank + min(rank, more) for rank in range(ranks + 1)]
        return cls(tuple(tuple(range(ends[r], ends[r + 1])) for r in range(ranks)))

    @classmethod
    def by_load(cls, counts: Sequence[int], ranks: int, copies: int = 0) -> Placement:
        """Loads as equal as a greedy choice makes them, with as many experts on a rank as on any other, or one less.

        Copies go, one after the other, to the expert with the most rows a copy. Then experts are placed, the fullest
        first, each on the rank with the fewest rows that has room and does not hold it (longest processing time first:
        Graham, 1969).

        Args:
            counts: rows of each expert, as `fanfold routing --json` has them.
            ranks: how many.
            copies: experts beyond one each; memory for copies / E of the layer's weights over all ranks.

        Raises:
            ArgumentError: fewer experts than ranks, negative counts, or more copies than each rank can hold apart.
        """
        experts = len(counts)
        if not 0 < ranks <= experts:
            raise _too_few(experts, ranks)
        if min(counts) < 0 or not 0 <= copies <= experts * (ranks - 1):
            raise ArgumentError(
                "Placement.by_load",
                found=f"counts from {min(counts)}, {copies} copies",
                expected=f"counts of at least 0, and 0 to {experts * (ranks - 1)} copies",
                next_step="Pass the counts of one layer of `fanfold routing --json`.",
            )
        number = [1] * experts
        for _ in range(copies):
            open_ones = [e for e in range(experts) if number[e] < ranks]
            number[max(open_ones, key=lambda e: counts[e] / number[e])] += 1
        room = -(-(experts + copies) // ranks)
        held: list[list[int]] = [[] for _ in range(ranks)]
        loads = [0.0] * ranks
        # Experts on more ranks go first among equals: late ones could find room on ranks that hold them already alone.
        for expert in sorted(range(experts), key=lambda e: (-counts[e] / number[e], -number[e])):
            for _ in range(number[expert]):
                free = [r for r in range(ranks) if len(held[r]) < room and expert not in held[r]]
                if not free:  # a copy that has no place is left out: its expert has one elsewhere
                    break
                # Among equals the emptiest: every rank gets an expert, also where no rows are counted.
                rank = min(free, key=lambda r: (loads[r], len(held[r])))
                held[rank].append(expert)
                loads[rank] += counts[expert] / number[expert]
        return cls(tuple(tuple(sorted(experts)) for experts in held))

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.copies)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """On how many ranks each expert is."""
        held = Counter(expert for experts in self.ranks for expert in experts)
        return tuple(held[expert] for expert in range(max(held) + 1))

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each expert, its (rank, number on that rank), by rank."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.ranks):
            for number, expert in enumerate(experts):
                found[expert].append((rank, number))
        return tuple(tuple(places) for places in found)

    def loads(self, counts: Sequence[int]) -> list[float]:
        """Rows of each rank where experts have these counts; those of an expert are shared by its ranks."""
        return [sum(counts[e] / self.copies[e] for e in experts) for experts in self.ranks]

    def max_over_mean(self, counts: Sequence[int]) -> float:
        """Rows of the fullest rank over the mean: what a layer waits for, against perfectly equal loads."""
        loads = self.loads(counts)
        return max(loads) * len(loads) / sum(loads)


def _too_few(experts: int, ranks: int) -> ArgumentError:
    return ArgumentError(
        "Placement",
        found=f"{experts} experts for {ranks} ranks",
        expected="at least one expert for each rank",
        next_step="Spread the layer over fewer ranks.",
    )
