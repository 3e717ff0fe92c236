"""The C launcher, built by gcc, over a driver that only writes launches down."""

from __future__ import annotations

import ctypes
import random
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from export_cases import (
    CUBIN,
    NEEDS_GCC,
    STRICT,
    Buffer,
    Error,
    Host,
    KernelRow,
    build,
    build_driver,
    described,
    evaluated,
    is_for,
    run,
    sizes_for,
    write_export,
)

from fanfold.export.compile import Compiled
from fanfold.export.description import BYTES, Kernel
from fanfold.export.formulas import evaluate
from fanfold.export.paths import HEADER
from fanfold.export.words import constant, number

pytestmark = NEEDS_GCC
OK, INVALID, NOT_EXPORTED, BAD_METADATA, FILE, NO_DRIVER, DRIVER, _ = range(8)
GIVEN = {
    **{"tokens": 40, "top_k": 2, "experts": 9, "outputs": 768, "inputs": 640, "adapter_slots": 4, "table_experts": 9},
    **{"max_rank": 16, "row_offset": 3, "row_end": 70, "cap": 70, "rows": 33},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_export(folder, described())
    return folder


@pytest.fixture(scope="module")
def opened(folder: Path) -> Host:
    # Whoever asks for its name from now on gets this one.
    driver = ctypes.CDLL(str(build_driver(folder)), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(build(folder)))
    library.fanfold_kernels.restype = ctypes.POINTER(KernelRow)
    context, error = ctypes.c_void_p(), Error()
    status = library.fanfold_open(str(folder).encode(), ctypes.byref(context), ctypes.byref(error))
    assert status == OK, error.text
    return Host(library, driver, context)


@pytest.fixture
def host(opened: Host) -> Host:
    """Without launches so far."""
    ctypes.memset(ctypes.byref(opened.launched), 0, ctypes.sizeof(opened.launched))
    ctypes.c_int.in_dll(opened.driver, "parameter_count").value = 0
    return opened


def arguments(kernel: Kernel, sizes: dict[str, int]) -> dict[str, object]:
    """Of a call that the kernel is for: buffers of exactly the bytes that are needed, one behind the other."""
    function = kernel.function
    found: dict[str, object] = {size.name: sizes[size.name] for size in function.sizes}
    found |= {choice.name: sizes[choice.name] for choice in function.choices if choice.formula is None}
    found |= {name: 0.5 for name, _ in function.numbers}
    for i, (name, need) in enumerate(kernel.needs.items()):
        found[name] = Buffer(4096 * (i + 1), evaluate(need.elements, sizes) * BYTES[need.type])
    return found


@cache
def calls() -> list[tuple[Compiled, dict[str, int]]]:
    """For each kernel of sm_90 that one of some random sizes is for, the sizes."""
    chance = random.Random(8)
    found: dict[str, tuple[Compiled, dict[str, int]]] = {}
    for _ in range(60):
        given = GIVEN | {"tokens": chance.choice([1, 7, 40, 300, 3000, 20000]), "top_k": chance.choice([1, 2, 8])}
        given |= {"experts": chance.choice([3, 60, 128, 400]), "max_rank": chance.choice([8, 16, 24, 32])}
        given |= {"table_experts": 3, "adapter_slots": chance.choice([1, 40, 100])}
        given |= {"row_offset": 0, "row_end": given["tokens"] * given["top_k"], "cap": 160000}
        given |= {"outputs": 128 * chance.randrange(1, 20), "inputs": 128 * chance.randrange(1, 20)}
        for made in described():
            if made.kernel.arch == "sm_90" and made.kernel.id not in found:
                sizes = sizes_for(made.kernel, given)
                if is_for(made.kernel, sizes):
                    found[made.kernel.id] = made, sizes
    return list(found.values())


def test_every_function_launches_what_its_formulas_say(host: Host) -> None:
    """Kernel, grid, threads, shared memory, and every argument in order."""
    launched: defaultdict[str, int] = defaultdict(int)
    for made, sizes in calls():
        kernel = made.kernel
        bounds = [(evaluate(c.formula, sizes), evaluate(c.most, sizes)) for c in kernel.function.checks]
        given = arguments(kernel, sizes)
        before = host.launched.count
        ctypes.c_int.in_dll(host.driver, "parameter_count").value = len(made.parameters) + 2
        status, error = host.call(kernel.function, **given)
        if any(found > most for found, most in bounds):
            assert (status, host.launched.count) == (INVALID, before), kernel.id
            continue
        assert status == OK, error.text
        assert host.launched.count == before + 1
        assert list(host.launched.grid) == [evaluate(formula, sizes) for formula in kernel.grid], kernel.id
        assert list(host.launched.block) == [32 * made.warps, 1, 1]
        assert host.launched.shared == made.shared
        numbers, values = dict(kernel.function.numbers), evaluated(made, sizes)
        for at, parameter in enumerate(made.parameters):
            formula, found = kernel.values[parameter.name].formula, host.launched.parameters[at]
            if parameter.type.startswith("*"):
                assert found == given[formula].address, parameter  # type: ignore[attr-defined]
            elif formula in numbers:
                assert found == int.from_bytes(ctypes.c_float(0.5), "little"), parameter
            elif parameter.type == "fp32":
                assert found == 0, parameter
            else:
                assert found == values[parameter.name] % 2**32, (kernel.id, parameter)
        assert list(host.launched.parameters[len(made.parameters) :][:2]) == [0, 0]  # scratch
        launched[kernel.function.name] += 1
    assert set(launched) == {made.kernel.function.name for made in described()}
    assert sum(launched.values()) > 200


def test_each_buffer_short_null_or_not_aligned_is_named(host: Host) -> None:
    seen: set[str] = set()
    for made, sizes in calls():
        kernel = made.kernel
        if kernel.function.name in seen or any(
            evaluate(c.formula, sizes) > evaluate(c.most, sizes) for c in kernel.function.checks
        ):
            continue
        seen.add(kernel.function.name)
        given = arguments(kernel, sizes)
        optional = {buffer.name for buffer in kernel.function.buffers if buffer.optional}
        for name in kernel.needs:
            whole = given[name]
            assert isinstance(whole, Buffer)
            wrong = {"short": Buffer(whole.address, whole.bytes - 1), "odd": Buffer(whole.address + 8, whole.bytes)}
            wrong |= {} if name in optional else {"null": Buffer(0, whole.bytes)}
            for case, buffer in wrong.items():
                status, error = host.call(kernel.function, **(given | {name: buffer}))
                assert status == INVALID, (kernel.id, name, case)
                assert error.text.startswith(f"{kernel.function.name}: {name}: found "), error.text
                assert str(buffer.address if case != "short" else buffer.bytes) in error.text
    assert len(seen) > 10
    assert host.launched.count == 0


def pick(name: str, **choices: object) -> Kernel:
    return next(
        made.kernel
        for made in described()
        if made.kernel.function.name == name
        and made.kernel.arch == "sm_90"
        and all(made.kernel.choices[key] == value for key, value in choices.items())
    )


DOWN = {"name": "grouped_int4_down", "format": "gptq4-g128", "tile": 16}
FOLD = {"name": "lora_fold", "projection": "down", "source": 2, "tile": 8, "block_r": 16, "one_tile": 0}
SHRINK = {"name": "lora_shrink", "projection": "down", "source": 2, "tile": 8, "block_r": 16}


@pytest.mark.parametrize(
    ("of", "changed", "status", "message"),
    [
        (DOWN, {"tokens": -1}, INVALID, "grouped_int4_down: tokens: found -1, expected 0 to 2147483647"),
        (DOWN, {"tokens": 2**40}, INVALID, "tokens: found 1099511627776, expected 0 to 2147483647"),
        (DOWN, {"outputs": 0}, INVALID, "outputs: found 0, expected 1 to"),
        (DOWN, {"outputs": 100}, INVALID, "outputs (w.stride_k): found 100, expected a multiple of 16"),
        (DOWN, {"inputs": 2**31 - 16}, INVALID, "x: found 102400 bytes, expected 343597381120 (rows * inputs elements"),
        (DOWN, {"tokens": 0, "experts": 2**31 - 1, "inputs": 2**31 - 16, "outputs": 2**31 - 16}, INVALID,
         "codes: found 2211840 bytes, expected 9223372036854775807"),
        (DOWN, {"format": 99}, INVALID, "grouped_int4_down: format: found 99, expected 0 to"),
        (DOWN, {"tile": 24}, NOT_EXPORTED, "tile: found 24, exported for sm_90: 16, 32, 64, 128"),
        (DOWN, {"format": number("format", "gptq4-g64")}, NOT_EXPORTED,
         "format: found gptq4-g64, exported for sm_90: gptq4-g128, packed4-g128-asym"),
        (DOWN, {"dtype": 1}, NOT_EXPORTED, "dtype: found fp16, exported for sm_90: bf16"),
        (FOLD, {"max_rank": 33}, INVALID, "lora_fold: the largest rank of one launch (use lora_shrink and lora_expand) "
         "(max_rank): found 33, expected at most 32"),
        (FOLD, {"table_experts": 10}, INVALID, "experts of the tables (table_experts): found 10, expected at most 9"),
        (SHRINK, {"row_end": 81}, INVALID, "the end of the window (row_end): found 81, expected at most 80"),
        (SHRINK, {"cap": 66}, INVALID, "window, with the rows of xa (row_end): found 70, expected at most 69"),
    ],
)  # fmt: skip
def test_wrong_arguments(host: Host, of: dict[str, object], changed: dict[str, int], status: int, message: str) -> None:
    wanted = dict(of)
    kernel = pick(str(wanted.pop("name")), **wanted)
    given = arguments(kernel, sizes_for(kernel, GIVEN))
    assert host.call(kernel.function, **given)[0] == OK
    found, error = host.call(kernel.function, **(given | changed))
    assert (found, error.status) == (status, status)
    assert message in error.text
    assert host.launched.count == 1


def test_nothing_to_do_launches_nothing(host: Host) -> None:
    """No rows; no experts."""
    down, combine = pick("grouped_int4_gather_down", format="gptq4-g128"), pick("combine", slots=2, columns=256)
    for kernel in (down, combine):
        sizes = sizes_for(kernel, GIVEN | {"tokens": 0, "experts": 0})
        assert host.call(kernel.function, **arguments(kernel, sizes))[0] == OK
    assert host.launched.count == 0


def test_malformed_metadata_is_refused(host: Host) -> None:
    """Copies of a kernel's row, each with one thing wrong: a status and a message, never a launch."""
    count = ctypes.c_int32()
    rows = host.library.fanfold_kernels(ctypes.byref(count))
    assert count.value == len(described())
    cases: dict[str, dict[str, object]] = {
        "found 3 warps, expected a power of two from 1 to 32": {"warps": 3},
        "found 0 warps": {"warps": 0},
        "found 64 warps": {"warps": 64},
        "found -1 bytes of shared memory": {"shared_bytes": -1},
        "found 2097152 bytes of shared memory": {"shared_bytes": 2**21},
        "no symbol": {"symbol": None},
        "no file": {"file": b""},
        "no function": {"function": None},
        "no parameters": {"parameter_count": 0},
        "no needs": {"needs": None},
        "found 65 parameters, expected at most 64": {"parameter_count": 65},
        "found 0 bytes of machine code": {"cubin_bytes": 0},
        "a kernel without an id": {"id": None},
    }
    error = Error()
    assert host.library.fanfold_check_kernel(ctypes.byref(rows[0]), ctypes.byref(error)) == OK
    for message, changed in cases.items():
        row = KernelRow.from_buffer_copy(rows[0])
        for name, value in changed.items():
            setattr(row, name, value)
        operands = (ctypes.c_char * 64)()
        for status in (
            host.library.fanfold_check_kernel(ctypes.byref(row), ctypes.byref(error)),
            host.library.fanfold_launch(host.context, ctypes.byref(row), operands, None, ctypes.byref(error)),
        ):
            assert status == BAD_METADATA, message
            assert message in error.text
    assert host.library.fanfold_check_kernel(None, ctypes.byref(error)) == BAD_METADATA
    row = KernelRow.from_buffer_copy(rows[0])
    kinds = (type(row.parameters.contents) * row.parameter_count).from_buffer_copy(
        (type(row.parameters.contents) * row.parameter_count).from_address(ctypes.addressof(row.parameters.contents))
    )
    kinds[1].kind = b"q"
    row.parameters = kinds
    assert host.library.fanfold_check_kernel(ctypes.byref(row), ctypes.byref(error)) == BAD_METADATA
    assert "parameter 1" in error.text
    assert host.launched.count == 0


def test_operands_that_a_kernel_does_not_find_are_refused(host: Host) -> None:
    rows = host.library.fanfold_kernels(ctypes.byref(ctypes.c_int32()))
    error, nothing = Error(), (ctypes.c_char * 64)()
    status = host.library.fanfold_launch(host.context, ctypes.byref(rows[0]), nothing, None, ctypes.byref(error))
    assert status == BAD_METADATA
    assert "names a value or buffer that the launch has not" in error.text


def test_files_and_drivers_that_fail(host: Host, folder: Path, tmp_path: Path) -> None:
    """Missing and short machine code, a driver that refuses it, no context, another GPU."""
    library, error = host.library, Error()
    kernel = pick("combine", slots=2, columns=256)
    given = arguments(kernel, sizes_for(kernel, GIVEN))

    def fresh(where: Path) -> tuple[int, Host]:
        context = ctypes.c_void_p()
        status = library.fanfold_open(str(where).encode(), ctypes.byref(context), ctypes.byref(error))
        return status, Host(library, host.driver, context)

    _, empty = fresh(tmp_path)
    status, found = empty.call(kernel.function, **given)
    assert (status, "No such file" in found.text) == (FILE, True)
    short = tmp_path / "kernels" / "sm_90" / f"{kernel.id}.cubin"
    short.parent.mkdir(parents=True)
    code = CUBIN % kernel.id.encode()
    short.write_bytes(code[:-1])
    assert empty.call(kernel.function, **given)[0] == FILE
    short.write_bytes(b"none" + code[4:])
    assert empty.call(kernel.function, **given)[0] == FILE
    short.write_bytes(code)
    refuse = ctypes.c_int.in_dll(host.driver, "refuse")
    refuse.value = 1
    status, found = empty.call(kernel.function, **given)
    refuse.value = 0
    assert status == DRIVER
    assert "cuModuleLoadData returned 200 (CUDA_ERROR_INVALID_IMAGE)" in found.text
    assert empty.call(kernel.function, **given)[0] == OK
    library.fanfold_close(empty.context)

    for name, value, expected, message in (
        ("has_context", 0, NO_DRIVER, "no CUDA context is current"),
        ("major_version", 7, NOT_EXPORTED, "this GPU is sm_70; exported for sm_80, sm_90"),
    ):
        state = ctypes.c_int.in_dll(host.driver, name)
        before, state.value = state.value, value
        status, _ = fresh(folder)
        state.value = before
        assert (status, message in error.text) == (expected, True), error.text
    assert library.fanfold_open(None, ctypes.byref(ctypes.c_void_p()), ctypes.byref(error)) == INVALID
    assert host.launched.count == 1


def test_arguments_are_checked_where_there_is_no_gpu(host: Host, folder: Path) -> None:
    """What is wrong comes before what is not here."""
    context, error = ctypes.c_void_p(), Error()
    opened = host.library.fanfold_open_without_gpu
    assert opened(str(folder).encode(), 90, ctypes.byref(context), ctypes.byref(error)) == OK
    without = Host(host.library, host.driver, context)
    kernel = pick("combine", slots=2, columns=256)
    given = arguments(kernel, sizes_for(kernel, GIVEN))
    status, found = without.call(kernel.function, **(given | {"outputs": 100}))
    assert (status, "expected a multiple of 16" in found.text) == (INVALID, True)
    status, found = without.call(kernel.function, **given)
    assert (status, "opened without a GPU" in found.text) == (NO_DRIVER, True)
    assert without.call(kernel.function, **(given | {"tokens": 0}))[0] == OK
    host.library.fanfold_close(context)
    assert opened(str(folder).encode(), 89, ctypes.byref(context), ctypes.byref(error)) == NOT_EXPORTED
    assert opened(str(folder).encode(), 0, ctypes.byref(context), ctypes.byref(error)) == INVALID
    assert host.launched.count == 0


def test_all_kernels_of_the_gpu_are_loaded_once(host: Host) -> None:
    loaded = ctypes.c_int.in_dll(host.driver, "loaded_modules")
    assert host.library.fanfold_load_all(host.context, None) == OK
    assert host.library.fanfold_load_all(host.context, None) == OK
    assert loaded.value == sum(made.kernel.arch == "sm_90" for made in described())
    assert ctypes.c_int.in_dll(host.driver, "loaded_functions").value >= loaded.value


def test_the_header_compiles_alone_as_c_and_cpp(folder: Path) -> None:
    for compiler, standard, suffix in (("gcc", "c99", "c"), ("g++", "c++17", "cc")):
        alone = folder / f"alone.{suffix}"
        alone.write_text(f'#include "{HEADER}"\n#include "{HEADER}"\n')
        run(compiler, f"-std={standard}", *STRICT, "-c", alone, "-o", folder / "alone.o")


def test_numbers_of_words_stay_what_they_are(folder: Path) -> None:
    """A host that was compiled with an older header says the same."""
    text = (folder / HEADER).read_text()
    formats = [
        *("gptq4-g128", "gptq4-g64", "gptq4-g32", "gptq4-g128-asym-v1", "gptq4-g128-asym-v2", "gptq4-g32-asym-v1"),
        *("packed4-g128", "packed4-g32", "packed4-g128-asym", "awq4-g128-asym"),
        *("gptq8-g128", "gptq8-channel", "packed8-g128", "packed8-channel"),
        *("nvfp4", "nvfp4-divisor", "mxfp4", "fp8-tensor", "fp8-channel", "fp8-block128x128", "bf16", "fp16", "fp32"),
    ]
    for choice, words in {
        "dtype": ["bf16", "fp16", "fp32"],
        "projection": ["gate_up", "down"],
        "activation": ["none", "silu", "gelu_tanh", "clamped_swiglu", "relu2"],
        "format": formats,
    }.items():
        for i, word in enumerate(words):
            assert re.search(rf"\b{constant(choice, word)} = {i}\b", text), (choice, word)
