"""Frequencies and angles equal to transformers', bit for bit."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.errors import ModelError
from models.families import llama
from models.rope import (
    DynamicScaling,
    FactorScaling,
    RopeSpec,
    cos_sin_table,
    inverse_frequencies,
    parse_scaling,
)

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PARAMETERS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn ramp": {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False},
}


def hf_config(parameters, **changes):
    values = {"hidden_size": 1024, "num_attention_heads": 8, "max_position_embeddings": 131072, **changes}
    return LlamaConfig(**values, rope_parameters={"rope_theta": 500_000.0, **parameters})


def our_rope(config):
    return llama.spec(config.to_dict()).layers[0].attention.rope


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_table_equals_transformers(parameters, head_dim):
    config = hf_config(parameters, head_dim=head_dim)
    positions = torch.tensor([0, 1, 2, 100, 4095])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = cos_sin_table(our_rope(config), 4096, CPU)
    assert table.dtype == torch.float32
    assert table.shape == (4096, 2, head_dim // 2)
    assert torch.equal(table[positions, 0], cos[0, :, : head_dim // 2])
    assert torch.equal(table[positions, 1], sin[0, :, : head_dim // 2])


@pytest.mark.parametrize("num_positions", [100, 4096, 10_000])
def test_dynamic_scaling_beyond_the_window(num_positions):
    config = hf_config({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=4096)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=num_positions)
    rope = RopeSpec(500_000.0, 128, DynamicScaling(4.0, 4096))
    found, factor = inverse_frequencies(rope, num_positions)
    assert torch.equal(found, expected)
    assert factor == 1.0


def test_older_configurations_say_the_same():
    """rope_theta and rope_scaling, as config.json had them before transformers 5."""
    new = hf_config(LLAMA3).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = 500_000.0
    old["rope_scaling"] = {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}
    assert llama.spec(old) == llama.spec(new)


@pytest.mark.parametrize("dim", [0, 7])
def test_elements_are_rotated_in_pairs(dim):
    with pytest.raises(ModelError, match=f"cannot rotate {dim} elements"):
        RopeSpec(10_000.0, dim)


def test_divisors():
    rope = RopeSpec(10_000.0, 8, FactorScaling((1.0, 2.0, 4.0, 8.0)))
    plain, _ = inverse_frequencies(RopeSpec(10_000.0, 8), 10)
    found, _ = inverse_frequencies(rope, 10)
    assert torch.equal(found, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_wrong_number_of_divisors():
    with pytest.raises(ModelError, match="3 RoPE factors for 4"):
        inverse_frequencies(RopeSpec(10_000.0, 8, FactorScaling((1.0, 2.0, 4.0))), 10)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported"),
        ({"rope_type": "linear"}, "'linear' lacks 'factor'"),
        ({"type": "llama3", "factor": 8.0}, "'llama3' lacks 'low_freq_factor'"),
    ],
)
def test_scaling_that_cannot_be_read(parameters, message):
    with pytest.raises(ModelError, match=message):
        parse_scaling(parameters, 4096)
