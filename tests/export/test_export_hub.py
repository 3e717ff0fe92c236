"""A hub export: the kernels package accepts it, and its module launches what the manifest says."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from export_cases import described, evaluated, is_for, sizes_for
from typer.testing import CliRunner

from fanfold.cli.app import app
from fanfold.export.compile import Compiled
from fanfold.export.description import BYTES
from fanfold.export.formulas import evaluate
from fanfold.export.hub import VARIANT, write_hub
from fanfold.export.manifest import manifest
from fanfold.export.words import WORDS
from fanfold.spec.activation import Activation

GIVEN = {"tokens": 40, "top_k": 2, "experts": 9, "outputs": 768, "inputs": 640, "adapter_slots": 4, "table_experts": 9}
GIVEN |= {"max_rank": 16, "row_offset": 0, "row_end": 80, "cap": 80, "rows": 33}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of kernels that are not compiled."""
    folder = tmp_path_factory.mktemp("hub")
    compiled = [Compiled(**{**vars(made), "ptx": "ptx"}) for made in described()]
    write_hub(folder, compiled, manifest(compiled))
    return folder


@pytest.fixture(scope="module")
def module(repository: Path) -> ModuleType:
    """The exported module, as it lies there."""
    spec = importlib.util.spec_from_file_location("exported_kernels", repository / "build" / VARIANT / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_kernels_package_reads_the_metadata_and_agrees_with_the_digest(repository: Path) -> None:
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    variant = repository / "build" / VARIANT
    found = Metadata.read_from_file(variant / "metadata.json")
    assert str(found.name) == "fanfold-kernels"
    assert found.name.python_name == "fanfold_kernels"
    assert (found.version, found.license, found.python_depends) == (0, "Apache-2.0", [])
    assert found.backend.archs == ["8.0", "9.0"]
    assert found.digest is not None
    found.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    extra = variant / "extra.txt"
    extra.write_text("x")
    with pytest.raises(DigestValidationError):
        found.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    extra.unlink()


def test_the_kernels_package_loads_it(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with CUDA; also by the folder that older versions look into."""
    from kernels.variants import get_variants_local, resolve_variant

    from kernels import get_loaded_kernels, get_local_kernel

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    chosen, _ = resolve_variant(get_variants_local(repository / "build"))
    assert chosen is not None
    assert chosen.variant_str == VARIANT
    found = get_local_kernel(repository)
    assert found.functions() == list(dict.fromkeys(made.kernel.function.name for made in described()))
    assert [loaded.metadata.id for loaded in get_loaded_kernels()] == [found.__name__]
    old = repository / "build" / VARIANT / "fanfold_kernels" / "__init__.py"
    spec = importlib.util.spec_from_file_location("old_kernels", old)
    assert spec is not None
    assert spec.loader is not None
    compatible = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compatible)
    assert compatible.functions() == found.functions()
    assert compatible.KernelError is not None


def test_the_module_needs_torch_alone(repository: Path) -> None:
    for path in (repository / "build" / VARIANT).rglob("*.py"):
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
        assert imported - set(sys.stdlib_module_names) <= {"torch"}


def arguments_of(made: Compiled, sizes: dict[str, int]) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Arguments of a call, and buffers of exactly the bytes that are needed."""
    kernel = made.kernel
    given: dict[str, Any] = {size.name: sizes[size.name] for size in kernel.function.sizes}
    given |= {c.name: kernel.choices[c.name] for c in kernel.function.choices if c.formula is None}
    given |= {name: 0.5 for name, _ in kernel.function.numbers}
    extents = {
        name: (4096 * (i + 1), evaluate(need.elements, sizes) * BYTES[need.type])
        for i, (name, need) in enumerate(kernel.needs.items())
    }
    return given, extents


def test_the_module_plans_what_the_formulas_say(module: ModuleType) -> None:
    seen: set[str] = set()
    for made in described():
        kernel = made.kernel
        sizes = sizes_for(kernel, GIVEN)
        if kernel.arch != "sm_90" or not is_for(kernel, sizes):
            continue
        seen.add(kernel.function.name)
        given, extents = arguments_of(made, sizes)
        launch = module.plan(kernel.function.name, "sm_90", given, extents)
        assert launch["kernel"]["id"] == kernel.id
        assert launch["grid"] == [evaluate(formula, sizes) for formula in kernel.grid]
        values = evaluated(made, sizes)
        for parameter, value in zip(made.parameters, launch["arguments"], strict=False):
            formula = kernel.values[parameter.name].formula
            if parameter.type.startswith("*"):
                assert value.value == extents[formula][0]
            elif parameter.name in values:
                assert value.value == values[parameter.name], (kernel.id, parameter.name)
        assert [value.value for value in launch["arguments"][len(made.parameters) :]] == [0, 0]
    assert seen == {made.kernel.function.name for made in described()}


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("combine", {"tokens": -1}, "combine: tokens: found -1, expected 0 to 2147483647"),
        ("combine", {"outputs": 100}, "outputs: found 100, expected a multiple of 16"),
        ("combine", {"dtype": "fp16"}, "dtype: found fp16, exported: bf16"),
        ("combine", {"top_k": 3}, "slots: found 3, exported: 1, 2, 4, 6, 8, 10"),
        ("combine", {"outputs": 784}, "y2: found 122880 bytes at 4096, expected 125440 bytes at a multiple of 16"),
        ("lora_fold", {"max_rank": 33}, "the largest rank of one launch .*: found 33, expected at most 32"),
        ("lora_fold", {"tile": None}, "tile: found nothing, expected rows of an item"),
    ],
)
def test_wrong_calls(module: ModuleType, name: str, changed: dict[str, Any], message: str) -> None:
    made = next(
        m for m in described()
        if m.kernel.function.name == name and m.kernel.arch == "sm_90" and is_for(m.kernel, sizes_for(m.kernel, GIVEN))
    )  # fmt: skip
    given, extents = arguments_of(made, sizes_for(made.kernel, GIVEN))
    module.plan(name, "sm_90", given, extents)
    given = {key: value for key, value in (given | changed).items() if value is not None}
    with pytest.raises(module.KernelError, match=message):
        module.plan(name, "sm_90", given, extents)


