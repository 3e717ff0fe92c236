"""Host memory while a model is loaded: at most the model and one shard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from samples import sample

LAYERS, EXPERTS, HIDDEN, INNER, VOCABULARY = 4, 32, 512, 512, 1024
SHARD = "model-{:05d}-of-00004.safetensors"
# The first load counts what the imports take; the peak is then started anew.
FRESH = """
import re, sys
from pathlib import Path
import torch, fanfold
def status(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
fanfold.load_model(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmHWM")
model = fanfold.load_model(sys.argv[2])
print("figures", status("VmHWM") - before, status("VmRSS") - before)
"""


def write_checkpoint(path: Path) -> None:
    """A random BF16 model of 207 MB in four shards, one a layer."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": LAYERS}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    Qwen3MoeConfig(**sizes, **heads, **names, num_experts_per_tok=2).save_pretrained(path)
    noise = (0.02 * torch.randn(INNER, HIDDEN, generator=torch.Generator().manual_seed(0))).bfloat16()

    def plain(rows: int, columns: int = HIDDEN) -> Tensor:
        return noise.flatten()[: rows * columns].view(rows, columns).clone() if rows <= INNER else noise.repeat(2, 1)

    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    of_shard: dict[str, str] = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors = {
            f"{at}input_layernorm.weight": norm.clone(),
            f"{at}post_attention_layernorm.weight": norm.clone(),
            f"{at}self_attn.q_norm.weight": norm[:64].clone(),
            f"{at}self_attn.k_norm.weight": norm[:64].clone(),
            f"{at}self_attn.q_proj.weight": plain(256),
            f"{at}self_attn.k_proj.weight": plain(128),
            f"{at}self_attn.v_proj.weight": plain(128),
            f"{at}self_attn.o_proj.weight": plain(HIDDEN, 256),
            f"{at}mlp.gate.weight": plain(EXPERTS),
        }
        for e in range(EXPERTS):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{at}mlp.experts.{e}.{projection}.weight"] = noise.clone()
        if layer == 0:
            tensors["model.norm.weight"] = norm.clone()
            tensors["model.embed_tokens.weight"] = plain(VOCABULARY)
            tensors["lm_head.weight"] = plain(VOCABULARY)
        save_file(tensors, path / SHARD.format(layer + 1))
        of_shard.update(dict.fromkeys(tensors, SHARD.format(layer + 1)))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_shard}))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident peaks are read from Linux's /proc")
def test_peak_is_the_model_and_one_shard(tmp_path: Path) -> None:
    """Reached: 1.01 of the model and a shard."""
    write_checkpoint(tmp_path)
    shards = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(shards) == 4
    assert sum(shards) > 200e6
    run = subprocess.run(
        [sys.executable, "-c", FRESH, sample("base_qwen3moe_tiny_bf16"), tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    line = next((line for line in run.stdout.splitlines() if line.startswith("figures")), None)
    assert line is not None, run.stderr
    peak, after = map(int, line.split()[1:])
    assert sum(shards) < 1.05 * after
    assert peak <= 1.2 * (sum(shards) + max(shards))
    assert peak <= 1.2 * sum(shards) + max(shards)
