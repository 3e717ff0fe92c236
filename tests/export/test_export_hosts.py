"""The hosts of examples/: what they launch, and on a GPU their results against fanfold's own, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from export_cases import NEEDS_GCC, as_compiled, build, build_driver, run, write_export
from torch import Tensor

from fanfold import Experts
from fanfold.export.export import export
from fanfold.export.plan import plan
from fanfold.lora.convert import convert
from fanfold.spec import Activation
from samples import on

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "c_host"))
import make_layer  # noqa: E402

OPS = ["plan_sort", "grouped_int4", "lora_order", "lora_fold", "combine"]
INT4 = "grouped_int4_{}-bf16-gptq4-g128"
LAUNCHES = {
    1: [
        INT4.format("gather_gate_up") + "-silu-aside1-sm_90 16 1 1",
        "lora_fold-bf16-gate_up-silu-source0-tile8-block_r16-one_tile1-sm_90 4 1 1",
        INT4.format("gather_down") + "-sm_90 32 1 1",
        "lora_fold-bf16-down-none-source0-tile8-block_r16-one_tile1-sm_90 8 1 1",
        "combine-bf16-slots4-columns256-sm_90 1 2 1",
    ],
    40: [
        "plan_sort-tile32-block256-sm_90 9 1 1",
        INT4.format("gate_up") + "-silu-aside1-tile32-sm_90 52 1 1",
        "lora_fold-bf16-gate_up-silu-source1-tile8-block_r16-one_tile1-sm_90 160 1 1",
        INT4.format("down") + "-tile32-sm_90 52 1 1",
        "lora_fold-bf16-down-none-source1-tile8-block_r16-one_tile1-sm_90 320 1 1",
        "combine-bf16-slots4-columns256-sm_90 40 2 1",
    ],
    200: [
        "plan_sort-tile128-block1024-sm_90 9 1 1",
        INT4.format("gate_up") + "-silu-aside1-tile128-sm_90 56 1 1",
        "lora_order-tile16-chunk256-bins32-sm_90 9 1 1",
        "lora_fold-bf16-gate_up-silu-source2-tile16-block_r16-one_tile1-sm_90 164 1 1",
        INT4.format("down") + "-tile128-sm_90 56 1 1",
        "lora_fold-bf16-down-none-source2-tile16-block_r16-one_tile1-sm_90 328 1 1",
        "combine-bf16-slots4-columns1024-sm_90 200 1 1",
    ],
}
"""Tokens -> the launches of one layer, with their grids: a token without a plan, few rows, many rows."""


def compiler_of_rust() -> str | None:
    found = shutil.which("rustc")
    return found if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0 else None


def c_host(exported: Path) -> list[str]:
    """Builds the host in C; its command."""
    main = EXAMPLES / "c_host" / "main.c"
    command = ["gcc", "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{exported}"]
    binary = exported / "c_host"
    if not binary.exists():
        run(*command, str(main), str(exported / "fanfold_kernels.c"), "-o", str(binary), "-ldl")
    return [str(binary), str(exported)]


def rust_host(exported: Path) -> list[str]:
    """The host in Rust: built where rustc is, else FANFOLD_RUST_HOST names one that was built before; its command."""
    library, binary = build(exported), os.environ.get("FANFOLD_RUST_HOST")
    if binary is None:
        rustc = compiler_of_rust()
        if rustc is None:
            pytest.skip("rustc is not here, and FANFOLD_RUST_HOST names no binary")
        binary = str(exported / "rust_host")
        source = EXAMPLES / "rust_host" / "main.rs"
        if not Path(binary).exists():
            run(rustc, "--edition=2021", "-D", "warnings", "-O", str(source), "-o", binary)
    return [binary, str(exported), str(library)]


HOSTS = {"c": c_host, "rust": rust_host}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose kernels only a driver that runs nothing takes."""
    folder = tmp_path_factory.mktemp("described")
    write_export(folder, [as_compiled(kernel) for kernel in plan([90], OPS, formats=["gptq4-g128"])])
    build_driver(folder)
    return folder


