"""The plan of an export: every kernel is described, and is the one that the library launches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import FORMATS, is_for

from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.export.compile import check_described, check_fits, check_operands
from fanfold.export.description import Kernel
from fanfold.export.formulas import evaluate
from fanfold.export.functions import grouped, lora_kernels, routing, weights
from fanfold.export.machine_code import Operands
from fanfold.export.plan import ARCHS, OPS, plan
from fanfold.export.source import Source, compiling_for, source_of
from fanfold.export.words import number
from fanfold.kernels.grouped.configs import config_for
from fanfold.kernels.lora.config import parts_for
from fanfold.routing.plan import ONE_LAUNCH_ROWS, plan_block, plan_chunk
from fanfold.spec.activation import Activation
from fanfold.spec.weight_format import WeightFormat


def test_every_kernel_is_described() -> None:
    """Every argument has a value, every buffer its type; ids are unlike. All ops and formats on one arch."""
    kernels = plan([90], OPS, ("bf16", "fp32"))
    assert len({kernel.id for kernel in kernels}) == len(kernels) > 900
    for kernel in kernels:
        check_described(kernel, source_of(kernel.kernel, kernel.example, kernel.arch))


def test_the_page_counts_them() -> None:
    page = (Path(__file__).parents[2] / "docs/commands/export.md").read_text()
    kernels = plan([90], OPS)
    ops = [kernel.function.op for kernel in kernels]
    products = sum(op.startswith("grouped") for op in ops)
    formats = {kernel.choices["format"] for kernel in kernels if "format" in kernel.choices}
    assert f"{len(ops)} kernels an arch" in page
    assert f"{products} are products: {len(formats)} formats, each with {products // len(formats)} kernels" in page
    plans = ops.count("plan_sort") + ops.count("plan_sort_many")
    assert f"plans ({plans} kernels) and the order of rows ({ops.count('lora_order')})" in page


def test_every_arch_has_the_same_kernels() -> None:
    found = {arch: {k.id.removesuffix(arch) for k in plan([arch], OPS)} for arch in ARCHS}
    assert all(ids == found["sm_90"] for ids in found.values())


def test_products_have_every_config_that_a_layer_takes() -> None:
    """By the tile that the rows say, for gate_up with the activation and down."""
    for name, arch, fused in ((n, a, f) for n in FORMATS for a in (80, 90) for f in (True, False)):
        fmt = WeightFormat.parse(name)
        op = next(op for op, names in weights.FORMATS.items() if name in names)
        kernels = [
            k for k in plan([arch], [op], formats=[name])
            if k.function.name == f"{op}_{'gate_up' if fused else 'down'}" and k.choices.get("activation") != "none"
        ]  # fmt: skip
        for rows in (1, 100, 1000, 2000, 4000, 100000):
            config = config_for(fmt, 2048, torch.bfloat16, arch, rows, 64, fused)
            found = [k for k in kernels if k.choices["tile"] == config.block_t]
            assert {k.config for k in found} == {config.name}
            mean = rows / 64 if rows > 64 else 1
            for kernel in found:
                assert kernel.rows is not None
                assert kernel.rows.above < mean
                assert kernel.rows.up_to is None or mean <= kernel.rows.up_to


ACTIVATION = {"alpha": 1.702, "limit": 7.0}


def members(example: Mapping[str, Any], name: str) -> Any:
    """An argument of a launch by the name of a parameter."""
    outer, _, inner = name.partition(".")
    return getattr(example[outer], inner) if inner else example[outer]


def resized(monkeypatch: pytest.MonkeyPatch, seed: int) -> dict[str, int]:
    """Other sizes in the launches that are compiled; the sizes, as formulas name them."""
    chance = random.Random(seed)
    sizes = {"tokens": chance.randrange(3, 50), "top_k": chance.randrange(2, 9), "experts": chance.randrange(3, 70)}
    sizes |= {"outputs": 128 * chance.randrange(3, 9), "inputs": 1280, "adapter_slots": chance.randrange(3, 20)}
    for module in (grouped, lora_kernels):
        for name, size in {"TOKENS": "tokens", "TOP_K": "top_k", "N": "outputs", "SLOTS": "adapter_slots"}.items():
            monkeypatch.setattr(module, name, sizes[size])
    for module in (grouped, weights, lora_kernels, routing):
        monkeypatch.setattr(module, "EXPERTS", sizes["experts"])
    monkeypatch.setattr(weights, "N", sizes["outputs"])
    monkeypatch.setattr(lora_kernels, "K", sizes["inputs"])
    monkeypatch.setattr(weights, "inputs_of", lambda fmt: sizes["inputs"])
    monkeypatch.setattr(grouped, "inputs_of", lambda fmt: sizes["inputs"])
    return sizes


def test_values_are_those_that_the_library_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products and folds: every number and every tensor's size, from the launches of the library itself."""
    given = resized(monkeypatch, 0)
    ops = [op for op in OPS if op.startswith("grouped")]
    seen = 0
    for kernel in plan([90], [*ops, "lora_fold", "lora_shrink", "lora_expand"]):
        sizes = given | {"arch": 90, "element_bytes": 2, "table_experts": given["experts"]}
        sizes |= {f"has_{buffer.name}": int(buffer.name in kernel.needs) for buffer in kernel.function.buffers}
        sizes |= {name: number(name, value) for name, value in kernel.choices.items()}
        if kernel.function.op.startswith("lora"):
            rank = int(kernel.choices["block_r"])
            sizes |= {"max_rank": rank, "row_offset": 0, "row_end": given["tokens"] * given["top_k"]}
            sizes |= {"cap": sizes["row_end"]}
        sizes = kernel.function.sizes_of(sizes)
        for parameter in source_of(kernel.kernel, kernel.example, kernel.arch).parameters:
            found, formula = members(kernel.example, parameter.name), kernel.values[parameter.name].formula
            if isinstance(found, torch.Tensor):
                need = kernel.needs[formula]
                shape = [evaluate(axis, sizes) for axis in need.shape]
                if formula not in ("items", "xa"):  # as many as the batch has; as wide as any table
                    bytes_ = found.numel() * found.element_size()
                    assert bytes_ == torch.Size(shape).numel() * {"u8": 1, "bf16": 2, "fp16": 2, "u64": 8}.get(
                        need.type, 4
                    )
            elif formula in dict(kernel.function.numbers):
                assert found == (0.0 if kernel.choices["activation"] == "none" else ACTIVATION[formula])
            elif parameter.name not in ("parts", "tiles", "stride_xa", "stride_half"):
                assert found == evaluate(formula, sizes), (kernel.id, parameter)
            seen += 1
    assert seen > 5000


