"""What ranks do in tests of failures: jobs in which one of them does not do what the others do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_jobs import batch, forward, spread

from fanfold.distributed import load_experts, pulse
from fanfold.distributed.peers import peers_of


def forward_beside_a_dead_rank(dead: int, options: dict[str, Any]) -> None:
    """A forward in which a rank is killed."""
    pulse.QUIET = 1.0
    layer = spread("bf16", torch.bfloat16, **options)
    layer(*batch(torch.bfloat16))
    if dist.get_rank() == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    layer(*batch(torch.bfloat16))


def load_beside_a_dead_rank(path: Path) -> None:
    """A load in which a rank is killed."""
    pulse.QUIET = 1.0
    peers_of().agree("begin", {}, None)
    if dist.get_rank() == 1:
        time.sleep(2 * pulse.BEAT)  # the others have seen it
        os.kill(os.getpid(), signal.SIGKILL)
    load_experts(path)


def load_beside_a_rank_that_ends(path: Path) -> None:
    """A load in which a rank has ended in good order."""
    peers_of().agree("begin", {}, None)
    if dist.get_rank() == 1:
        peers_of()._pulse.stop()
        os._exit(0)
    load_experts(path)


def load_beside_a_rank_that_does_not(path: Path) -> None:
    """A load that one rank does not make."""
    if dist.get_rank() == 0:
        load_experts(path)


def load_each(paths: list[Path]) -> None:
    """A load of another path on each rank."""
    load_experts(paths[dist.get_rank()])


def spread_each(names: list[str], options: list[dict[str, Any]]) -> None:
    """Layers of other formats or exchanges on each rank."""
    rank = dist.get_rank()
    forward(names[rank], torch.bfloat16, None, 3, options[rank])


def agree_once() -> None:
    """An agreement on nothing."""
    peers_of().agree("agreement", {}, None)
