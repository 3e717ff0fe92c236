"""From a checkpoint on disk to experts over several ranks: each reads its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from fanfold.distributed.digest import digest
from fanfold.distributed.expert_parallel import ExpertParallel
from fanfold.distributed.peers import peers_of
from fanfold.distributed.plan import ExpertPlan
from fanfold.formats.checkpoint import Checkpoint
from fanfold.layers.activation_format import AUTO, check_name
from fanfold.load import Options, build_experts, checked_device, compute_dtype, open_checkpoint
from fanfold.spec.activation import Activation


def load_experts(
    path: str | Path,
    layer: int = 0,
    plan: ExpertPlan | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    implementation: str = "auto",
    batch_invariant: bool = False,
    activation_format: str = AUTO,
) -> ExpertParallel:
    """The experts of one layer of a checkpoint, packed, over the ranks of a group: each rank reads its own.

    A collective call: all ranks load, or none.

    Args:
        path: the checkpoint directory; every rank's may be a copy.
        layer: the layer's number.
        plan: None for all ranks, experts placed evenly, all-reduce by rows.
        device: where this rank's weights go.
        dtype: see fanfold.load_experts.
        implementation: see fanfold.Experts.
        batch_invariant: see fanfold.Experts.
        activation_format: see fanfold.Experts.

    Raises:
        RankError: another rank failed, is gone, or reads another checkpoint.
        FanfoldError: what fanfold.load_experts raises, on the rank where it happens.
    """
    plan = plan or ExpertPlan()
    with loading(path, plan):
        target = checked_device(device, implementation)
        check_name(activation_format)
        checkpoint = open_checkpoint(path)
        chosen = compute_dtype(checkpoint, dtype)
    options = Options(chosen, target, implementation, batch_invariant, activation_format)
    return spread_layer(checkpoint, layer, checkpoint.config.activation, options, plan)


def loading(path: str | Path, plan: ExpertPlan) -> AbstractContextManager[None]:
    """Inside the block all ranks read what is not an expert, from copies of one checkpoint, or none does.

    Raises:
        RankError: another rank failed, is gone, or reads another checkpoint.
    """
    folder = Path(path)
    files = digest([folder / "config.json", *sorted(folder.glob("*.safetensors"))])
    return peers_of(plan.group).together("checkpoint: all but experts", checkpoint=files)


def spread_layer(
    checkpoint: Checkpoint,
    layer: int,
    activation: Activation,
    options: Options,
    plan: ExpertPlan,
    path: str | None = None,
) -> ExpertParallel:
    """Reads this rank's experts of a layer; see `load.build_experts` for the arguments. A collective call.

    Raises:
        RankError: another rank failed, is gone, or has other options.
        FanfoldError: what build_experts raises, on the rank where it happens.
    """
    peers = peers_of(plan.group)
    with peers.together(f"checkpoint: experts of layer {layer}", batch_invariant=str(options.batch_invariant)):
        placement = plan.placement(layer, checkpoint.num_experts(layer), peers.size)
        own = placement.ranks[peers.rank]
        experts = build_experts(checkpoint, layer, activation, options, path, own)
    return ExpertParallel(
        experts, peers.group, placement=placement, exchange=plan.exchange, exact=plan.exact, bound=plan.bound
    )
