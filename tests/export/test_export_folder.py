"""Whole exports: files, manifest and schema; the same bytes from empty caches; the machine code of launches."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import triton
from export_cases import described
from typer.testing import CliRunner

import fanfold
from fanfold.cli.app import app
from fanfold.errors import CorruptFileError
from fanfold.export.compile import Compiled
from fanfold.export.formulas import evaluate, names
from fanfold.export.machine_code import disassembly
from fanfold.export.manifest import manifest, read_manifest, schema_text
from fanfold.export.plan import OPS, plan
from fanfold.export.source import source_of

COMMAND = [
    *("export", "--arch", "90", "--op", "combine", "--op", "grouped_int4", "--dtype", "bf16"),
    *("--format", "gptq4-g128", "--config", "k8-b256", "--config", "n64-k64-t64-w8-s3-sum", "--json", "-o"),
]
"""Three kernels: a weighted sum, and gate_up with rows that are set aside and without."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two exports of the same kernels, made at once: by another process and by this one, with caches of their own."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(first / "cache"), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", "from fanfold.cli import main; main()", *COMMAND, "kernels"]
    with subprocess.Popen(command, cwd=first, env=environment, stdout=subprocess.PIPE, text=True) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(second / "cache"))
            here = CliRunner().invoke(app, [*COMMAND, str(second / "kernels")], catch_exceptions=False)
        there, _ = process.communicate(timeout=300)
    assert (here.exit_code, process.returncode) == (0, 0)
    assert json.loads(there)["kernels"] == json.loads(here.stdout)["kernels"] == {"combine": 1, "grouped_int4": 2}
    assert all(any((folder / "cache").rglob("*.cubin")) for folder in (first, second))
    return [first / "kernels", second / "kernels"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_two_exports_from_empty_caches_are_the_same_bytes(folders: list[Path]) -> None:
    first, second = map(files, folders)
    assert len(first) == 4 + 2 * 3
    assert first == second


def test_no_path_of_this_machine_is_in_an_export(folders: list[Path]) -> None:
    for name, content in files(folders[0]).items():
        for path in (Path(fanfold.__file__).parent, Path(triton.__file__).parent, folders[0], Path.home()):
            assert str(path).encode() not in content, name


def test_the_manifest_says_what_lies_beside_it(folders: list[Path]) -> None:
    content = files(folders[0])
    found = read_manifest(content["manifest.json"].decode(), "manifest.json")
    assert found["made_by"]["fanfold"] == fanfold.__version__
    assert found["made_by"]["triton"] == triton.__version__
    assert re.fullmatch(r"\d+\.\d+", found["made_by"]["ptxas"])
    for kernel in found["kernels"]:
        for kind in ("ptx", "cubin"):
            there = content[kernel[kind]["file"]]
            assert kernel[kind]["bytes"] == len(there)
            assert kernel[kind]["sha256"] == hashlib.sha256(there).hexdigest()
        ptx = content[kernel["ptx"]["file"]].decode()
        entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
        assert entry is not None
        assert entry[1] == kernel["symbol"]
        taken = [".u64" if argument["type"] == "pointer" else {"int32": ".u32", "float32": ".f32"}[argument["type"]]
                 for argument in kernel["arguments"]]  # fmt: skip
        assert re.findall(r"\.param (\.\w+)", entry[2]) == taken
        assert kernel["shared_bytes"] <= 227 * 1024
        assert kernel["spilled_bytes"] == 0
        assert kernel["register_operands"] == {"count": 0, "overwritten": [], "covered_by": None}


def test_the_manifest_of_a_product_in_full(folders: list[Path]) -> None:
    found = json.loads((folders[0] / "manifest.json").read_text())
    (kernel,) = [k for k in found["kernels"] if k["choices"].get("aside") == 0]
    assert kernel["id"] == "grouped_int4_gate_up-bf16-gptq4-g128-silu-aside0-tile64-sm_90"
    assert kernel["rows_per_expert"] == {"above": 24, "up_to": 40}
    assert kernel["grid"] == ["slots * ceil_div(outputs, 64)", "1", "1"]
    assert kernel["block"] == [256, 1, 1]
    assert {"formula": "outputs", "multiple_of": 16} in kernel["limits"]
    assert {"formula": "inputs", "multiple_of": 16} in kernel["limits"]
    assert kernel["constants"]["BLOCK_T"] == 64
    assert [b for b in kernel["buffers"] if b["name"] == "codes"] == [
        {"name": "codes", "dtype": "i32", "shape": ["experts", "2", "inputs // 8", "outputs"], "alignment": 16}
    ]
    assert [argument["name"] for argument in kernel["arguments"]][-2:] == ["global_scratch", "profile_scratch"]
    (function,) = [f for f in found["functions"] if f["name"] == "grouped_int4_gate_up"]
    sizes = {"tokens": 100, "top_k": 8, "experts": 30, "outputs": 768, "inputs": 2048, "tile": 64}
    for derived in function["derived"]:
        sizes[derived["name"]] = evaluate(derived["formula"], sizes)
    assert evaluate(kernel["grid"][0], sizes) == (800 // 64 + 30) * 12


def valid(found: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(json.loads(schema_text())).is_valid(found)


def test_manifests_of_all_functions_validate() -> None:
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    compiled = [Compiled(**{**vars(made), "ptx": "ptx"}) for made in described()[::9]]
    found = manifest(compiled)
    jsonschema.validate(found, schema)
    assert {function["op"] for function in found["functions"]} >= set(OPS) - {"grouped_int8", "grouped_fp8"}
    known = {function["name"]: function for function in found["functions"]}
    for kernel in found["kernels"]:
        function = known[kernel["function"]]
        sizes = {size["name"] for size in function["sizes"]} | {derived["name"] for derived in function["derived"]}
        sizes |= {choice["name"] for choice in function["choices"]} | {"arch", "element_bytes"}
        formulas = [*kernel["grid"], *(a["value"] for a in kernel["arguments"] if "value" in a)]
        formulas += [axis for buffer in kernel["buffers"] for axis in buffer["shape"]]
        assert {name for formula in formulas for name in names(formula)} <= sizes, kernel["id"]
        assert {b["name"] for b in kernel["buffers"]} <= {b["name"] for b in function["buffers"]}
        assert all(argument["meaning"] for argument in kernel["arguments"])


def test_the_schema_refuses_malformed_metadata(folders: list[Path]) -> None:
    found = json.loads((folders[0] / "manifest.json").read_text())
    assert valid(found)
    for change in (
        {"warps": 3}, {"warps": 64}, {"shared_bytes": -1}, {"shared_bytes": 300000}, {"symbol": ""}, {"arguments": []},
        {"registers": 256}, {"arch": "90"}, {"grid": ["1", "1"]}, {"block": [128, 2, 1]},
    ):  # fmt: skip
        changed = json.loads(json.dumps(found))
        changed["kernels"][0] |= change
        assert not valid(changed), change
    for missing in ("symbol", "warps", "shared_bytes", "arguments", "grid", "cubin"):
        changed = json.loads(json.dumps(found))
        del changed["kernels"][0][missing]
        assert not valid(changed), missing
    appended = json.loads(json.dumps(found))
    appended["kernels"][0]["arguments"].append(
        {"name": "more", "type": "pointer", "scratch_bytes": 8, "meaning": "of a later version", "new": 1}
    )
    assert valid(appended)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "no JSON"), ("[]", "format None"), ('{"format": "fanfold-kernels", "version": 2}', "version 2")],
)
def test_what_is_no_manifest(text: str, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        read_manifest(text, "manifest.json")


def instructions(cubin: bytes) -> list[str]:
    return re.findall(r"/\*[0-9a-f]{4,}\*/ +(.*?);", disassembly(cubin))


def test_exported_code_is_that_of_a_launch(folders: list[Path]) -> None:
    """Launches keep line numbers; the instructions are the same."""
    (kernel,) = plan([90], ["combine"], configs=["k8-b256"])
    source = source_of(kernel.kernel, kernel.example, kernel.arch)
    launched = triton.compile(source.source, target=source.target, options=source.options)
    exported = (folders[0] / "kernels" / "sm_90" / f"{kernel.id}.cubin").read_bytes()
    assert launched.asm["cubin"] != exported
    assert instructions(launched.asm["cubin"]) == instructions(exported)
    assert len(instructions(exported)) > 100


def test_a_folder_that_holds_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    done = CliRunner().invoke(app, ["export", "--arch", "90", "--op", "combine", "-o", str(tmp_path)])
    assert done.exit_code == 2
    assert "a folder that holds files" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
