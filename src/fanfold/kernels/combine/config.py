"""How the weighted sum is cut into programs."""

from __future__ import annotations

MANY_TOKENS = 64  # from here on a program takes 1024 columns; below, more and smaller programs fill the GPU


def columns(tokens: int) -> int:
    """Columns of one token's output that a program makes."""
    return 1024 if tokens >= MANY_TOKENS else 256
