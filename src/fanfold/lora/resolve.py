"""Which site of a model a module path of an adapter means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fanfold.errors import AdapterMismatchError


class SiteFinder:
    """Finds sites by the paths that adapters use.

    In this order: the same path; the same path in another spelling (block_sparse_moe = mlp, a router
    `mlp.gate` = `mlp.router`); a path with other leading names (`model.language_model.layers.3...` =
    `model.layers.3...`), which has to agree from the name before the layer number to the end. Anything that
    fits two sites is refused.

    Args:
        paths: the site paths of the model.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._parts = {path: _spelling(path) for path in paths}
        self._found: dict[str, str | None] = {}

    def find(self, path: str) -> str | None:
        """The site's path, or None.

        Raises:
            AdapterMismatchError: more than one site fits equally well.
        """
        if path not in self._found:
            self._found[path] = path if path in self._parts else self._other_spelling(path)
        return self._found[path]

    def nearest(self, path: str) -> list[str]:
        """Up to three sites with similar paths, for error messages."""
        return difflib.get_close_matches(path, self._parts, n=3, cutoff=0.3)

    def _other_spelling(self, path: str) -> str | None:
        parts = _spelling(path)
        same = [site for site, other in self._parts.items() if other == parts]
        if same:
            return self._only(path, same)
        numbers = [position for position, part in enumerate(parts) if part.isdecimal()]
        if not numbers:
            return None
        needed = len(parts) - max(numbers[0] - 1, 0)  # from "layers" in layers.3.mlp.experts
        common = {site: _common_suffix(parts, other) for site, other in self._parts.items()}
        longest = max(common.values(), default=0)
        if longest < needed:
            return None
        return self._only(path, [site for site, length in common.items() if length == longest])

    def _only(self, path: str, sites: list[str]) -> str:
        if len(sites) > 1:
            raise AdapterMismatchError(
                path,
                found=f"it could mean {', '.join(sorted(sites)[:4])}",
                expected="one module of the model",
                next_step="Rename the keys of the adapter to the model's full paths.",
            )
        return sites[0]


def _spelling(path: str) -> tuple[str, ...]:
    parts = ["mlp" if part == "block_sparse_moe" else part for part in path.split(".")]
    if parts[-2:] == ["mlp", "router"]:
        parts[-1] = "gate"
    return tuple(parts)


def _common_suffix(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    length = 0
    for one, other in zip(reversed(left), reversed(right), strict=False):
        if one != other:
            break
        length += 1
    return length
