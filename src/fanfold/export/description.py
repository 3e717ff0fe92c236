"""What is exported, in words: functions with their sizes and buffers, and the kernels that run them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fanfold.export.formulas import evaluate, names
from fanfold.spec.activation import KINDS

DTYPES = ("bf16", "fp16", "fp32")
"""Of activations."""
PROJECTIONS = ("gate_up", "down")
ACTIVATIONS = ("none", *KINDS)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "u64": 8, "u8": 1}
"""Of an element of a buffer."""
KERNEL_TYPES = {"u64": "*i64"}
"""How Triton calls a pointer to such elements, where not by their own name."""


def product(*factors: str) -> str:
    """Formula of the product of formulas."""
    wanted = [factor for factor in factors if factor != "1"] or ["1"]
    if len(wanted) == 1:
        return wanted[0]
    return " * ".join(f"({factor})" if " " in re.sub(r"\(.*\)$", "", factor) else factor for factor in wanted)


@dataclass(frozen=True)
class Size:
    """A whole number that the host gives.

    Attributes:
        name: in formulas, in C.
        meaning: in words, with the letter of semantics.md.
        least: the smallest value.
    """

    name: str
    meaning: str
    least: int = 0


@dataclass(frozen=True)
class Buffer:
    """Memory of the device.

    Attributes:
        name: in C.
        meaning: in words.
        written: whether the kernel writes to it.
        optional: whether it may be left out; formulas know that as `has_<name>`.
    """

    name: str
    meaning: str
    written: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Choice:
    """What tells the kernels of a function apart.

    Attributes:
        name: in C.
        meaning: in words.
        formula: of named sizes; None: the host says.
    """

    name: str
    meaning: str
    formula: str | None = None


@dataclass(frozen=True)
class Check:
    """A condition beside those of single arguments.

    Attributes:
        formula: what must be at most `most`.
        most: formula of the largest value.
        message: what is checked, in words.
    """

    formula: str
    most: str
    message: str


@dataclass(frozen=True)
class Function:
    """One function of the C library; its kernels differ in choices and arch.

    Attributes:
        op: the name of `--op`.
        name: in C, behind `fanfold_`.
        meaning: what it computes.
        sizes, buffers, choices: what the host gives.
        numbers: fp32 that the host gives, with their meanings.
        derived: further named sizes, each a formula of those before.
        checks: of sizes together.
    """

    op: str
    name: str
    meaning: str
    sizes: tuple[Size, ...]
    buffers: tuple[Buffer, ...]
    choices: tuple[Choice, ...]
    numbers: tuple[tuple[str, str], ...] = ()
    derived: tuple[tuple[str, str], ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def formulas(self) -> list[tuple[str, str]]:
        """Derived sizes and choices with a formula, each behind those that it names."""
        left = dict(self.derived) | {choice.name: choice.formula for choice in self.choices if choice.formula}
        found: list[tuple[str, str]] = []
        while left:
            ready = [name for name in left if not left.keys() & (set(names(left[name])) - {name})]
            assert ready, f"{self.name}: sizes name each other: {left}"
            found += [(name, left.pop(name)) for name in ready]
        return found

    def sizes_of(self, given: Mapping[str, int]) -> dict[str, int]:
        """All named sizes.

        Args:
            given: sizes, choices without a formula that are numbers, `arch`, `element_bytes` of activations, and
                `has_<buffer>` of optional buffers.
        """
        found = dict(given)
        for name, formula in self.formulas:
            found[name] = evaluate(formula, found)
        return found


@dataclass(frozen=True)
class Value:
    """What an argument of a kernel is given.

    Attributes:
        formula: of named sizes, or the name of a buffer or number.
        meaning: in words; of a buffer or number its own.
    """

    formula: str
    meaning: str = ""


@dataclass(frozen=True)
class Need:
    """What a kernel expects of a buffer.

    Attributes:
        type: of its elements, a key of BYTES.
        shape: formulas, slowest axis first; the elements lie one behind the other.
    """

    type: str
    shape: tuple[str, ...]

    @property
    def elements(self) -> str:
        """Formula of their number."""
        return product(*self.shape)


@dataclass(frozen=True)
class Range:
    """Rows an expert that a config is for: R / min(R, E), above the first and up to the second; None: no bound."""

    above: int
    up_to: int | None


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel to compile.

    Attributes:
        function: what it runs.
        arch: e.g. "sm_90".
        choices: values by name, in the function's order.
        kernel: under triton.jit.
        example: arguments and launch options of a launch that compiles it.
        values: argument at run time -> its value.
        needs: buffer -> what must be there.
        grid: formulas of the programs.
        config: its name.
        rows: what it is for.
        hazard_test: a GPU test of exact integers that covers the kernel, where the check of its machine code does not.
    """

    function: Function
    arch: str
    choices: Mapping[str, str | int]
    kernel: Any
    example: Mapping[str, Any]
    values: Mapping[str, Value]
    needs: Mapping[str, Need]
    grid: tuple[str, ...]
    config: str
    rows: Range | None = None
    hazard_test: str | None = None

    @property
    def id(self) -> str:
        """A name that no other kernel of a plan has, e.g. `grouped_int4_down-bf16-gptq4-g128-tile16-sm_90`."""
        parts = [value if isinstance(value, str) else f"{name}{value}" for name, value in self.choices.items()]
        return "-".join([self.function.name, *parts, self.arch])
