"""Experts over several ranks, on torch.distributed: NCCL between GPUs, gloo between CPUs."""

from fanfold.distributed.expert_parallel import ExpertParallel as ExpertParallel
from fanfold.distributed.loading import load_experts as load_experts
from fanfold.distributed.loads import placements_by_load as placements_by_load
from fanfold.distributed.placement import Placement as Placement
from fanfold.distributed.plan import ExpertPlan as ExpertPlan
