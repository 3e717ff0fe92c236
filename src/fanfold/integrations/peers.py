"""Peers of `fanfold bench` by name: those that can be imported here, and what is missing of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fanfold.bench.peers import Peer, TorchGroupedMm
from fanfold.errors import ArgumentError, UnavailableError


def peers_named(text: str) -> list[Peer]:
    """The peers of `torch,transformers,vllm,deepgemm`.

    Raises:
        ArgumentError: a name that is none.
        UnavailableError: one can't be imported; says which module is missing.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in MAKERS]
    if unknown:
        raise ArgumentError(
            "--peers",
            found=", ".join(map(repr, unknown)),
            expected=f"some of {', '.join(MAKERS)}, with commas between them",
            next_step="E.g. --peers torch,transformers.",
        )
    found: list[Peer] = []
    for name in dict.fromkeys(names):
        try:
            found.extend(MAKERS[name]())
        except ImportError as error:
            raise UnavailableError(
                f"--peers {name}",
                found=str(error),
                expected=f"{name}, to be imported here",
                next_step=f"Install it, or leave it out: --peers {','.join(n for n in names if n != name) or 'torch'}.",
            ) from error
    return found


def _transformers() -> Sequence[Peer]:
    from fanfold.integrations.transformers.peer import NAMES, TransformersExperts

    return [TransformersExperts(name) for name in NAMES]


def _vllm() -> Sequence[Peer]:
    from fanfold.integrations.engines import Vllm

    return [Vllm()]


def _deepgemm() -> Sequence[Peer]:
    from fanfold.integrations.engines import DeepGemm

    return [DeepGemm()]


MAKERS: dict[str, Callable[[], Sequence[Peer]]] = {
    "torch": lambda: [TorchGroupedMm()],
    "transformers": _transformers,
    "vllm": _vllm,
    "deepgemm": _deepgemm,
}
