"""torch.ops.fanfold.nvfp4_*: checks before anything runs, contracts, and what the entry points share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold import load_experts, ops, reference
from fanfold.errors import ArgumentError, DeviceMemoryError, InferenceOnlyError, UnavailableError
from fanfold.kernels.nvfp4 import reference as reference_kernels
from fanfold.ops.nvfp4 import ENTRIES
from graphs import check_replays, same_bits
from samples import numbers, relative_error, sample

E, T, N, K = 4, 6, 24, 48
OFFSETS = [1, 4, 4, 5, 8]
M = 9
IDS = torch.tensor([5, 0, 3, 2, 1, 4, 0, 5, 2], dtype=torch.int32)
GLOBAL = {"gate": [0.01, 2.0, 0.5, 30.0], "up": [0.04, 1.0, 5.0, 3.0], "down": [0.3, 1.0, 20.0, 0.002]}
INPUT = [0.002, 0.0, 0.001, float("nan")]
SEEDS = {"gate": 0, "up": 10, "down": 20}
EVERY = pytest.mark.parametrize("name", list(ENTRIES))


def matrices(projection: str) -> tuple[list[Tensor], list[Tensor]]:
    """Codes [N, K/2] and scales [N, K/16] of E experts."""
    packed = [reference.nvfp4_pack_rows(numbers(N, K, seed=SEEDS[projection] + e)) for e in range(E)]
    return [codes for codes, _ in packed], [scales for _, scales in packed]


def arguments(name: str, missing: int | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A sound call of an entry point; outputs hold 7."""
    down, grouped, two_level = "down" in name, "grouped" in name, "w4a4" in name
    x = numbers(M if down or not grouped else T, K, seed=5, dtype=dtype)
    call: dict[str, Any] = {"h" if down else "x": x}
    if grouped and not down:
        call["sorted_token_ids"] = IDS
    call |= {"offsets": OFFSETS, "num_experts": E}
    projections = ["down"] if down else ["gate", "up"]
    for projection in projections:
        codes, scales = matrices(projection)
        ordered = [reference.nvfp4_swizzle(part) if grouped else part.T.contiguous() for part in scales]
        call[projection] = [None if e == missing else codes[e] for e in range(E)]
        call[f"{projection}_scales"] = [None if e == missing else ordered[e] for e in range(E)]
        call[f"{projection}_global_scales"] = GLOBAL[projection]
    if two_level:
        call["input_scales"] = INPUT
    for output in ["out"] if down else ["gate_out", "up_out"]:
        call[output] = torch.full((M, N), 7.0, dtype=dtype)
    return call


def outputs(call: dict[str, Any]) -> list[Tensor]:
    return [call[name] for name in call if name.endswith("out")]


def entry(name: str) -> Callable[..., None]:
    return getattr(torch.ops.fanfold, name)


