"""One function of the C launcher, and the tables of its kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fanfold.export.compile import SCRATCH, Compiled
from fanfold.export.description import BYTES, DTYPES, Function
from fanfold.export.formulas import in_c
from fanfold.export.paths import cubin_path
from fanfold.export.words import WORDS, number


class Table:
    """All kernels of an export in order of functions, with what they share said once.

    Args:
        compiled: the kernels.
    """

    def __init__(self, compiled: Sequence[Compiled]) -> None:
        by_function: dict[str, list[Compiled]] = {}
        for made in compiled:
            by_function.setdefault(made.kernel.function.name, []).append(made)
        self.by_function = by_function
        self.formulas = {name: _formulas(found) for name, found in by_function.items()}
        self.first: dict[str, int] = {}
        self._arrays: dict[str, str] = {}
        rows: list[str] = []
        for name, found in by_function.items():
            self.first[name] = len(rows)
            rows += [self._row(made, self.formulas[name]) for made in found]
        self._rows = rows

    def source(self) -> str:
        """The arrays, and the kernels' metadata."""
        arrays = [f"static const {text.replace('NAME', name, 1)};\n" for text, name in self._arrays.items()]
        return (
            "\n"
            + "".join(arrays)
            + "\nstatic const fanfold_kernel KERNELS[] = {\n"
            + ",\n".join(self._rows)
            + "\n};\n\nconst fanfold_kernel *fanfold_kernels(int32_t *count)\n{\n"
            "    *count = (int32_t)(sizeof KERNELS / sizeof *KERNELS);\n    return KERNELS;\n}\n"
        )

    def _array(self, prefix: str, text: str) -> str:
        """The name of an array with this text, made once."""
        return self._arrays.setdefault(text, f"{prefix}{len(self._arrays)}")

    def _row(self, made: Compiled, formulas: list[str]) -> str:
        kernel, function = made.kernel, made.kernel.function
        buffers = [buffer.name for buffer in function.buffers]
        numbers = [name for name, _ in function.numbers]
        parameters: list[str] = []
        for parameter in made.parameters:
            formula = kernel.values[parameter.name].formula
            if parameter.type.startswith("*"):
                kind, index = "p", buffers.index(formula)
            elif formula in numbers:
                kind, index = "f", numbers.index(formula)
            elif parameter.type == "fp32":
                kind, index = "s", 0  # a number that is not read
            else:
                kind, index = {"i32": "i", "i64": "l"}[parameter.type], formulas.index(formula)
            parameters.append(f"{{'{kind}', {index}, {parameter.multiple}, {json.dumps(parameter.name)}}}")
        parameters += [f"{{'s', 0, 1, {json.dumps(name)}}}" for name in SCRATCH]
        needs = [
            f"{{{buffers.index(name)}, {formulas.index(need.elements)}, {BYTES[need.type]}}}"
            for name, need in kernel.needs.items()
        ]
        choices = [str(number(name, value)) for name, value in kernel.choices.items()]
        arrays = (
            ("C", "int32_t", choices),
            ("P", "fanfold_parameter", parameters),
            ("N", "fanfold_need", needs),
        )
        fields = [json.dumps(text) for text in (kernel.id, function.name, made.symbol, cubin_path(kernel))]
        fields += [kernel.arch.removeprefix("sm_"), str(made.warps), str(made.shared), str(len(made.cubin))]
        for prefix, kind, members in arrays:
            fields += [self._array(prefix, f"{kind} NAME[] = {braces(members)}"), str(len(members))]
        fields.append(braces(str(formulas.index(formula)) for formula in kernel.grid))
        return f"    {braces(fields)}"


def braces(members: Iterable[str]) -> str:
    """A C initializer."""
    return f"{{{', '.join(members)}}}"


def _formulas(found: Sequence[Compiled]) -> list[str]:
    """Every formula that a kernel of a function needs, once."""
    wanted: dict[str, None] = {}
    for made in found:
        kernel = made.kernel
        numbers = [name for name, _ in kernel.function.numbers]
        for parameter in made.parameters:
            formula = kernel.values[parameter.name].formula
            if parameter.type in ("i32", "i64") and formula not in numbers:
                wanted[formula] = None
        wanted |= dict.fromkeys(need.elements for need in kernel.needs.values())
        wanted |= dict.fromkeys(kernel.grid)
    return list(wanted)


