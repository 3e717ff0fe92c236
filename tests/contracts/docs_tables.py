"""Tables of the pages of docs/ that are made from the code."""

from enum import StrEnum
from inspect import Parameter, signature
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo

from exchange_bytes import exchange_table, time_table
from fanfold.cli.app import app
from fanfold.explanation import explain
from fanfold.formats.codec import codec, shapes
from fanfold.formats.fields import Field
from fanfold.ops import OPS
from fanfold.spec.weight_format import WeightFormat
from skewed_routing import placement_table

N, K = 768, 2048
"""Sizes of the matrices of the tables: one expert's gate of Qwen3-30B-A3B."""
LAYER = (128, K, N)
ARCHS = ("cpu", "80", "90", "100")


def table(name: str, *arguments: str) -> str:
    """Markdown of the table of that name."""
    tables = {"options": options, "tensors": tensors, "runs": runs, "operations": operations}
    return {**tables, "placements": placement_table, "exchanges": exchange_table, "times": time_table}[name](*arguments)


def options(command: str) -> str:
    """Arguments and options of a command, as its --help has them."""
    (function,) = [c.callback for c in app.registered_commands if c.callback and c.callback.__name__ == command]
    types = get_type_hints(function, include_extras=True)
    rows = ["| | | default |", "|---|---|---|"]
    for name, parameter in signature(function).parameters.items():
        kind, info = get_args(types[name])
        name, default = name.upper(), parameter.default
        if isinstance(info, OptionInfo):
            # Typer keeps the first of the names it is given as the default of an annotation.
            names = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
            name = ", ".join(names or [f"--{name.lower().replace('_', '-')}"])
            name = " ".join([name, *value_of(kind, info.metavar)])
        elif info.metavar:
            name = info.metavar
        shown = f"`{default}`"
        if isinstance(info.show_default, str):
            shown = f"`{info.show_default}`"
        elif default is Parameter.empty:
            shown = "required"
        elif default is None or default is False:
            shown = ""
        rows.append(f"| {code(name)} | {info.help} | {shown} |")
    return "\n".join(rows)


def value_of(kind: Any, metavar: str | None) -> list[str]:
    """How an option's value is written; nothing for a flag."""
    kinds = [inner for inner in get_args(kind) if inner is not type(None)] or [kind]
    if kinds == [bool]:
        return []
    if issubclass(kinds[0], StrEnum):
        return ["|".join(kinds[0])]
    return [metavar or kinds[0].__name__.upper()]


def code(text: str) -> str:
    """Inline code inside a table's cell; a bar would end the cell, and renderers differ in how it is escaped."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def tensors(*formats: str) -> str:
    """The tensors of W [768, 2048] of one expert: a row a tensor, a column of shapes a format."""
    fields = {name: shapes(WeightFormat.parse(name), N, K) for name in formats}
    rows = [
        "| tensor | dtype | " + " | ".join(f"`{name}`" for name in formats) + " |",
        "|---" * (2 + len(formats)) + "|",
    ]
    for field in dict.fromkeys(field for wanted in fields.values() for field in wanted):
        found = [fields[name].get(field) for name in formats]
        suffixes = " or ".join(f"`{suffix}`" for suffix in codec(WeightFormat.parse(formats[0]).kind).FIELDS[field])
        dtypes = dict.fromkeys(str(dtype) for each in found if each is not None for dtype in each.dtypes)
        shown = ", ".join(dtypes).replace("torch.", "")
        rows.append(f"| {suffixes} | {shown} | {' | '.join(map(shape_of, found))} |")
    return "\n".join(rows)


def shape_of(field: Field | None) -> str:
    """The shape, in brackets of its own where a file may lack the tensor."""
    if field is None:
        return ""
    return f"{list(field.shape)}" if field.required else f"{list(field.shape)} or missing"


def runs(*formats: str) -> str:
    """Which implementation runs a layer of these formats on a CPU and on GPUs; bf16 activations."""
    rows = ["| format | " + " | ".join(a if a == "cpu" else f"sm_{a}" for a in ARCHS) + " |", "|---" * 5 + "|"]
    for name in formats:
        chosen = [explain(LAYER, name, arch, rows=128, top_k=8)["chosen"] for arch in ARCHS]
        rows.append(f"| `{name}` | {' | '.join(f'`{one}`' for one in chosen)} |")
    return "\n".join(rows)


def operations(*names: str) -> str:
    """Schemas of operations of torch.ops.fanfold."""
    rows = ["| operation | arguments and results |", "|---|---|"]
    return "\n".join(rows + [f"| {code(name)} | {code(OPS[name].schema)} |" for name in names])
