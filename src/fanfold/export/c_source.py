"""The C launcher of an export: one header, one source file, made of the same descriptions as the manifest.

Both start with what is the same in every export (the files in `c/`); what follows are the choices' constants, a struct
of arguments and a function for each exported one, and the tables of its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from fanfold.export.c_function import Table, function_source
from fanfold.export.compile import Compiled
from fanfold.export.description import Function
from fanfold.export.words import WORDS, constant
from fanfold.kernels.grouped.configs import MOST_ROWS
from fanfold.kernels.lora.sizes import MOST_RANK, RANK_ALIGN, RANK_TILE, ROW_TILES
from fanfold.routing.plan import ONE_LAUNCH_READS, ONE_LAUNCH_ROWS

MOST_PARAMETERS = 64
PRODUCT_TILES = (*(tile for _, tile in MOST_ROWS), 128)
MADE = "/* Made by `fanfold export`; edit nothing here. */\n"


def functions_of(compiled: Sequence[Compiled]) -> list[Function]:
    """Each function once, in order."""
    return list({made.kernel.function.name: made.kernel.function for made in compiled}.values())


def header(compiled: Sequence[Compiled]) -> str:
    """`fanfold_kernels.h`, for C99 and C++17."""
    parts = [
        MADE + "#ifndef FANFOLD_KERNELS_H\n#define FANFOLD_KERNELS_H\n\n#include <stddef.h>\n#include <stdint.h>\n\n"
        '#ifdef __cplusplus\nextern "C" {\n#endif\n\n',
        _text("types.h"),
        *(_words(choice) for choice in WORDS),
        *(_declaration(function) for function in functions_of(compiled)),
        "#ifdef __cplusplus\n}\n#endif\n\n#endif\n",
    ]
    return "".join(parts)


def source(compiled: Sequence[Compiled]) -> str:
    """`fanfold_kernels.c`, for C99 with dlopen."""
    archs = ", ".join(dict.fromkeys(made.kernel.arch for made in compiled))
    table = Table(compiled)
    used = {choice.name for function in functions_of(compiled) for choice in function.choices}
    functions = [function_source(function, table) for function in functions_of(compiled)]
    parts = [
        MADE + '#define _POSIX_C_SOURCE 200809L\n\n#include "fanfold_kernels.h"\n\n'
        "#include <dlfcn.h>\n#include <errno.h>\n#include <stdarg.h>\n#include <stdio.h>\n#include <stdlib.h>\n"
        "#include <string.h>\n\n",
        f"#define ARCHS_OF_THIS_FILE {json.dumps(archs)}\n\n",
        f"enum {{ MOST_PARAMETERS = {MOST_PARAMETERS}, RANK_ALIGN = {RANK_ALIGN}, RANK_TILE = {RANK_TILE}, "
        f"MOST_RANK = {MOST_RANK} }};\n",
        f"enum {{ ONE_LAUNCH_ROWS = {ONE_LAUNCH_ROWS}, ONE_LAUNCH_READS = {ONE_LAUNCH_READS} }};\n",
        f"enum {{ ROW_TILE_COUNT = {len(ROW_TILES)}, PRODUCT_TILE_COUNT = {len(PRODUCT_TILES)} }};\n",
        f"static const int64_t ROW_TILES[] = {_list(ROW_TILES)};\n",
        f"static const int64_t PRODUCT_TILES[] = {_list(PRODUCT_TILES)};\n",
        f"static const int64_t PRODUCT_MOST_ROWS[] = {_list([most for most, _ in MOST_ROWS])};\n\n",
        *(_text(name) for name in ("driver.c", "sizes.c", "launch.c", "choose.c")),
        *(_word_table(choice) for choice in WORDS if choice in used),
        table.source(),
        *functions,
    ]
    return "".join(parts)


def _text(name: str) -> str:
    return (files("fanfold.export") / "c" / name).read_text(encoding="utf-8")


def _words(choice: str) -> str:
    lines = [f"    {constant(choice, word)} = {i}" for i, word in enumerate(WORDS[choice])]
    return "enum {\n" + ",\n".join(lines) + "\n};\n\n"


def _word_table(choice: str) -> str:
    return f"static const char *const WORDS_{choice.upper()}[] = {{{', '.join(map(json.dumps, WORDS[choice]))}}};\n"


def _declaration(function: Function) -> str:
    """The struct of arguments, and the function's prototype."""
    lines = [f"/* {function.meaning}. */", f"typedef struct fanfold_{function.name}_arguments {{"]
    lines += [f"    int64_t {size.name}; /* {size.meaning} */" for size in function.sizes]
    for choice in function.choices:
        if choice.formula is None:
            values = f"; FANFOLD_{choice.name.upper()}_..." if choice.name in WORDS else ""
            lines.append(f"    int32_t {choice.name}; /* {choice.meaning}{values} */")
    lines += [f"    float {name}; /* {meaning} */" for name, meaning in function.numbers]
    for buffer in function.buffers:
        notes = [text for text, said in (("written", buffer.written), ("optional", buffer.optional)) if said]
        lines.append(f"    fanfold_buffer {buffer.name}; /* {'; '.join([buffer.meaning, *notes])} */")
    lines.append(f"}} fanfold_{function.name}_arguments;\n")
    lines.append(
        f"int fanfold_{function.name}(fanfold_context *context, const fanfold_{function.name}_arguments *arguments,\n"
        "    fanfold_stream stream, fanfold_error *error);\n\n"
    )
    return "\n".join(lines)


def _list(numbers: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"
