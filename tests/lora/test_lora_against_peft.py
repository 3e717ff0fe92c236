"""Deltas and logits against PEFT's own: fused parameters made here, and the sample adapters on their models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import GOLDEN, TINY, FakeExperts, FakeLinear, FakeSite, delta
from torch import Tensor, nn

from fanfold.lora import bind, read_adapter
from fanfold.lora.adapter import Adapter
from fanfold.spec import ExpertShape, LoraPair

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

EXPERTS = "layers.0.mlp.experts"


class Experts(nn.Module):
    """E = 3, H = 6, I = 4: no two sizes alike."""

    def __init__(self, shape: ExpertShape, *, transposed: bool) -> None:
        super().__init__()
        gate_up, down = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        if transposed:
            self.is_transposed = True
            gate_up, down = gate_up[::-1], down[::-1]
        self.gate_up_proj = nn.Parameter(torch.zeros(shape.num_experts, *gate_up))
        self.down_proj = nn.Parameter(torch.zeros(shape.num_experts, *down))


class Mlp(nn.Module):
    def __init__(self, shape: ExpertShape, *, transposed: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.num_experts, bias=False)
        self.experts = Experts(shape, transposed=transposed)


class Layer(nn.Module):
    def __init__(self, shape: ExpertShape, *, transposed: bool) -> None:
        super().__init__()
        self.mlp = Mlp(shape, transposed=transposed)


class Model(nn.Module):
    def __init__(self, shape: ExpertShape, *, transposed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(shape, transposed=transposed)])


def written_by_peft(folder: Path, model: nn.Module, **fields: Any) -> dict[str, Tensor]:
    """Saves an adapter with random factors; returns the delta of each targeted parameter."""
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=[], init_lora_weights=False, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, config)
        wrapped.save_pretrained(folder)
    return {
        module.parameter_name: module.get_delta_weight("default").detach()
        for module in wrapped.modules()
        if type(module).__name__ == "ParamWrapper"
    }


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ["gate_up_proj"],
        ["experts.down_proj"],
        ["gate.weight", "down_proj", "gate_up_proj"],
    ],
    ids=lambda names: "+".join(names),
)
@pytest.mark.parametrize("shape", [ExpertShape(3, 6, 4), ExpertShape(3, 8, 4)], ids=["unlike", "square"])
def test_a6_a7_fused_parameters(
    tmp_path: Path, shape: ExpertShape, parameters: list[str], transposed: bool, interleaved: bool
) -> None:
    expected = written_by_peft(
        tmp_path,
        Model(shape, transposed=transposed),
        r=2,
        lora_alpha=5,
        use_rslora=True,
        target_parameters=parameters,
        rank_pattern={r".*\.gate_up_proj": 3},
    )
    experts = FakeExperts(EXPERTS, shape=shape, interleaved=interleaved, transposed=transposed)
    gate = FakeLinear("layers.0.mlp.gate", in_features=shape.hidden, out_features=3)
    found = bind(read_adapter(tmp_path), {EXPERTS: experts, gate.path: gate})
    pairs = found[EXPERTS]
    assert not isinstance(pairs, LoraPair)
    checked = 0
    for name in expected.keys() - {"weight"}:
        stored = expected[name].transpose(1, 2) if transposed else expected[name]  # [E, out, in]
        halves: dict[Any, Any] = {"down": slice(None)}
        if name == "gate_up_proj":
            n = shape.intermediate
            halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
            if not interleaved:
                halves = {"gate": slice(n), "up": slice(n, None)}
        for half, rows in halves.items():
            for e in range(shape.num_experts):
                wanted = stored[e, rows].double()
                torch.testing.assert_close(delta(pairs[half, e]), wanted, rtol=1e-5, atol=1e-6)
                checked += 1
    assert checked == len(pairs) > 0
    if "weight" in expected:
        router = found[gate.path]
        assert isinstance(router, LoraPair)
        torch.testing.assert_close(delta(router), expected["weight"].double(), rtol=1e-5, atol=1e-6)


BASES = {
    "qwen3": GOLDEN / "base_qwen3moe_tiny_bf16",
    "mixtral": GOLDEN / "base_mixtral_tiny_bf16",
    "gptoss": GOLDEN / "base_gptoss_tiny_bf16",
    "tiny": GOLDEN / "tiny-moe" / "base",
}
SAMPLES = [
    ("gptoss", GOLDEN / "peft018_gptoss_target_parameters"),
    ("gptoss", GOLDEN / "peft_gptoss_target_parameters"),
    ("mixtral", GOLDEN / "peft_mixtral_target_parameters"),
    ("mixtral", GOLDEN / "peft_mixtral_v4style_target_modules"),
    ("mixtral", GOLDEN / "peft_v4_mixtral_per_expert"),
    ("qwen3", GOLDEN / "peft_qwen3moe_all_linear"),
    ("qwen3", GOLDEN / "peft_qwen3moe_target_parameters"),
    ("qwen3", GOLDEN / "peft_qwen3moe_v4style_target_modules"),
    ("qwen3", GOLDEN / "peft_v4_qwen3moe_per_expert"),
    ("qwen3", GOLDEN / "peft_v4_qwen3moe_per_expert_rslora_patterns"),
    ("tiny", TINY / "adapter-python"),
    ("tiny", TINY / "adapter-scripture"),
    ("tiny", TINY / "adapter-shout"),
]


def places(model: nn.Module) -> dict[str, FakeSite]:
    """The sites of a transformers model."""
    found: dict[str, FakeSite] = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "gate_up_proj"):
            transposed = module.is_transposed
            experts, first, second = module.gate_up_proj.shape
            hidden, rows = (first, second) if transposed else (second, first)
            shape = ExpertShape(experts, hidden, rows // 2)
            found[path] = FakeExperts(path, shape=shape, interleaved=transposed, transposed=transposed)
        elif isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            found[path] = FakeLinear(path, in_features=weight.shape[1], out_features=weight.shape[0])
    return found


@torch.no_grad()
def merge(model: nn.Module, adapter: Adapter) -> None:
    """Adds all deltas to the weights of a dense model."""
    sites = places(model)
    for path, pairs in bind(adapter, sites).items():
        module, site = model.get_submodule(path), sites[path]
        if isinstance(pairs, LoraPair):
            module.weight += delta(pairs)
            continue
        assert isinstance(site, FakeExperts)
        n = site.shape.intermediate
        for (projection, expert), pair in pairs.items():
            weight = module.down_proj[expert] if projection == "down" else module.gate_up_proj[expert]
            rows = weight.T if site.transposed else weight  # [out, in]
            if projection != "down":
                half = int(projection == "up")
                rows = rows[half::2] if site.interleaved else rows[half * n : (half + 1) * n]
            rows += delta(pair)


@pytest.mark.parametrize(("base", "folder"), SAMPLES, ids=[folder.name for _, folder in SAMPLES])
def test_logits_of_the_samples(base: str, folder: Path) -> None:
    reference = GOLDEN / "tiny-moe" / folder.name if base == "tiny" else folder
    expected = torch.load(reference / "reference.pt", weights_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(BASES[base], dtype=torch.float32).eval()
    ids = expected["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        merge(model, read_adapter(folder))
        after = model(ids).logits
    wanted = expected["logits"].float()
    error = (after - wanted).norm() / wanted.norm()
    change = (before - wanted).norm() / wanted.norm()
    assert error <= 1e-5
    assert change > 100 * error