def test_choices_by_formula_are_the_librarys() -> None:
    """Tiles of the fold, ids read at once, chunks: as constants of the kernels and as formulas."""
    chance = random.Random(4)
    for arch in (80, 90):
        for kernel in plan([arch], ["lora_fold"], ("bf16", "fp32")):
            items, columns = chance.randrange(1, 3000), 64 * chance.randrange(1, 200)
            block_n = kernel.example["BLOCK_N"]
            known = {"arch": arch, "element_bytes": 4 if kernel.choices["dtype"] == "fp32" else 2, "outputs": columns}
            known |= {"tile": kernel.choices["tile"], "block_r": kernel.choices["block_r"], "item_count": items}
            formulas = dict(kernel.function.derived)
            known["column_tiles"] = evaluate(formulas["column_tiles"], known)
            assert known["column_tiles"] == -(-columns // block_n), kernel.id
            assert evaluate(formulas["parts"], known) == parts_for(items, known["column_tiles"])
    for rows in (1, 100, 129, 3000, ONE_LAUNCH_ROWS, 20000, 2**20):
        sizes = routing.SORT.sizes_of({"tokens": rows, "top_k": 1, "experts": 8, "tile": 16})
        assert sizes["block"] == plan_block(rows) or rows > ONE_LAUNCH_ROWS
        sizes = routing.COUNT.sizes_of({"tokens": rows, "top_k": 1, "experts": 8})
        assert sizes["chunk"] == plan_chunk(rows)


def test_the_order_of_rows_has_the_librarys_chunks() -> None:
    from fanfold.kernels.lora.plan import empty_work, order_arguments
    from fanfold.spec.route import Route

    def none(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device="meta")

    chance = random.Random(5)
    kernels = plan([90], ["lora_order"])
    for _ in range(100):
        tokens, top_k, experts = chance.randrange(1, 3000), chance.randrange(1, 9), chance.randrange(1, 300)
        slots, tile, rows = chance.randrange(1, 127), chance.choice([8, 16]), tokens * top_k
        route = Route(none(experts + 1), none(rows), none(rows), top_k)
        wanted = order_arguments(route, none(tokens), empty_work(route, slots, tile), -1, none(1), False)
        given = {"tokens": tokens, "top_k": top_k, "experts": experts, "adapter_slots": slots, "tile": tile}
        sizes = kernels[0].function.sizes_of(given)
        (kernel,) = [kernel for kernel in kernels if is_for(kernel, sizes)]
        constants = ("TILE", "CHUNK", "BLOCK_S", "num_warps", "CHAINED")
        assert [kernel.example[name] for name in constants] == [wanted[name] for name in constants]
        for name in ("R", "E", "total_items", "slots", "top_k", "programs"):
            assert evaluate(kernel.values[name].formula, sizes) == wanted[name], name


def launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of the library that launch what the exported kernel of that id is, on tensors without values."""
    from fanfold.kernels.activation.activate import activate
    from fanfold.kernels.combine.combine import combine
    from fanfold.routing.plan import plan_sort

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ids, real = empty(33, 6, dtype=torch.int32), empty(33, 6, dtype=torch.float32)
    yield "combine-bf16-slots6-columns256-sm_90", lambda: combine(empty(198, 640), ids, real, 101)
    for kind in ("silu", "relu2"):
        y1 = empty(3, 640 if kind == "relu2" else 1280)
        yield f"activate-bf16-{kind}-sm_90", lambda y1=y1, kind=kind: activate(y1, Activation(kind))
    yield "plan_sort-tile64-block256-sm_90", lambda: plan_sort(ids, 101, 64)
    many = empty(33333, 1, dtype=torch.int32)
    yield "plan_count-bins128-chunk512-sm_90", lambda: plan_sort(many, 101, 32)
    yield "plan_place-tile32-bins128-chunk512-sm_90", lambda: plan_sort(many, 101, 32)


def test_the_library_launches_this_code() -> None:
    """The same source, types, constants, alignments and options."""
    from fanfold.routing.plan_kernels import count_kernel, place_kernel

    kernels = {kernel.id: kernel for kernel in plan([90], ["combine", "activate", "plan_sort", "plan_sort_many"])}
    for name, call in launches():
        kernel, launched = kernels[name], dict[str, Source]()

        def keep(source: Any, target: Any, options: dict[str, Any], launched: dict[str, Source] = launched) -> None:
            launched[source.name] = Source(source, target, options, (), {})

        with ExitStack() as stack:
            for launching in {kernel.kernel, count_kernel, place_kernel}:
                stack.enter_context(compiling_for(launching, "sm_90", keep))
            call()
        exported = source_of(kernel.kernel, kernel.example, kernel.arch)
        found = launched[exported.source.name]
        assert found.source.hash() == exported.source.hash(), name
        assert found.options == exported.options, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([87], ["combine"]), "arch: found 87; expected one of 80, 86, 89, 90, 100, 120; nearest: 86"),
        ((["sm_103"], ["combine"]), "arch: found sm_103; .*nearest: 100"),
        ((["hopper"], ["combine"]), "arch: found hopper; expected one of 80, 86, 89, 90, 100, 120[.]"),
        (([90], ["grouped_int5"]), "op: found grouped_int5; .*nearest: grouped_int4"),
        (([90], ["lora_shink"]), "op: found lora_shink; .*nearest: lora_shrink"),
        (([90], ["combine"], ["fp8"]), "dtype: found fp8; expected one of bf16, fp16, fp32; nearest: fp16"),
        (([90], ["grouped_int4"], ["bf16"], ["gptq4-g129"]), "format: found gptq4-g129; .*nearest: gptq4-g128"),
        (([90], ["grouped_int4"], ["bf16"], ["nvfp4"]), "format: found nvfp4"),
        (([90], ["combine"], ["bf16"], ["nvfp4"]), "format: found nvfp4; expected no format: these ops have none"),
        (([90], ["combine"], ["bf16"], [], ["k8-b300"]), "config: found k8-b300; .*nearest: k8-b256"),
        (([90], ["grouped_int4"], ["bf16"], ["gptq4-g128"], ["n64-k128-t16-w4-s4-sum"]),
         "config: found n64-k128-t16-w4-s4-sum; .*nearest: n64-k128-t16-w4-s3-sum"),
    ],
)  # fmt: skip
def test_what_is_not_exported_is_refused_with_the_nearest(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(*arguments)


def test_named_configs_alone() -> None:
    found = plan(["90"], ["combine"], configs=["k8-b256", "k1-b256"])
    assert [kernel.id for kernel in found] == [f"combine-bf16-slots{k}-columns256-sm_90" for k in (1, 8)]


def some_kernel() -> Kernel:
    return plan([86], ["combine"])[0]


def test_a_kernel_that_does_not_fit_is_refused_with_where_it_would() -> None:
    check_fits(some_kernel(), 99 * 1024)
    with pytest.raises(UnsupportedError, match="at most 101376 on sm_86; it fits on sm_80, sm_90, sm_100"):
        check_fits(some_kernel(), 160 * 1024)
    with pytest.raises(
        UnsupportedError, match="found 400000 bytes of shared memory a program; expected at most 101376 on"
    ):
        check_fits(some_kernel(), 400000)


def test_an_operand_that_is_overwritten_is_refused() -> None:
    check_operands(some_kernel(), Operands(4, ()))
    with pytest.raises(UnsupportedError, match="overwritten in flight: LDG R4"):
        check_operands(some_kernel(), Operands(4, ("LDG R4",)))
