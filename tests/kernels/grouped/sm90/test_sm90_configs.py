"""A config for every layer that `prepare` accepts: it fits, it is the table's where the table knows the layer."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sm90_compiling import empty_weights

from fanfold.kernels.grouped.sm90.config import Sm90Config, misfits
from fanfold.kernels.grouped.sm90.configs import config_for, layer_configs, pinned_config, sizes_of
from fanfold.kernels.grouped.sm90.supported import refusal
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.kernels.grouped.sm90.weights import FragmentWeights, padded
from fanfold.spec.arch import SHARED_BYTES
from user_tables import H200, user_folder, write

FORMATS = ["gptq4-g128", "gptq4-g64-asym-v1", "gptq4-g32", "awq4-g128-asym", "packed4-g32-asym", "nvfp4", "mxfp4"]
SIZES = [64, 128, 192, 320, 768, 2880, 14336]
TOKENS = [0, 1, 3, 17, 64, 256, 1000, 4096, 300000]


def layer(name: str, experts: int, hidden: int, intermediate: int, halves: int = 2) -> list[FragmentWeights]:
    return [
        empty_weights(name, p, n, k, experts, "meta")
        for p, n, k in ((halves, intermediate, hidden), (1, hidden, intermediate))
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_there_is_one_for_all_weights(name: str) -> None:
    checked = 0
    for hidden in SIZES:
        for intermediate in SIZES:
            for experts, top_k, halves in ((1, 1, 2), (8, 2, 1), (128, 8, 2), (512, 10, 2)):
                gate_up, down = layer(name, experts, hidden, intermediate, halves)
                if any(refusal(w.format, w.halves, w.n, w.k, torch.bfloat16) for w in (gate_up, down)):
                    continue
                for tokens in TOKENS:
                    for find in (config_for, pinned_config):
                        first, second, _ = find(gate_up, down, tokens, top_k)
                        assert misfits(first, gate_up.format, gate_up.rows, gate_up.padded_k, True) == ()
                        assert misfits(second, down.format, down.rows, down.padded_k, False) == ()
                        assert first.block_t == second.block_t
                        for config in (first, second):
                            x = 2 * config.block_t * config.block_k * config.stages
                            assert x <= SHARED_BYTES["sm_90"]
                            assert config.scale_on_sum or config.block_k <= 128 or gate_up.fp4_group
                        checked += 1
    assert checked > 600


def test_layers_of_the_table_run_with_its_rows() -> None:
    for row in read_table():
        name = "gptq4-g128" if row.format == "int4" else row.format
        gate_up, down = layer(name, row.experts, row.hidden, row.intermediate)
        found = config_for(gate_up, down, row.tokens, row.top_k)
        assert found == (row.gate_up, row.down, row.chained)


@pytest.mark.parametrize("name", ["gptq4-g32", "nvfp4"])
def test_sizes_say_as_much_as_weights(name: str) -> None:
    """Also where rows and inputs are padded: 2880 to 2944, 320 to 384."""
    for hidden, intermediate, halves in ((2880, 320, 2), (320, 2880, 1)):
        gate_up, down = layer(name, 32, hidden, intermediate, halves)
        fmt = gate_up.format
        first, second = (
            (fmt, padded(halves * intermediate), padded(hidden)),
            (fmt, padded(hidden), padded(intermediate)),
        )
        for tokens in (1, 64, 4096):
            found = layer_configs(first, second, hidden, intermediate, 32, tokens, 4)
            assert (found.gate_up, found.down, found.chained) == config_for(gate_up, down, tokens, 4)


def test_the_nearest_number_of_tokens() -> None:
    gate_up, down = layer("gptq4-g128", 128, 2048, 768)
    rows = {row.tokens: row for row in read_table() if row.experts == 128 and row.format == "int4"}
    for tokens, nearest in ((2, 1), (5, 16), (30, 16), (40, 64), (500, 256), (600, 1024), (10**6, 16384)):
        assert config_for(gate_up, down, tokens, 8)[0] == rows[nearest].gate_up


def test_another_layer_takes_the_nearest_rows_an_expert() -> None:
    """16 experts, 2 of them for 1024 tokens: 128 rows each, as deepseek-v3/8 has with 512."""
    gate_up, down = layer("gptq4-g128", 16, 4096, 4096)
    assert config_for(gate_up, down, 1024, 2)[0].block_t in (64, 128)
    assert config_for(gate_up, down, 16, 2)[0].block_t == 8
    assert config_for(gate_up, down, 100_000, 2)[0].block_t >= 128


def test_fp4_formats_take_each_others_rows() -> None:
    """MXFP4 of qwen3-30b as NVFP4 of it; 2944 inputs of a gpt-oss that is NVFP4 need stages of 128."""
    rows = {(row.format, row.experts, row.hidden, row.tokens): row for row in read_table()}
    gate_up, down = layer("mxfp4", 128, 2048, 768)
    row = rows["nvfp4", 128, 2048, 64]
    assert config_for(gate_up, down, 64, 8) == (row.gate_up, row.down, row.chained)
    gate_up, down = layer("nvfp4", 128, 2880, 2880)
    row = rows["mxfp4", 128, 2880, 64]
    assert config_for(gate_up, down, 64, 4) == (row.gate_up, row.down, row.chained)


def test_shorter_stages_before_fewer_rows() -> None:
    """Groups of 64 fill the registers with half the stage; K of 2944 is 23 stages of 128; rows 5760 are 45 * 128."""
    gate_up, down = layer("gptq4-g64", 128, 2048, 768)
    assert config_for(gate_up, down, 256, 8)[0] == Sm90Config(32, 16, 1, 2, 128, 2, 1, True)
    gate_up, down = layer("nvfp4", 8, 2880, 2880)
    assert config_for(gate_up, down, 64, 2)[0] == Sm90Config(32, 8, 1, 2, 128, 3, 1, False)
    assert config_for(gate_up, down, 4096, 2)[1] == Sm90Config(128, 32, 1, 2, 128, 3, 8, False)


def test_zeros_and_short_scales_are_on_the_weights_of_larger_tiles(tmp_path: Path) -> None:
    """From 32 rows on; a user's row, which may have been measured with such weights, stays as it is."""
    plain = layer("gptq4-g128", 128, 2048, 768)
    on_sum, on_weights = Sm90Config(32, 16, 1, 2, 256, 2, 1, True), Sm90Config(32, 16, 1, 2, 128, 3, 1, False)
    short = [replace(weights, short_scales=True) for weights in plain]
    zeros = layer("gptq4-g128-asym-v1", 128, 2048, 768)
    assert config_for(*plain, 256, 8)[0] == config_for(plain[0], short[1], 256, 8)[0] == on_sum
    assert config_for(*short, 256, 8)[0] == config_for(*zeros, 256, 8)[0] == on_weights
    for other in (short, zeros):
        assert config_for(*other, 64, 8) == config_for(*plain, 64, 8)
    with user_folder(tmp_path):
        write("grouped_int4_sm90", ("int4", 128, 8, 2048, 768, 256), on_sum, on_sum, chained=True, run=0)
        assert config_for(*short, 256, 8) == config_for(*zeros, 256, 8) == (on_sum, on_sum, True)