def test_gpus_and_functions_that_are_not_there(module: ModuleType) -> None:
    with pytest.raises(module.KernelError, match="found sm_100, exported for sm_80, sm_90"):
        module.plan("combine", "sm_100", {**GIVEN, "dtype": "bf16"}, {})
    with pytest.raises(module.KernelError, match="function: found combined, expected one of plan_sort"):
        module.call("combined")
    with pytest.raises(module.KernelError, match=r"y2: found cpu, strides .*, expected a contiguous tensor on one GPU"):
        module.call("combine", y2=torch.zeros(4, 16))
    with pytest.raises(module.KernelError, match=r"combine: found \['colour'\], expected arguments of its description"):
        module.call("combine", colour=3)


def test_words_of_the_manifest_are_those_of_c(module: ModuleType) -> None:
    choices = {choice["name"]: choice for choice in module.describe("lora_fold")["choices"]}
    assert choices["dtype"]["words"] == list(WORDS["dtype"])
    assert choices["projection"]["words"] == ["gate_up", "down"]


def test_one_of_both_folders_is_asked_for(tmp_path: Path) -> None:
    command = ["export", "--arch", "90", "--op", "combine"]
    neither = CliRunner().invoke(app, command)
    both = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "a"), "--hub", str(tmp_path / "b")])
    assert (neither.exit_code, both.exit_code) == (2, 2)
    assert "neither" in neither.output
    assert "both" in both.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_the_module_gives_the_bits_of_fanfold(tmp_path: Path) -> None:
    """The activation and the weighted sum, on tensors of the GPU, also in a CUDA graph."""
    from fanfold.export.export import export
    from fanfold.kernels.activation.activate import activate
    from fanfold.kernels.combine.combine import combine

    major, minor = torch.cuda.get_device_capability()
    export(tmp_path / "hub", [10 * major + minor], ["activate", "combine"], hub=True)
    spec = importlib.util.spec_from_file_location("gpu_kernels", tmp_path / "hub" / "build" / VARIANT / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)

    y1 = torch.randn(33, 1536, device="cuda", dtype=torch.bfloat16)
    h = torch.full((33, 768), torch.nan, device="cuda", dtype=torch.bfloat16)
    given = {"rows": 33, "outputs": 768, "dtype": "bf16", "activation": "silu", "alpha": 0.0, "limit": 0.0}
    exported.call("activate", y1=y1, h=h, **given)
    assert torch.equal(h, activate(y1, Activation("silu")))

    ids = torch.randint(-1, 10, (40, 4), dtype=torch.int32, device="cuda")
    y2, weights = torch.randn(160, 768, device="cuda").bfloat16(), torch.rand(40, 4, device="cuda")
    out = torch.full((40, 768), torch.nan, device="cuda", dtype=torch.bfloat16)
    sizes = {"tokens": 40, "top_k": 4, "experts": 9, "outputs": 768, "dtype": "bf16"}
    tensors = {"y2": y2, "topk_ids": ids, "topk_weights": weights, "out": out}
    exported.call("combine", **sizes, **tensors)
    assert torch.equal(out, combine(y2, ids, weights, 9))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exported.call("combine", **sizes, **tensors)
    y2.normal_()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, combine(y2, ids, weights, 9))