def moved(call: dict[str, Any], device: str) -> dict[str, Any]:
    def one(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return {
        key: [one(part) for part in value] if isinstance(value, list) else one(value) for key, value in call.items()
    }


def refused(name: str, call: dict[str, Any], message: str) -> None:
    for form in (ENTRIES[name], entry(name)):
        with pytest.raises(ArgumentError, match=rf"^{name}: {message}"):
            form(**call)
    assert all((output == 7).all() for output in outputs(call)), "checked before the first write"


@EVERY
def test_rows_and_their_norms_against_fp64(name: str) -> None:
    """Of the packed numbers; every expert, gate and up have a global scale of their own."""
    call = arguments(name)
    entry(name)(**call)
    x = call.get("x", call.get("h"))
    rows = x if x.shape[0] == M else x[IDS.long()]
    sound = [0.002, None, 0.001, None]
    dynamic = float(rows[5:8].abs().max() / torch.tensor(2688.0))  # of the experts without a sound scale
    for projection, out in zip(["gate", "up"] if "gate" in call else ["down"], outputs(call), strict=True):
        codes, scales = matrices(projection)
        assert (out[[0, 8]] == 7).all()
        for e in (0, 2, 3):
            part = rows[OFFSETS[e] : OFFSETS[e + 1]]
            gs = sound[e] or dynamic
            given = torch.full((len(part),), gs) if "w4a4" in name else None
            a = reference.nvfp4_unpack_rows(*reference.nvfp4_pack_rows(part, given)).double()
            wanted = a @ reference.nvfp4_unpack_rows(codes[e], scales[e]).double().T * GLOBAL[projection][e]
            wanted = wanted * gs if given is not None else wanted
            found = out[OFFSETS[e] : OFFSETS[e + 1]]
            assert relative_error(found, wanted) < 1e-6
            assert abs(float(found.double().norm() / wanted.norm()) - 1) < 1e-6


@EVERY
def test_rows_of_an_expert_elsewhere_are_not_written(name: str) -> None:
    whole, part = arguments(name), arguments(name, missing=0)
    for call in (whole, part):
        if "input_scales" in call:
            call["input_scales"] = [0.002, 0.01, 0.001, 0.003]
        entry(name)(**call)
    for all_rows, some in zip(outputs(whole), outputs(part), strict=True):
        assert (some[:4] == 7).all()
        assert same_bits(some[4:], all_rows[4:])


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offsets_as_a_tensor(name: str, dtype: torch.dtype) -> None:
    host, device = arguments(name, dtype=dtype), arguments(name, dtype=dtype)
    device["offsets"] = torch.tensor(OFFSETS, dtype=torch.int32)
    for call in (host, device):
        entry(name)(**call)
    for one, other in zip(outputs(host), outputs(device), strict=True):
        assert same_bits(one, other)
        assert not (one[1:8] == 7).any()


@EVERY
@pytest.mark.parametrize("as_tensor", [False, True])
def test_no_value_is_read_to_find_the_form_of_the_operation(
    name: str, as_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch prints the arguments of a form that does not match: on a GPU it would wait for them."""
    call = arguments(name)
    if as_tensor:
        call["offsets"] = torch.tensor(OFFSETS, dtype=torch.int32)
    printed: list[Tensor] = []
    monkeypatch.setattr(Tensor, "__repr__", lambda tensor: printed.append(tensor) or "")
    entry(name)(**call)
    assert not printed


@pytest.mark.parametrize("two_level", [False, True])
def test_gate_up_has_the_bits_of_single_products_and_of_the_grouped_form(two_level: bool) -> None:
    name = "nvfp4_gate_up" + ("_w4a4" if two_level else "")
    call, grouped = arguments(name), arguments(name.replace("gate_up", "gate_up_grouped"))
    if two_level:
        call["input_scales"] = grouped["input_scales"] = [0.002, 0.01, 0.001, 0.003]
    grouped["x"], grouped["sorted_token_ids"] = call["x"], None  # row i is x[i]
    entry(name)(**call)
    entry(name.replace("gate_up", "gate_up_grouped"))(**grouped)
    for projection in ("gate", "up"):
        out = call[f"{projection}_out"]
        assert same_bits(out, grouped[f"{projection}_out"])
        for e in (0, 2, 3):
            rows = slice(OFFSETS[e], OFFSETS[e + 1])
            alone = torch.ops.fanfold.nvfp4_product(
                call["x"][rows],
                call[projection][e],
                call[f"{projection}_scales"][e],
                GLOBAL[projection][e],
                call["input_scales"][e] if two_level else None,
            )
            assert same_bits(out[rows], alone)


@pytest.mark.gpu
@EVERY
def test_on_a_gpu_and_in_graphs(name: str) -> None:
    """Codes and scales are the same bits, so all that differs is the order of sums."""
    host = arguments(name, missing=0)
    call = moved(host, "cuda")
    entry(name)(**host)
    entry(name)(**call)
    for found, wanted in zip(outputs(call), outputs(host), strict=True):
        assert torch.equal((found == 7).cpu(), wanted == 7)
        assert relative_error(found.cpu(), wanted) < 1e-6

    def on_device(offsets: Tensor) -> list[Tensor]:
        fresh = {key: torch.full_like(value, 7.0) if key.endswith("out") else value for key, value in call.items()}
        entry(name)(**{**fresh, "offsets": offsets})
        return outputs(fresh)

    routings = [OFFSETS, [0, 0, 9, 9, 9], [2, 3, 4, 5, 6]]
    check_replays(on_device, [[torch.tensor(routing, dtype=torch.int32, device="cuda")] for routing in routings])


@EVERY
def test_every_array_one_short_and_one_long(name: str) -> None:
    """c12: scales for other experts than the weights are never cut to fit."""
    arrays = [key for key, value in arguments(name).items() if isinstance(value, list)]
    assert len(arrays) == (4 if "down" in name else 7) + ("w4a4" in name)
    for array in arrays:
        wanted = E + 1 if array == "offsets" else E
        for change in (lambda v: v[:-1], lambda v: [*v, v[-1]]):
            call = arguments(name)
            call[array] = change(call[array])
            refused(name, call, rf"{array}: found {len(call[array])} entries; expected {wanted}")


@EVERY
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([-1, 4, 4, 5, 8], "offsets: found -1 as the first; expected 0 or more"),
        ([0, 4, 3, 5, 8], "offsets: found 4 and then 3 for expert 1"),
        ([0, 4, 4, 5, 10], "offsets: found 10 as the last; expected at most 9"),
    ],
)
def test_offsets(name: str, offsets: list[int], message: str, as_tensor: bool) -> None:
    call = arguments(name)
    call["offsets"] = torch.tensor(offsets, dtype=torch.int32) if as_tensor else offsets
    refused(name, call, message)


@EVERY
def test_offsets_of_another_kind(name: str) -> None:
    for wrong in (torch.tensor(OFFSETS), torch.tensor(OFFSETS[:-1], dtype=torch.int32)):
        refused(name, {**arguments(name), "offsets": wrong}, r"offsets: found .*; expected contiguous int32 \[5\]")


@EVERY
def test_shapes_dtypes_and_strides_of_each_tensor(name: str) -> None:
    sound = arguments(name)
    x_name = next(iter(sound))
    x = sound[x_name]
    refused(name, {**sound, x_name: x.double()}, f"{x_name}: found float64")
    refused(name, {**sound, x_name: x[:, :40]}, rf"{x_name}: found float32 \[\d, 40\] with strides")
    refused(name, {**sound, x_name: x.T}, f"{x_name}: found")
    output = next(key for key in sound if key.endswith("out"))
    out = sound[output]
    refused(name, {**sound, output: out[:-1]}, rf"{output}: found float32 \[8, 24\]; expected float32 \[9, N\]")
    refused(name, {**sound, output: out.half()}, f"{output}: found float16")
    refused(name, {**sound, output: torch.full((N, M), 7.0).T}, f"{output}: found strides")
    if "sorted_token_ids" in sound:
        refused(name, {**sound, "sorted_token_ids": IDS.long()}, "sorted_token_ids: found int64")
        refused(name, {**sound, "sorted_token_ids": IDS[:-1]}, r"offsets: found 8 as the last|gate_out: found float32")
        refused(name, {**sound, "sorted_token_ids": IDS + 1}, "sorted_token_ids: found 6; expected rows of x")
        refused(name, {**sound, "x": x[:0]}, "sorted_token_ids: found 9 rows of an x without rows")
    for projection in ("down",) if "down" in name else ("gate", "up"):
        for array in (projection, f"{projection}_scales"):
            tensor = sound[array][2]
            for wrong in (tensor[:-1], tensor.view(torch.int8), torch.stack([tensor, tensor], -1)[..., 0]):
                call = {**sound, array: [*sound[array][:2], wrong, sound[array][3]]}
                refused(name, call, rf"{array}\[2\]: found .*; expected contiguous")
            call = {**sound, array: [*sound[array][:2], None, sound[array][3]]}
            refused(name, call, rf"{projection}\[2\]: found .* no |{projection}\[2\]: found no ")
    refused(name, {**sound, "num_experts": -1}, "num_experts: found -1")


@EVERY
def test_wrong_arguments_are_named_where_nothing_runs(name: str) -> None:
    call = moved(arguments(name), "meta")
    for scales in ([0.01] * E, INPUT) if "w4a4" in name else (None,):
        with pytest.raises(UnavailableError, match="found tensors on meta"):
            ENTRIES[name](**(call if scales is None else {**call, "input_scales": scales}))
    for array in [key for key, value in call.items() if isinstance(value, list)]:
        with pytest.raises(ArgumentError, match=f"^{name}: {array}: found"):
            ENTRIES[name](**{**call, array: call[array][:-1]})
    output = next(key for key in call if key.endswith("out"))
    with pytest.raises(ArgumentError, match=f"^{name}: {output}: found cpu; expected meta"):
        ENTRIES[name](**{**call, output: torch.zeros(M, N)})


def test_no_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(reference_kernels, "pack_rows", full)
    with pytest.raises(DeviceMemoryError, match=r"^nvfp4_down_grouped: packed h: found no room on cpu"):
        ENTRIES["nvfp4_down_grouped"](**arguments("nvfp4_down_grouped"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_as_one_graph() -> None:
    eager, call = arguments("nvfp4_gate_up_grouped_w4a4"), arguments("nvfp4_gate_up_grouped_w4a4")
    rest = {key: value for key, value in call.items() if key not in ("x", "offsets", "gate_out", "up_out")}

    def gate_up(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        out = x.new_full((2, M, N), 7.0)
        entry("nvfp4_gate_up_grouped_w4a4")(x=x, offsets=offsets, gate_out=out[0], up_out=out[1], **rest)
        return out[0] * 2, out[1]

    compiled = torch.compile(gate_up, backend="aot_eager", fullgraph=True)
    gate, up = compiled(call["x"], torch.tensor(OFFSETS, dtype=torch.int32))
    entry("nvfp4_gate_up_grouped_w4a4")(**eager)
    assert same_bits(gate, eager["gate_out"] * 2)
    assert same_bits(up, eager["up_out"])


@EVERY
def test_no_experts_and_no_rows_do_nothing(name: str) -> None:
    call = arguments(name)
    empty = {key: [] if isinstance(value, list) else value for key, value in call.items()}
    entry(name)(**{**empty, "num_experts": 0, "offsets": [0]})
    assert all((output == 7).all() for output in outputs(call))
    call["h" if "down" in name else "x"] = torch.zeros(0, K)
    call |= {key: torch.zeros(0, N) for key in call if key.endswith("out")} | {"offsets": [0] * (E + 1)}
    if "sorted_token_ids" in call:
        call["sorted_token_ids"] = IDS[:0]
    entry(name)(**call)


@EVERY
def test_c15_rows_without_an_expert_leave_others_alone(name: str) -> None:
    """256 experts, three rows."""
    call = arguments(name)
    for key, value in call.items():
        if isinstance(value, list) and key != "offsets":
            call[key] = value * 64
    call |= {"num_experts": 256, "offsets": [0] * 200 + [3] * 57}
    entry(name)(**call)
    for output in outputs(call):
        assert output[:3].isfinite().all()
        assert not (output[:3] == 7).any()
        assert (output[3:] == 7).all()


@EVERY
def test_schemas_have_the_arguments_of_the_functions(name: str) -> None:
    for overload in ("default", "host"):
        schema = getattr(getattr(torch.ops.fanfold, name), overload)._schema
        assert [argument.name for argument in schema.arguments] == list(inspect.signature(ENTRIES[name]).parameters)
    assert {f"{name}.host", name} <= set(ops.OPS)


@EVERY
@pytest.mark.parametrize("overload", ["default", "host"])
def test_opcheck(name: str, overload: str) -> None:
    call = arguments(name, missing=1)
    for key, value in call.items():  # torch can't compare E4M3
        if key.endswith("_scales") and not isinstance(value[0], float):
            call[key] = [None if tensor is None else tensor.view(torch.uint8) for tensor in value]
    if overload == "default":
        call["offsets"] = torch.tensor(OFFSETS, dtype=torch.int32)
    op = getattr(getattr(torch.ops.fanfold, name), overload)
    torch.library.opcheck(op, tuple(call.values()), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["nvfp4_product", "nvfp4_pack_rows", "nvfp4_pack_weights", "nvfp4_swizzle"])
def test_opcheck_of_those_that_return(name: str) -> None:
    codes, scales = matrices("gate")
    x = numbers(5, K)
    call = {
        "nvfp4_product": (x, codes[0], scales[0].view(torch.uint8).T.contiguous(), 0.5, 0.0),
        "nvfp4_pack_rows": (x, torch.ones(9), IDS % 5),
        "nvfp4_pack_weights": (numbers(2, N, K), True, True),
        "nvfp4_swizzle": (torch.stack(scales).view(torch.uint8),),
    }[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.fanfold, name).default, call, test_utils=checks)
    if name == "nvfp4_swizzle":
        swizzled = torch.ops.fanfold.nvfp4_swizzle(*call)
        back = torch.ops.fanfold.nvfp4_unswizzle
        assert torch.equal(back(swizzled, N, K).float(), call[0].float())
        torch.library.opcheck(back.default, (swizzled, N, K), test_utils=checks)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.nvfp4_pack_rows(numbers(2, 40)), "nvfp4_pack_rows: x: found float32 [2, 40]"),
        (
            lambda f: f.nvfp4_pack_rows(numbers(2, 32), torch.ones(3)),
            "nvfp4_pack_rows: global_scales: found float32 [3]",
        ),
        (lambda f: f.nvfp4_pack_rows(numbers(2, 32), None, None, "odd"), "nvfp4_pack_rows: ties: found 'odd'"),
        (lambda f: f.nvfp4_pack_weights(numbers(2, 3, 40), True, False), "nvfp4_pack_weights: weights: found"),
        (lambda f: f.nvfp4_swizzle(numbers(2, 3)), "nvfp4_swizzle: scales: found float32"),
        (lambda f: f.nvfp4_unswizzle(torch.zeros(512, dtype=torch.uint8), 129, 64), "nvfp4_unswizzle: swizzled: found"),
        (lambda f: f.nvfp4_unswizzle(torch.zeros(512, dtype=torch.uint8), 128, 60), "nvfp4_unswizzle: n, k: found"),
    ],
)
def test_what_cannot_be_packed_is_refused(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call(torch.ops.fanfold)


def test_gradients_are_refused() -> None:
    call = arguments("nvfp4_gate_up")
    call["x"].requires_grad_()
    with pytest.raises(InferenceOnlyError, match="nvfp4_gate_up: found a tensor that requires a gradient"):
        entry("nvfp4_gate_up")(**call)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_packed_as_compressed_tensors_packs_them(dtype: torch.dtype, transposed: bool) -> None:
    """Bit for bit, on weights in fp32. Where all weights of a group are (nearly) 0 it stores 0.125 as the scale."""
    # Imported here, as the machines that run this file's gpu tests may lack it.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = numbers(3, 32, 352, dtype=dtype) * torch.tensor([1.0, 0.02, 300.0], dtype=dtype)[:, None, None]
    weights[0, 3, 16:32], weights[1, 0, :16] = 0, 1e-9
    packed, scales, global_scales = torch.ops.fanfold.nvfp4_pack_weights(weights, True, transposed)
    assert scales.shape == ((3, 22, 32) if transposed else (3, 32, 22))
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    for e, weight in enumerate(weights.float()):
        global_scale = generate_gparam(weight.amin(), weight.amax())
        assert float(global_scales[e]) == float(global_scale)
        blocks = weight.reshape(32, -1, 16)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale)
        compress = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress
        written = compress({"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}, scheme)
        found = (scales[e].T if transposed else scales[e]).float()
        live = found > 0
        assert torch.equal(found[live], written["weight_scale"].float()[live])
        assert (written["weight_scale"].float()[~live] == 0.125).all()
        assert torch.equal(packed[e], written["weight_packed"])
        assert (~live).sum() == (1 if e < 2 else 0)


@pytest.mark.parametrize("checkpoint", ["modelopt_qwen3moe_nvfp4", "ct_qwen3moe_nvfp4"])
def test_c4_c9_real_checkpoints_of_both_conventions(checkpoint: str) -> None:
    """Gate, up and down with the scales of the files: within the error of 4 bits of the weights as they are."""
    layer = load_experts(sample(checkpoint), layer=0, dtype=torch.float32).weights
    x, experts = numbers(24, layer.gate_up.k, seed=1), layer.gate_up.num_experts
    offsets = [3 * expert for expert in range(experts + 1)]
    inputs = x
    for projection, names in ((layer.gate_up, ("gate", "up")), (layer.down, ("down",))):
        tensors = projection.tensors
        divides = projection.format.divisor
        scales = {key: 1 / tensors[key] if divides else tensors[key] for key in ("global_scale", "input_scale")}
        call: dict[str, Any] = {"offsets": offsets, "num_experts": experts}
        for half, name in enumerate(names):
            call[name] = list(tensors["packed"][:, half])
            call[f"{name}_scales"] = list(torch.ops.fanfold.nvfp4_swizzle(tensors["scale"][:, half]))
            call[f"{name}_global_scales"] = scales["global_scale"][:, half].tolist()
        call["input_scales"] = scales["input_scale"].amax(1).tolist()  # gate and up share the larger
        outs = [torch.empty(24, projection.n) for _ in names]
        if len(names) == 2:
            call |= {"x": inputs, "sorted_token_ids": None, "gate_out": outs[0], "up_out": outs[1]}
        else:
            call |= {"h": inputs, "out": outs[0]}
        entry("nvfp4_gate_up_grouped_w4a4" if len(names) == 2 else "nvfp4_down_grouped_w4a4")(**call)
        for half, found in enumerate(outs):
            wanted = torch.cat(
                [inputs[3 * e : 3 * e + 3] @ reference.dequantize_expert(projection, e, half).T for e in range(experts)]
            )
            assert 0.03 < relative_error(found, wanted) < 0.15
            assert abs(float(found.norm() / wanted.norm()) - 1) < 0.03
        inputs = torch.nn.functional.silu(outs[0]) * outs[-1]
