"""The Hopper product on a GPU: exact on integers, against fp32 on random weights, poisoned outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sm90_compiling import FEW, MANY
from sm90_jobs import integers, projection, with_bias
from sm90_layers import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    SILU,
    TOP_K,
    Layer,
    batch,
    check,
    configs,
    integer_layer,
    layer_of,
)

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.configs import config_for, pinned_config
from fanfold.spec import Activation
from graphs import dirty_memory, same_bits
from samples import random_projection

pytestmark = pytest.mark.gpu
NAMES = ["gptq4-g128", "gptq4-g64-asym-v1", "gptq4-g32-asym-v2", "awq4-g64-asym", "packed4-g128"]


@pytest.fixture(scope="module")
def random_layer() -> Layer:
    return integer_layer(exact=False)


@pytest.fixture(scope="module", params=[True, False], ids=["short", "long"])
def exact_layer(request: pytest.FixtureRequest) -> Layer:
    """Scales of 1 and 1/2: sums of small integers are exact in fp32, whatever their order; as short scales or not."""
    layer = integer_layer(exact=True)
    assert layer.gate_up.short_scales
    assert layer.down.short_scales
    gate_up, down = (replace(weights, short_scales=request.param) for weights in (layer.gate_up, layer.down))
    return replace(layer, gate_up=gate_up, down=down)


@pytest.mark.parametrize("pair", configs(), ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_integers_are_exact(pair: tuple[Sm90Config, Sm90Config], exact_layer: Layer) -> None:
    """Down bit for bit; h within one rounding, since exp differs in its last bits."""
    from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
    from fanfold.routing.plan import plan_items

    gate_up, down = pair
    generator = torch.Generator("cuda").manual_seed(1)
    _, ids, _ = batch(290, torch.bfloat16, EXPERTS)
    x = torch.randint(-3, 4, (290, HIDDEN), generator=generator, device="cuda").bfloat16() / 32
    h = torch.randint(-3, 4, (580, INTERMEDIATE), generator=generator, device="cuda").bfloat16()
    route, work = plan_items(ids, EXPERTS, gate_up.block_t)
    for chained in (False, True):
        for _ in range(3):
            torch.cuda.synchronize()
            dirty_memory("cuda")
            found_h = grouped_gate_up(x, exact_layer.gate_up, work, TOP_K, gate_up, SILU, chained)
            y2 = grouped_down(h, exact_layer.down, work, down, chained)
            y2 = (y2.sum(0) if y2.dim() == 3 else y2).to(h.dtype)
            for e in range(EXPERTS):
                rows = (ids.flatten() == e).nonzero()[:, 0]
                positions = route.positions[rows].long()
                w = dequantize_expert(exact_layer.packed[1], e, 0)
                assert torch.equal(y2[rows], (h[positions].double() @ w.double().T).to(h.dtype))
                gate, up = (
                    (x[rows // TOP_K].double() @ dequantize_expert(exact_layer.packed[0], e, half).double().T)
                    .to(x.dtype)
                    .double()
                    for half in (0, 1)
                )
                expected = torch.nn.functional.silu(gate) * up
                error = (found_h[positions].double() - expected).abs() / expected.abs().clamp_min(1e-2)
                assert (error <= 2.0**-7).all()


@pytest.mark.parametrize("count", [1, 32, 33, 64, 65, 80, 81, 96, 97, 127, 128, 129])
def test_every_part_of_a_tile_is_exact(count: int, exact_layer: Layer) -> None:
    """So many rows of one expert: a quarter of a tile of 128, a half, five and six eighths, all of it, and one more."""
    from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
    from fanfold.routing.plan import plan_items

    generator = torch.Generator("cuda").manual_seed(count)
    ids = (torch.arange(2 * count, device="cuda").int() % 2 * 3)[:, None]  # experts 0 and 3 by turns
    x = torch.randint(-3, 4, (2 * count, HIDDEN), generator=generator, device="cuda").bfloat16() / 32
    h = torch.randint(-3, 4, (2 * count, INTERMEDIATE), generator=generator, device="cuda").bfloat16()
    found: list[torch.Tensor] = []
    for config in (replace(MANY, block_t=128, smallest_t=32), replace(MANY, block_t=8, smallest_t=8)):
        route, work = plan_items(ids, EXPERTS, config.block_t)
        dirty_memory("cuda")
        y2 = grouped_down(h, exact_layer.down, work, config)
        found.append(grouped_gate_up(x, exact_layer.gate_up, work, 1, config, SILU)[route.positions.long()])
        for e in (0, 3):
            rows = (ids.flatten() == e).nonzero()[:, 0]
            w = dequantize_expert(exact_layer.packed[1], e, 0)
            assert torch.equal(y2[rows], (h[route.positions.long()[rows]].double() @ w.double().T).to(h.dtype))
    assert same_bits(found[0], found[1])


@pytest.mark.parametrize("tokens", [1, 3, 64, 1500])
@pytest.mark.parametrize("pair", configs(), ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_every_tuned_config(pair: tuple[Sm90Config, Sm90Config], tokens: int, random_layer: Layer) -> None:
    check(random_layer, tokens, *pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_integer_format(name: str, dtype: torch.dtype) -> None:
    layer = layer_of([integers(name, 5, p, n, k) for p, n, k in ((2, 512, 1024), (1, 1024, 512))])
    for config in (FEW, MANY):
        if config.scale_on_sum and layer.down.format.group_size < 64:
            continue
        for tokens in (1, 70, 700):
            check(layer, tokens, config, config, dtype)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor", "mxfp4"])
def test_c1_fp4(name: str) -> None:
    """Every expert and half has another global scale."""
    layer = layer_of([projection(name, 5, p, n, k) for p, n, k in ((2, 512, 1024), (1, 1024, 512))])
    for config in (Sm90Config(16, 16, 1, 2, 128, 3, 1, False), Sm90Config(128, 32, 1, 2, 128, 3, 8, False)):
        for tokens in (9, 70, 700):
            check(layer, tokens, config, config)


@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "gptq4-g64-asym-v1", "gptq4-g64-asym-v1-actorder"])
def test_odd_sizes_and_biases(name: str, tokens: int) -> None:
    """As gpt-oss has them: an odd number of tiles both ways; clamped SwiGLU."""
    make = random_projection if "actorder" in name else projection
    layer = layer_of([with_bias(make(name, 5, p, n, k)) for p, n, k in ((2, 320, 448), (1, 448, 320))])
    gate_up, down, _ = config_for(layer.gate_up, layer.down, tokens, TOP_K)
    check(layer, tokens, gate_up, down, activation=Activation("clamped_swiglu"))
    pinned = pinned_config(layer.gate_up, layer.down, tokens, TOP_K)
    check(layer, tokens, pinned[0], pinned[1], activation=Activation("clamped_swiglu"))


@pytest.mark.parametrize("name", ["gptq4-g32-actorder", "gptq4-g128-actorder", "packed4-g64-asym-actorder"])
def test_act_order(name: str) -> None:
    """Every expert has other orders."""
    layer = layer_of([random_projection(name, 5, p, n, k) for p, n, k in ((2, 512, 1024), (1, 1024, 512))])
    for tokens in (1, 50, 700):
        gate_up, down, _ = config_for(layer.gate_up, layer.down, tokens, TOP_K)
        check(layer, tokens, gate_up, down)
