"""A model of random weights that a CPU runs in milliseconds: qwen3-30b's, small."""

from fanfold.bench.jobs import LayerShape
from fanfold.integrations.transformers.synthetic import MODELS, SyntheticModel
from fanfold.spec import ExpertShape

SIZES = {"vocab_size": 96, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY = SyntheticModel(LayerShape("tiny", ExpertShape(8, 64, 32), 2), 3, {**MODELS["qwen3-30b"].config, **SIZES})
