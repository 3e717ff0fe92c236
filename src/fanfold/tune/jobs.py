"""Jobs: the layers that are tuned, where their search starts and which rows of a table they become."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fanfold.bench.jobs import LayerShape
from fanfold.errors import UnsupportedError
from fanfold.explanation.work import Batch, work
from fanfold.kernels.grouped import tuned as grouped
from fanfold.kernels.grouped.sm90 import tuned as sm90
from fanfold.kernels.grouped.sm90.configs import FAMILIES, layer_configs
from fanfold.kernels.grouped.sm90.weights import padded
from fanfold.select import choose
from fanfold.spec.arch import ARCHS
from fanfold.spec.job import LayerJob
from fanfold.spec.weight_format import WeightFormat
from fanfold.tune.candidates import Candidate, Fits, grouped_candidate, grouped_fits, sm90_fits


@dataclass(frozen=True)
class Job:
    """One layer and number of tokens on one kind of GPU.

    Attributes:
        shape: the layer.
        format: of its weights.
        tokens: T.
        gpu: e.g. "NVIDIA H200".
        arch: `sm_NN`; in tests `sm_0`, the interpreter.
        implementation: what runs it.
    """

    shape: LayerShape
    format: WeightFormat
    tokens: int
    gpu: str
    arch: str
    implementation: str

    @classmethod
    def of(cls, shape: LayerShape, fmt: WeightFormat, tokens: int, gpu: str, arch: str) -> Job:
        """The job, with what runs it.

        Raises:
            UnsupportedError: a layer without a gate, whose configs no table has.
        """
        if not shape.experts.gated:
            raise UnsupportedError(
                f"fanfold tune of {shape.name}",
                found=f"{shape.activation.kind}, without a gate",
                expected="a layer with gate and up",
                next_step="Such layers run with the configs of kernels/grouped/configs.py.",
            )
        return cls(shape, fmt, tokens, gpu, arch, choose(layer_job(shape, fmt), arch))

    @property
    def row(self) -> dict[str, Any]:
        """What tells the row of a table from others."""
        sizes = self.shape.experts
        own = self.implementation == grouped.KERNEL
        return {
            "format": plain(self.format).name if own else family(self.format),
            "experts": sizes.num_experts,
            "top_k": self.shape.top_k,
            "hidden": sizes.hidden,
            "intermediate": sizes.intermediate,
            "tokens": self.tokens,
        }

    def start(self) -> Candidate:
        """What the layer runs with now."""
        sizes, top_k = self.shape.experts, self.shape.top_k
        if self.implementation == sm90.KERNEL:
            found = layer_configs(
                *self._sm90_sizes(),
                sizes.hidden,
                sizes.intermediate,
                sizes.num_experts,
                self.tokens,
                top_k,
                gpu=self.gpu,
            )
            return Candidate(found.gate_up, found.down, found.chained)
        fmt, arch = plain(self.format), int(self.arch.removeprefix("sm_"))
        now = grouped.layer_configs(fmt, fmt, sizes, torch.bfloat16, arch, self.tokens, top_k, gpu=self.gpu)
        return grouped_candidate(now.gate_up, now.down)

    def fits(self) -> Fits:
        """Which candidates suit the layer."""
        sizes = self.shape.experts
        if self.implementation == sm90.KERNEL:
            return sm90_fits(*self._sm90_sizes())
        fmt = plain(self.format)
        return grouped_fits((fmt, sizes.hidden, sizes.halves), (fmt, sizes.intermediate, 1))

    def floor_us(self) -> float:
        """The least a call can take if routing is uniform; 0 where the device's rates are not known."""
        rates = ARCHS.get(self.arch)
        if rates is None or rates.name not in self.gpu:
            return 0.0
        batch = Batch(self.tokens, self.shape.top_k, adapters=0, rank=1)
        return float(work(layer_job(self.shape, self.format), batch, rates)["uniform"]["floor_us"])

    def _sm90_sizes(self) -> tuple[tuple[WeightFormat, int, int], tuple[WeightFormat, int, int]]:
        sizes = self.shape.experts
        gate_up = self.format, padded(sizes.halves * sizes.intermediate), padded(sizes.hidden)
        return gate_up, (self.format, padded(sizes.hidden), padded(sizes.intermediate))


def layer_job(shape: LayerShape, fmt: WeightFormat) -> LayerJob:
    """What is chosen for: bf16 activations."""
    return LayerJob(shape.experts, fmt, fmt, shape.activation.kind, torch.bfloat16)


def plain(fmt: WeightFormat) -> WeightFormat:
    """The format, its groups sorted."""
    return replace(fmt, act_order=False)


def family(fmt: WeightFormat) -> str:
    """The format of a row of the Hopper product's table."""
    return fmt.kind if fmt.kind in FAMILIES else "int4"
