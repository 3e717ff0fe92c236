"""fanfold: the expert layers of Mixture-of-Experts models, quantised, with many LoRA adapters in one batch.

The public names are imported when first used; `import fanfold` needs torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fanfold import ops as ops  # registers torch.ops.fanfold

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fanfold import distributed as distributed
    from fanfold import errors as errors
    from fanfold import formats as formats
    from fanfold import reference as reference
    from fanfold.explanation import explain as explain
    from fanfold.inspection import inspect as inspect
    from fanfold.integrations.transformers.model import load_model as load_model
    from fanfold.layers.experts import Experts as Experts
    from fanfold.load import load_experts as load_experts
    from fanfold.lora.pool import AdapterPool as AdapterPool

_HOME = {
    "AdapterPool": "fanfold.lora.pool",
    "Experts": "fanfold.layers.experts",
    "explain": "fanfold.explanation",
    "inspect": "fanfold.inspection",
    "load_experts": "fanfold.load",
    "load_model": "fanfold.integrations.transformers.model",
}
_MODULES = ("distributed", "errors", "formats", "reference")

__all__ = [
    "AdapterPool",
    "Experts",
    "__version__",
    "distributed",
    "errors",
    "explain",
    "formats",
    "inspect",
    "load_experts",
    "load_model",
    "reference",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"fanfold.{name}")
    raise AttributeError(f"module 'fanfold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
