"""Pairs in the dtype and on the device of their site."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import TensorError
from fanfold.lora.site import Pairs, Site
from fanfold.spec import LoraPair


def convert(pairs: Pairs, site: Site) -> Pairs:
    """Contiguous copies (or the tensors themselves, where they are right already) for `site`.

    Raises:
        TensorError: a value is too large for the site's dtype.
    """
    done: dict[int, Tensor] = {}  # a gate and an up pair that share A go on sharing it
    if isinstance(pairs, LoraPair):
        return _pair(pairs, site, done)
    return {place: _pair(pair, site, done) for place, pair in pairs.items()}


def _pair(pair: LoraPair, site: Site, done: dict[int, Tensor]) -> LoraPair:
    for tensor in (pair.a, pair.b):
        if id(tensor) not in done:
            done[id(tensor)] = _tensor(tensor, site)
    return LoraPair(done[id(pair.a)], done[id(pair.b)], pair.scale)


def _tensor(tensor: Tensor, site: Site) -> Tensor:
    rounded = tensor.to(site.dtype)
    if not torch.isfinite(rounded).all():
        raise TensorError(
            f"adapter weights at {site.path}",
            found=f"values up to {float(tensor.abs().max()):g}",
            expected=f"values within {site.dtype}, up to {torch.finfo(site.dtype).max:g}",
            next_step="Load the model with dtype=torch.bfloat16 or torch.float32.",
        )
    return rounded.to(site.device).contiguous()