def test_pinned_configs_differ_in_tiles_alone() -> None:
    for name in FORMATS:
        gate_up, down = layer(name, 8, 2048, 768)
        for tokens in TOKENS:
            for config in pinned_config(gate_up, down, tokens, 2)[:2]:
                assert (config.scale_on_sum, config.parts) == (False, 1)


def test_zeros_of_groups_of_32_are_on_the_weights() -> None:
    gate_up, down = layer("gptq4-g32", 128, 2048, 768)
    found = config_for(gate_up, down, 1, 8)
    assert found[0] == Sm90Config(8, 8, 1, 1, 128, 3, 1, False)
    assert found[1].scale_on_sum is False


def test_the_users_row_comes_first_but_where_configs_are_pinned(tmp_path: Path) -> None:
    gate_up, down = layer("gptq4-g128", 128, 2048, 768)
    packages = {tokens: config_for(gate_up, down, tokens, 8) for tokens in (1, 64, 300)}
    pinned = pinned_config(gate_up, down, 64, 8)
    own = Sm90Config(16, 8, 1, 1, 128, 4, 1, True)
    with user_folder(tmp_path):
        write("grouped_int4_sm90", ("int4", 128, 8, 2048, 768, 64), own, own, chained=True, run=0)
        assert config_for(gate_up, down, 64, 8) == (own, own, True) != packages[64]
        assert config_for(gate_up, down, 64, 8, H200) == (own, own, True)
        assert config_for(gate_up, down, 64, 8, "NVIDIA H100") == packages[64]
        assert config_for(gate_up, down, 1, 8) == packages[1]
        assert config_for(gate_up, down, 300, 8) == packages[300]  # the package's 256 is nearer
        assert pinned_config(gate_up, down, 64, 8) == pinned
    assert config_for(gate_up, down, 64, 8) == packages[64]


def test_a_row_of_a_layer_reaches_four_times_more_tokens(tmp_path: Path) -> None:
    """Beyond, a row of another layer with as many rows an expert is better than one made for few."""
    gate_up, down = layer("gptq4-g128", 16, 4096, 4096)
    sizes = sizes_of(gate_up, down)
    others = {tokens: layer_configs(*sizes, tokens, 2) for tokens in (16, 64, 65, 4096)}
    assert not any(found.same for found in others.values())
    own = Sm90Config(8, 8, 1, 1, 128, 4, 1, True)
    with user_folder(tmp_path):
        write("grouped_int4_sm90", ("int4", 16, 2, 4096, 4096, 16), own, own, chained=False, run=0)
        for tokens in (4, 16, 64):
            found = layer_configs(*sizes, tokens, 2)
            assert (found.gate_up, found.same, found.row.header.gpu) == (own, True, H200)
        for tokens in (65, 4096):
            assert layer_configs(*sizes, tokens, 2).gate_up == others[tokens].gate_up
            assert not layer_configs(*sizes, tokens, 2).same


def test_the_host_spends_little() -> None:
    gate_up, down = layer("gptq4-g128", 128, 2048, 768)
    config_for(gate_up, down, 7, 8)
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            config_for(gate_up, down, 7, 8)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 20e-6