def function_source(function: Function, table: Table) -> str:
    """The definition of one typed function."""
    name, formulas = function.name, table.formulas[function.name]
    known = _known(function)
    lines = [
        f"int fanfold_{name}(fanfold_context *context, const fanfold_{name}_arguments *arguments,",
        "    fanfold_stream stream, fanfold_error *error)",
        "{",
        f"    static const choice asked[] = {braces(_asked(choice.name) for choice in function.choices)};",
        f"    static const char *const formulas[] = {braces(map(json.dumps, formulas))};",
        f"    static const char *const buffer_names[] = {braces(json.dumps(b.name) for b in function.buffers)};",
        "    const fanfold_kernel *kernel;",
        "    int status;",
        "    if (context == NULL || arguments == NULL)",
        f'        return fail(error, FANFOLD_INVALID_ARGUMENT, "{name}: %s is NULL",',
        '                    context == NULL ? "context" : "arguments");',
        *_guarded(_single_checks(function), 4),
        "    {",
    ]
    for derived, formula in function.formulas:
        lines.append(f"        const int64_t {derived} = {in_c(formula, known)};")
        known[derived] = derived
    values = braces(in_c(formula, known) for formula in formulas)
    buffers = braces(f"arguments->{buffer.name}" for buffer in function.buffers)
    numbers = braces(f"arguments->{number_name}" for number_name, _ in function.numbers) if function.numbers else "{0}"
    counts = [str(len(members)) for members in (formulas, function.buffers, function.numbers)]
    operands = f"{{values, formulas, {counts[0]}, buffers, buffer_names, {counts[1]}, numbers, {counts[2]}}}"
    kernels = f"&KERNELS[{table.first[name]}], {len(table.by_function[name])}"
    most = [
        f'check_most("{name}", {json.dumps(check.message)}, {json.dumps(check.formula)}, '
        f"{in_c(check.formula, known)}, {in_c(check.most, known)}, error)"
        for check in function.checks
    ]
    lines += [
        f"        const int64_t wanted[] = {braces(known[choice.name] for choice in function.choices)};",
        f"        const int64_t values[] = {values};",
        f"        const fanfold_buffer buffers[] = {buffers};",
        f"        const float numbers[] = {numbers};",
        f"        const fanfold_operands operands = {operands};",
        *(f"        (void){derived};" for derived, _ in function.formulas),
        *_guarded(most, 8),
        *_guarded(
            [f'choose("{name}", {kernels}, context->arch, asked, wanted, {len(function.choices)}, &kernel, error)'], 8
        ),
        "        return fanfold_launch(context, kernel, &operands, stream, error);",
        "    }",
        "}",
    ]
    return "\n" + "\n".join(lines) + "\n"


def _known(function: Function) -> dict[str, str]:
    """What names of formulas are in C, before those that are derived."""
    known = {size.name: f"arguments->{size.name}" for size in function.sizes}
    known |= {choice.name: f"arguments->{choice.name}" for choice in function.choices if choice.formula is None}
    known |= {f"has_{buffer.name}": f"(arguments->{buffer.name}.address != 0)" for buffer in function.buffers}
    bytes_ = [f"arguments->dtype == {i} ? {BYTES[dtype]}" for i, dtype in enumerate(DTYPES)]
    return {**known, "arch": "context->arch", "element_bytes": f"({' : '.join(bytes_)} : 0)"}


def _single_checks(function: Function) -> list[str]:
    """Of each size and choice by itself."""
    found = [
        f'check_size("{function.name}", "{size.name}", arguments->{size.name}, {size.least}, error)'
        for size in function.sizes
    ]
    for i, choice in enumerate(function.choices):
        if choice.formula is None and choice.name in WORDS:
            found.append(f'check_word("{function.name}", &asked[{i}], arguments->{choice.name}, error)')
        elif choice.formula is None:
            found.append(f'check_size("{function.name}", "{choice.name}", arguments->{choice.name}, 1, error)')
    return found


def _guarded(calls: Sequence[str], indent: int) -> list[str]:
    """Statements that return the first status that is not OK."""
    found: list[str] = []
    for call in calls:
        found += [f"if ((status = {call}) != FANFOLD_OK)", "    return status;"]
    return [" " * indent + line for line in found]


def _asked(name: str) -> str:
    if name not in WORDS:
        return braces((json.dumps(name), "NULL", "0"))
    return braces((json.dumps(name), f"WORDS_{name.upper()}", str(len(WORDS[name]))))
