"""Which format a layer's activations are rounded to: as its caller says, else as its checkpoint does."""

from __future__ import annotations

from typing import Protocol

from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.spec.activation_format import ACTIVATION_FORMATS, PLAIN, ActivationFormat
from fanfold.spec.weight_format import WeightFormat

AUTO = "auto"


class Projection(Protocol):
    """Weights, or what headers say of them."""

    @property
    def format(self) -> WeightFormat:
        """How they are packed."""
        ...

    @property
    def activations(self) -> str:
        """What the checkpoint says of the activations."""
        ...


def check_name(asked: str) -> None:
    """Whether there is such a format, asked before a checkpoint is read.

    Raises:
        ArgumentError: there is none.
    """
    if asked != AUTO and asked not in ACTIVATION_FORMATS:
        raise ArgumentError(
            "activation_format",
            found=repr(asked),
            expected=f"one of {AUTO}, {', '.join(ACTIVATION_FORMATS)}",
            next_step=f'Leave it at "{AUTO}", which does as the checkpoint says.',
        )


def resolved(asked: str, gate_up: Projection, down: Projection, path: str) -> ActivationFormat:
    """The format that a layer runs with.

    What a checkpoint says of NVFP4 is followed: its input scales are made for it. What it says of FP8 is not: scales
    are made at each call, so that nothing in the file depends on it, and weight only is nearer to the model.

    Args:
        asked: one of ACTIVATION_FORMATS, or AUTO.
        gate_up: the layer's; it knows what its checkpoint says.
        down: likewise.
        path: the layer's name, for errors.

    Raises:
        ArgumentError: no such format.
        UnsupportedError: the weights are not of that format; or AUTO, and the checkpoint says NVFP4 of one projection.
    """
    check_name(asked)
    both = gate_up, down
    if asked == AUTO:
        stated = [projection.activations == "nvfp4" for projection in both]
        if any(stated) and not all(stated):
            raise UnsupportedError(
                f"activations of {path}",
                found=f"{gate_up.activations} for gate and up, {down.activations} for down",
                expected="the same for both products",
                next_step=f'Pass activation_format="{PLAIN}" to keep activations as they are.',
            )
        return "nvfp4" if all(stated) else PLAIN
    found: ActivationFormat = next(name for name in ACTIVATION_FORMATS if name == asked)
    if found != PLAIN and any(projection.format.kind != found for projection in both):
        raise UnsupportedError(
            f"activation_format {found} of {path}",
            found=f"{', '.join(projection.format.name for projection in both)} weights",
            expected=f"{found} weights",
            next_step=f'Leave activation_format at "{AUTO}", or pass "{PLAIN}": activations then stay as they are.',
        )
    return found
