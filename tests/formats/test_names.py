import pytest

from fanfold.formats.names import ExpertName, expert_name, in_experts, is_draft

MIXTRAL = "model.layers.3.block_sparse_moe.experts"
QWEN = "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{QWEN}.7.gate_proj.weight", (QWEN, 3, 7, "gate", "weight")),
        (f"{QWEN}.7.up_proj.qweight", (QWEN, 3, 7, "up", "qweight")),
        (f"{QWEN}.127.down_proj.weight_scale_inv", (QWEN, 3, 127, "down", "weight_scale_inv")),
        (f"{QWEN}.0.gate_proj.bias", (QWEN, 3, 0, "gate", "bias")),
        (f"{MIXTRAL}.1.w1.weight", (MIXTRAL, 3, 1, "gate", "weight")),
        (f"{MIXTRAL}.1.w2.weight", (MIXTRAL, 3, 1, "down", "weight")),
        (f"{MIXTRAL}.1.w3.weight", (MIXTRAL, 3, 1, "up", "weight")),
        (f"{MIXTRAL}.1.gate_proj.weight_packed", (MIXTRAL, 3, 1, "gate", "weight_packed")),
        (f"{QWEN}.1.w3.g_idx", (QWEN, 3, 1, "up", "g_idx")),
        (f"{QWEN}.gate_up_proj", (QWEN, 3, None, "gate_up", "weight")),
        (f"{QWEN}.gate_up_proj.weight", (QWEN, 3, None, "gate_up", "weight")),
        (f"{QWEN}.gate_up_proj_scale_inv", (QWEN, 3, None, "gate_up", "scale_inv")),
        (f"{QWEN}.gate_up_proj_blocks", (QWEN, 3, None, "gate_up", "blocks")),
        (f"{QWEN}.down_proj_bias", (QWEN, 3, None, "down", "bias")),
        (f"{QWEN}.down_proj", (QWEN, 3, None, "down", "weight")),
        (
            "model.layers.3.block_sparse_moe.input_linear.weight",
            ("model.layers.3.block_sparse_moe", 3, None, "gate_up", "weight"),
        ),
        (
            "model.layers.3.block_sparse_moe.output_linear.weight",
            ("model.layers.3.block_sparse_moe", 3, None, "down", "weight"),
        ),
        (
            "backbone.layers.12.mixer.experts.4.up_proj.weight",
            ("backbone.layers.12.mixer.experts", 12, 4, "up", "weight"),
        ),
        ("backbone.layers.12.mixer.experts.up_proj", ("backbone.layers.12.mixer.experts", 12, None, "up", "weight")),
        (
            "language_model.model.layers.0.feed_forward.experts.gate_up_proj",
            ("language_model.model.layers.0.feed_forward.experts", 0, None, "gate_up", "weight"),
        ),
        ("layers.0.experts.5.w1.weight", ("layers.0.experts", 0, 5, "gate", "weight")),
    ],
)
def test_spellings(name: str, expected: tuple[str, int, int | None, str, str]):
    assert expert_name(name) == ExpertName(*expected)
    assert in_experts(name) or "linear" in name
    assert not is_draft(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.3.mlp.shared_expert.up_proj.qweight",
        "model.layers.3.mlp.shared_expert_gate.weight",
        "model.layers.3.shared_mlp.input_linear.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.mlp.router.weight",
        "model.layers.3.block_sparse_moe.router.weight",
        "model.layers.3.block_sparse_moe.gate.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
        "experts.0.gate_proj.weight",
        "experts",
        "",
    ],
)
def test_names_of_no_expert(name: str):
    assert expert_name(name) is None
    assert not in_experts(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{QWEN}.3.gate_up_proj.weight",
        f"{QWEN}.3.gate_proj.lora_A.weight",
        f"{QWEN}.3.gate_proj.weight.absmax",
        f"{QWEN}.3.gate_proj",
        f"{QWEN}.3.fc1.weight",
        f"{QWEN}.fc1.weight",
        f"{QWEN}.gate_up_projection",
        f"{QWEN}.expert_bias",
        f"{QWEN}.-1.gate_proj.weight",
        f"{QWEN}.1e3.gate_proj.weight",
        f"{QWEN}.{'9' * 5000}.gate_proj.weight",
        f"{QWEN}.\u0663.gate_proj.weight",  # a digit, but not one of ours
        QWEN,
    ],
)
def test_names_inside_the_experts_that_say_nothing_known(name: str):
    assert expert_name(name) is None
    assert in_experts(name)


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("mtp.layers.0.mlp.experts.3.gate_proj.weight", True),
        ("model.mtp.fc.weight", True),
        ("model.mtp_block.0.mlp.experts.3.gate_proj.weight", True),
        ("model.mtp_layers.0.norm.weight", True),
        ("model.layers.61.mlp.experts.3.gate_proj.weight", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_layers_that_predict_further_tokens(name: str, draft: bool):
    assert is_draft(name) is draft


def test_the_last_layer_number_counts():
    parsed = expert_name("model.layers.3.blocks.layers.5.mlp.experts.0.up_proj.weight")
    assert parsed is not None
    assert parsed.layer == 5


def test_a_layer_number_no_model_has():
    assert expert_name(f"model.layers.{'1' * 5000}.mlp.experts.0.up_proj.weight") is None