@NEEDS_GCC
@pytest.mark.parametrize("language", HOSTS)
def test_hosts_launch_what_a_layer_launches(language: str, described: Path, tmp_path: Path) -> None:
    command = HOSTS[language](described)
    for tokens, launches in LAUNCHES.items():
        layer, log = tmp_path / f"layer{tokens}", tmp_path / f"launches{tokens}"
        make_layer.write_layer(layer, tokens)
        environment = os.environ | {"LD_LIBRARY_PATH": str(described), "FAKE_CUDA_LOG": str(log)}
        done = subprocess.run([*command, str(layer)], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == f"3 batches of {tokens} tokens\n"
        assert log.read_text().splitlines() == launches
        assert (layer / "out2.bin").stat().st_size == tokens * make_layer.HIDDEN * 2


@NEEDS_GCC
@pytest.mark.parametrize("language", HOSTS)
def test_hosts_report_what_is_wrong(language: str, described: Path, tmp_path: Path) -> None:
    command = HOSTS[language](described)
    make_layer.write_layer(tmp_path / "layer", 40)
    environment = os.environ | {"LD_LIBRARY_PATH": str(described)}
    hidden = tmp_path / "layer" / "hidden1.bin"
    hidden.write_bytes(hidden.read_bytes()[:-2])
    done = subprocess.run([*command, str(tmp_path / "layer")], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "hidden1.bin: expected 40960 bytes" in done.stderr
    sizes = tmp_path / "layer" / "sizes.txt"
    sizes.write_text(sizes.read_text().replace("max_rank 16", "max_rank 48"))
    done = subprocess.run([*command, str(tmp_path / "layer")], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "INVALID_ARGUMENT: lora_fold: the largest rank of one launch" in done.stderr


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels that the hosts launch, and others of their configs."""
    major, minor = torch.cuda.get_device_capability()
    arch, formats = f"sm_{major}{minor}", ["gptq4-g128"]
    wanted = {line.split("sm_90")[0] + arch for launches in LAUNCHES.values() for line in launches}
    configs = {kernel.config for kernel in plan([arch], OPS, formats=formats) if kernel.id in wanted}
    folder = tmp_path_factory.mktemp("hosts") / "kernels"
    export(folder, [arch], OPS, formats=formats, configs=sorted(configs))
    return folder


def own_results(weights: Any, pairs: make_layer.Pairs, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Of fanfold's layer with the same kernels."""
    experts = Experts(on(weights, "cuda"), Activation("silu"), dtype=torch.bfloat16, implementation="grouped")
    experts.reserve(make_layer.SLOTS, make_layer.MAX_RANK)
    stored = {slot: convert(of_slot, experts) for slot, of_slot in pairs.items()}  # tables hold addresses
    for slot, of_slot in stored.items():
        experts.put(slot, cast(Any, of_slot))
    names = ("hidden", "topk_ids", "topk_weights", "adapter_ids")
    return [experts(*(batch[name].cuda() for name in names)).cpu() for batch in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", LAUNCHES)
@pytest.mark.parametrize("language", HOSTS)
def test_a_host_gives_the_bits_of_fanfold(language: str, tokens: int, exported: Path, tmp_path: Path) -> None:
    """A whole layer with LoRA in a CUDA graph, replayed for three routings."""
    weights, pairs, batches = make_layer.write_layer(tmp_path, tokens)
    command = HOSTS[language](exported)
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = own_results(weights, pairs, batches)
    assert not torch.equal(wanted[0], wanted[1])
    for i, result in enumerate(wanted):
        found = torch.frombuffer(bytearray((tmp_path / f"out{i}.bin").read_bytes()), dtype=torch.int16)
        assert not found.view(torch.bfloat16).isnan().any()
        assert torch.equal(found.view(tokens, -1), result.view(torch.int16)), f"batch {i}"
